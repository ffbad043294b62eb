"""Faults to plant in copies of the kernels: the classic mistakes of DMA pipelines, one by one.

No fault makes a kernel wait for a DMA that never started: interpreted, that hangs.
"""

from pallas_stash.kernels import pieces, tile_words
from tests.helpers.kernel_check import UNEVEN
from tests.helpers.planting import Fault

COMPACT, EXPAND = "compact", "expand"
NOTHING = "pass"
TWO_CORES = (("num_cores_or_threads", 2),)
EAGER = (("dma_execution_mode", "eager"),)


def _in_plan(*args, **options):
  return Fault(*args, module=pieces, **options)


def _in_words(*args, **options):
  return Fault(*args, module=tile_words, dtype="bfloat16", **options)


WAITS = [
  Fault(
    "a load is not waited for",
    COMPACT,
    "self.load(slot, ZERO, ZERO, piece.load_rows).wait()",
    "None",
  ),
  Fault(
    "the read of an edge is not waited for",
    COMPACT,
    "    copy.start()\n    copy.wait()\n",
    "    copy.start()\n",
  ),
  Fault(
    "a kernel ends with stores in flight",
    EXPAND,
    "repeat(number, lambda slot, _, slots=slots: self.finish_stores(slots, slot), None)",
    NOTHING,
  ),
  Fault(
    "rows leaving are forgotten, so no store is waited for",
    COMPACT,
    "slots.rows_leaving[slot] = slots.rows_leaving[slot] + last - first",
    NOTHING,
  ),
  Fault(
    "a landing slot is loaded while it is stored from",
    COMPACT,
    "self.finish_stores(self.landing, free_slot)",
    NOTHING,
  ),
  Fault(
    "an assembly slot is filled while it is stored from",
    EXPAND,
    "self.finish_stores(self.assembly, tile.slot)\n        self.open_tile(tile)",
    "self.open_tile(tile)\n        self.finish_stores(self.assembly, tile.slot)",
  ),
  Fault(
    "an assembly slot is never waited for before it is used again",
    COMPACT,
    "self.finish_stores(self.assembly, tile.slot)",
    NOTHING,
  ),
  Fault("as many loads ahead as slots", COMPACT, "IDLE_SLOTS = 2", "IDLE_SLOTS = 0"),
  _in_plan(
    "a load is started that no one waits for",
    COMPACT,
    "tiles._replace(last_row=jnp.where(last == count, window_last, tiles.row_of(last)))",
    "tiles",
    interpret=EAGER,
  ),
]

SIZES = [
  _in_plan(
    "a load is an HBM tile short",
    COMPACT,
    "load_rows = align_up(in_hbm_tile + last - first, alignment)",
    "load_rows = align_down(in_hbm_tile + last - first, alignment)",
  ),
  _in_plan(
    "a load is an HBM tile too long",
    EXPAND,
    "load_rows = align_up(in_hbm_tile + last - first, alignment)",
    "load_rows = alignment + align_up(in_hbm_tile + last - first, alignment)",
  ),
  Fault(
    "a store is an HBM tile short",
    COMPACT,
    "last = self.align_up(jnp.where(",
    "last = self.align_down(jnp.where(",
  ),
  Fault(
    "a store is an HBM tile too long",
    COMPACT,
    "last = self.align_up(jnp.where(",
    "last = self.tiling.row_alignment + self.align_up(jnp.where(",
  ),
  Fault(
    "a store starts at the first piece",
    EXPAND,
    "first = self.align_down(jnp.where(is_filled == 0, first_merged, 0))",
    "first = self.align_down(first_merged)",
  ),
  Fault(
    "a store starts at the last piece",
    EXPAND,
    "first_merged = jnp.where(first_merged < 0, piece.first, first_merged)",
    "first_merged = piece.first",
  ),
  Fault(
    "what is undefined is stored with each piece's last block",
    EXPAND,
    "self.align_up(piece.last) <= self.block_down(next_piece.first)",
    "piece.last <= next_piece.first",
  ),
  Fault(
    "the window ends a row early",
    COMPACT,
    "(window[i] for i in range(4))",
    "(window[i] - (i == 1) for i in range(4))",
  ),
  Fault(
    "the window starts a row late",
    COMPACT,
    "(window[i] for i in range(4))",
    "(window[i] + (i == 0) for i in range(4))",
  ),
]

PLACES = [
  Fault("all loads signal one semaphore", EXPAND, "landing.loads.at[slot]", "landing.loads.at[0]"),
  Fault("all stores signal one semaphore", EXPAND, "slots.stores.at[slot]", "slots.stores.at[0]"),
  Fault("all loads land in one slot", COMPACT, "landing.tiles.at[slot, ", "landing.tiles.at[0, "),
  Fault(
    "all stores leave from one slot",
    COMPACT,
    "tile = slot if slots.tiles.shape[0] > 1 else ZERO",
    "tile = 0",
  ),
  Fault(
    "pieces of a tile go to different slots",
    COMPACT,
    "tile_slot = jnp.where(is_first_piece, self.assembly.before(turn.tile_slot), turn.tile_slot)",
    "tile_slot = self.assembly.before(turn.tile_slot)",
  ),
  Fault(
    "each piece of a tile opens it again",
    COMPACT,
    "@_when_seldom(is_first_piece)",
    "@_when_seldom(piece.tile >= 0)",
  ),
  _in_plan(
    "rows that are to move down land before their place",
    COMPACT,
    "landing_row = align_up(first - in_hbm_tile, alignment)",
    "landing_row = align_down(first, alignment)",
  ),
  Fault(
    "rows at odd places are stored as they landed",
    EXPAND,
    "is_ready = is_whole_tile & is_aligned",
    "is_ready = is_whole_tile",
  ),
  Fault(
    "a tile of several pieces is stored as it landed",
    EXPAND,
    "is_ready = is_whole_tile & is_aligned",
    "is_ready = is_aligned & (piece.first == 0)",
  ),
  Fault(
    "the stash does not alias the result",
    COMPACT,
    "input_output_aliases={len(scalars) + 1: 0} if updated else {}",
    "input_output_aliases={}",
  ),
]

SHARED = [
  Fault(
    "an HBM tile that two pieces share is not copied",
    EXPAND,
    "self.landing.tiles[slot, hbm_tile(piece.first + piece.shift)] = shared",
    NOTHING,
  ),
  Fault(
    "it is copied from the slot before the last",
    COMPACT,
    "self.landing.before(slot)]",
    "self.landing.before(slot, by=2)]",
  ),
  _in_plan(
    "it is copied from where the piece starts",
    EXPAND,
    "landed_at=last + shift",
    "landed_at=first + shift",
  ),
  Fault(
    "it is copied to where the load goes",
    COMPACT,
    "hbm_tile(piece.first + piece.shift)",
    "hbm_tile(self.align_up(piece.first + piece.shift))",
  ),
  _in_plan(
    "every HBM tile is taken for shared",
    COMPACT,
    "is_continued = (source_row == position.landed) & (in_hbm_tile != 0)",
    "is_continued = in_hbm_tile != 0",
  ),
  _in_plan(
    "a whole HBM tile is taken for shared",
    COMPACT,
    "is_continued = (source_row == position.landed) & (in_hbm_tile != 0)",
    "is_continued = source_row == position.landed",
  ),
  Fault(
    "the first piece of a core takes an HBM tile from the core before it",
    EXPAND,
    "pieces.first_position(self.tiles)",
    "pieces.first_position(self.tiles)._replace("
    "landed=self.tiles.row_of(self.tiles.first) + self.runs.offsets[0])",
  ),
]

CONTENTS = [
  Fault(
    "the block before the window is not read",
    COMPACT,
    "pl.when(tile.row < self.window.first)",
    "pl.when(tile.row < 0)",
  ),
  Fault(
    "the block behind the window is not read",
    COMPACT,
    "pl.when(ends_inside)",
    "pl.when(tile.row < 0)",
  ),
  Fault(
    "an assembled tile is not blank before",
    EXPAND,
    "pl.when(self.window.is_filled != 0)(lambda: self.fill(self.assembly",
    "pl.when(self.window.is_filled > 1)(lambda: self.fill(self.assembly",
  ),
  Fault(
    "the blank tile is not blank",
    EXPAND,
    "pl.when(self.window.is_filled != 0)(lambda: self.fill(self.blank",
    "pl.when(self.window.is_filled > 1)(lambda: self.fill(self.blank",
  ),
  Fault(
    "rows behind the window are lost where two pieces end in its last block",
    COMPACT,
    "ends_exactly = (self.window.is_filled != 0) | (last > tile.rows)",
    "ends_exactly = self.window.is_filled != 0",
  ),
  Fault(
    "rows between pieces are not blank",
    EXPAND,
    "ends_exactly = (self.window.is_filled != 0) | (last > tile.rows)",
    "ends_exactly = last > tile.rows",
  ),
  Fault(
    "a blank tile is skipped",
    EXPAND,
    "store_blank_tiles(turn.tile + 1, piece.tile)",
    "store_blank_tiles(turn.tile + 2, piece.tile)",
  ),
  Fault(
    "the last blank tiles are skipped",
    EXPAND,
    "self.store_blank_tiles(turn.tile + 1, self.tiles.last)",
    NOTHING,
  ),
  Fault(
    "a blank tile passes the end",
    EXPAND,
    "jnp.minimum(self.tiling.tile_rows, self.window.last - row)",
    "self.tiling.tile_rows",
    case=UNEVEN,
  ),
]

CORES = [
  _in_plan(
    "no core has the last tile",
    COMPACT,
    "share = div(count + CORES - 1, CORES)",
    "share = div(count, CORES)",
  ),
  _in_plan(
    "a tile is between the shares of the cores",
    EXPAND,
    "first = jnp.minimum(core * share, count)",
    "first = jnp.minimum(core * (share + 1), count)",
  ),
  _in_plan(
    "both cores write a tile",
    COMPACT,
    "last = jnp.minimum(first + share, count)",
    "last = jnp.minimum(first + share + 1, count)",
    interpret=TWO_CORES,
  ),
]

WORDS = [
  _in_words("what is merged is not masked", COMPACT, "if mask is not None:", "if False:"),
  _in_words("a merge starts at a block", COMPACT, "(row >= first) & (row < last)", "row < last"),
  _in_words("a merge ends at a block", COMPACT, "(row >= first) & (row < last)", "row >= first"),
  _in_words("a merge starts a row late", EXPAND, "(row >= first) &", "(row > first) &"),
  _in_words("a merge ends a row late", COMPACT, "& (row < last)", "& (row <= last)"),
  _in_words(
    "the next block is not looked at", EXPAND, "landed.load(block + 1)", "landed.load(block)"
  ),
  _in_words("half words are not moved", EXPAND, "if word_rows == 1:", "if True:"),
  _in_words(
    "whole words are joined with the next",
    COMPACT,
    "words + jnp.minimum(rest, 1)",
    "words + 1",
  ),
  _in_words(
    "rows in a word are numbered backwards",
    EXPAND,
    "(row_bits * row_in_word)",
    "(row_bits * (word_rows - 1 - row_in_word))",
  ),
]

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
  _in_plan(
    "an alignment is promised that is not there",
    COMPACT,
    "pl.multiple_of(row & -alignment, alignment)",
    "pl.multiple_of(row & -alignment, 4 * alignment)",
    reason="the interpreter ignores promises",
  ),
  _in_plan(
    "both cores write a tile, one after the other",
    COMPACT,
    "last = jnp.minimum(first + share, count)",
    "last = jnp.minimum(first + share + 1, count)",
    reason="both write the same rows: a race where there are two cores, and lost time with one",
  ),
  _in_words(
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
