"""Faults to plant in copies of the kernels: the classic mistakes of DMA pipelines, one by one.

No fault makes a kernel wait for a DMA that never started: interpreted, that hangs.
"""

from tests.helpers.faults_of_dmas import PLACES, SIZES, WAITS
from tests.helpers.faults_of_tiles import CONTENTS, CORES, SHARED, WORDS
from tests.helpers.planting import COMPACT, EXPAND, Fault, in_plan, in_words, NOTHING

UNDETECTED = [
  Fault(
    "any number of blank stores may be in flight",
    EXPAND,
    "self.finish_stores(self.blank, slot)",
    NOTHING,
    reason="they store one tile that stays as it is, and in the end all rows are waited for",
  ),
  Fault(
    "a landing slot is loaded just before the store from it is waited for",
    COMPACT,
    "self.finish_stores(self.landing, free_slot)",
    "self.finish_stores(self.landing, self.landing.before(slot, by=3))",
    reason="a race of two DMAs: neither is reported, and each runs when it is waited for",
  ),
  in_plan(
    "an alignment is promised that is not there",
    COMPACT,
    "pl.multiple_of(row & -alignment, alignment)",
    "pl.multiple_of(row & -alignment, 4 * alignment)",
    reason="the interpreter ignores promises",
  ),
  in_plan(
    "both cores write a tile, one after the other",
    COMPACT,
    "jnp.minimum(share + core * count, count)",
    "jnp.minimum(share + 1 + core * count, count)",
    reason="both write the same rows: a race where there are two cores, and lost time with one",
  ),
  in_words(
    "words are shifted by all of their bits",
    COMPACT,
    "bits((word_rows - rest) & (word_rows - 1))",
    "bits(word_rows - rest)",
    reason="XLA, which interprets, says that this is zero; Mosaic does not say",
  ),
  Fault(
    "half of the VMEM that is needed is asked for",
    COMPACT,
    "vmem_limit_bytes=tiling.vmem_bytes(dtype.itemsize) + 2**21",
    "vmem_limit_bytes=1",
    reason="the interpreter has no limit; programs that are compiled have",
  ),
]

DETECTED = [WAITS, SIZES, PLACES, SHARED, CONTENTS, CORES, WORDS]
