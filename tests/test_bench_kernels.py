"""What the kernel benchmark says of bytes is what the kernels move."""

import collections
import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from bench.traffic import dma_rows, make_layout
from pallas_stash import kernels
from pallas_stash.kernels import mosaic_tpu
from pallas_stash.kernels.tiling import choose_tiling
from pallas_stash.ragged import CopyRuns
from tests.support import ON_TPU

KERNELS = "compact", "expand", "expand_undefined"
TOTAL_ROWS, STASH_ROWS = 512, 256


def count_dma_rows(layout, kernel, tiling, monkeypatch):
  """Interprets a kernel; returns the rows that its DMAs read and wrote in HBM."""
  counts = collections.Counter()

  class CountedCopy:
    def __init__(self, source, destination, semaphore):
      self._copy = make_async_copy(source, destination, semaphore)
      self.wait = self._copy.wait
      # HBM is [rows, columns], VMEM is [slots, rows, columns].
      is_read = len(source.ref.shape) == 2
      self._name = "read" if is_read else "written"
      self._rows = (source if is_read else destination).transforms[-1].indices[0].size

    def start(self):
      count = lambda rows: counts.update({self._name: int(rows)})
      jax.debug.callback(count, jnp.int32(self._rows))
      self._copy.start()

  make_async_copy = pltpu.make_async_copy
  monkeypatch.setattr(pltpu, "make_async_copy", CountedCopy)
  i = np.arange(layout.groups)
  wide, tight, sizes = layout.wide_rows(i), layout.tight_rows(i), layout.sizes(i)
  options = {"tiling": tiling, "interpret": kernels.INTERPRET}
  rows, stash = jnp.zeros((TOTAL_ROWS, 128)), jnp.zeros((STASH_ROWS, 128))
  if kernel == "compact":
    runs = CopyRuns(*map(jnp.int32, (wide, tight, sizes)))
    out = mosaic_tpu.compact(rows, stash, runs, **options)
  else:
    runs = CopyRuns(*map(jnp.int32, (tight, wide, sizes)))
    fill = jnp.bool_(kernel == "expand")
    options |= {"total_rows": TOTAL_ROWS, "width": 128}
    out = mosaic_tpu.expand(stash, runs, jnp.float32(0), fill, **options)
  jax.block_until_ready(out)
  jax.effects_barrier()
  return counts["read"], counts["written"]


@pytest.mark.skipif(ON_TPU, reason="counts the DMAs of interpreted kernels")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
  "name, start", [("prefix", 0), ("prefix", 5), ("run", 3), ("buckets-4", 0), ("ragged-4", 7)]
)
def test_the_formula_counts_the_dmas(kernel, name, start, monkeypatch):
  tiling = dataclasses.replace(choose_tiling(128, 4), tile_rows=32)
  layout = make_layout(name, 128, TOTAL_ROWS, start)
  counted = count_dma_rows(layout, kernel, tiling, monkeypatch)
  assert counted == dma_rows(layout, kernel, TOTAL_ROWS, tiling)
  assert min(counted) >= layout.rows


@pytest.mark.parametrize("name", ["prefix", "run", "buckets-8", "buckets-256", "ragged-256"])
def test_layouts_fit_and_do_not_overlap(name):
  for occupancy in 0.05, 0.25, 0.5, 1.0:
    rows = int(2**18 * occupancy) // 256 * 256
    layout = make_layout(name, rows, 2**18, 3)
    i = np.arange(layout.groups)
    starts, sizes, tight = layout.wide_rows(i), layout.sizes(i), layout.tight_rows(i)
    assert (sizes > 0).all() and starts[0] >= 0 and starts[-1] + sizes[-1] <= 2**18
    assert (starts[:-1] + sizes[:-1] <= starts[1:]).all()
    assert (tight[:-1] + sizes[:-1] == tight[1:]).all()
    assert sizes.sum() == rows


@pytest.mark.parametrize("dtype, width", [("bfloat16", 7168), ("bfloat16", 2048)])
def test_bytes_follow_the_rows(dtype, width):
  """At DeepSeek-V3 size, 25% of the rows routed: a prefix, and one group from an odd row on."""
  total_rows, rows = 2**18, 2**16
  tiling = choose_tiling(width, jnp.dtype(dtype).itemsize)
  for name, start in ("prefix", 0), ("prefix", 5), ("run", 3):
    layout = make_layout(name, rows, total_rows, start)
    read, written = dma_rows(layout, "compact", total_rows, tiling)
    assert read + written <= 1.03 * 2 * rows
    assert 2 * total_rows >= 3.8 * (read + written)
    assert 2 * 1.5 * rows >= 1.45 * (read + written)
    # Where source and destination are not congruent, each tile of rows reads one HBM tile twice.
    most_read = (1.03 if start == 0 else 1.05) * rows
    read, written = dma_rows(layout, "expand", total_rows, tiling)
    assert read <= most_read and written == total_rows
    read, written = dma_rows(layout, "expand_undefined", total_rows, tiling)
    assert read <= most_read and written <= rows + 2 * tiling.tile_rows
