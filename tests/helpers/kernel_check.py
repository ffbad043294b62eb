"""The check of compact and expand: every implementation against the reference, bit for bit."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_stash import kernels, RaggedRows
from pallas_stash.kernels import mosaic_tpu, xla
from pallas_stash.kernels.tiling import choose_tiling
from tests.helpers import ragged_rows
from tests.helpers.checks import OPTIMIZED
from tests.helpers.support import as_rows, assert_same_bits, GROUPS, nan_of, random_bits


@dataclasses.dataclass(frozen=True)
class Case:
  """Static sizes. Each compiles an interpreted kernel, so there are few."""

  total_rows: int
  width: int
  stash_rows: int
  stash_width: int
  tile_rows: int = 32
  column_blocks: tuple[tuple[int, int], ...] = ((0, 128),)


# Nothing is a multiple of anything: HBM tiles, vector registers, words and lanes are cut.
UNEVEN = Case(101, 100, 69, 130, column_blocks=((0, 256),))
# More tiles for each core than there are slots, so that slots are reused.
MANY_TILES = Case(352, 128, 328, 128)
TWO_BLOCKS = Case(168, 200, 136, 384, tile_rows=64, column_blocks=((0, 256), (256, 128)))
LONG = Case(2**11, 128, 2**12, 128)


@functools.cache
def kernels_of(implementation, case, dtype, interpret=kernels.INTERPRET):
  """Returns `compact(rows, stash, runs)` and `expand(stash, runs, blank, fill)`, jitted."""
  itemsize = jnp.dtype(dtype).itemsize
  if implementation == "xla":
    module, options = xla, {}
  else:
    tiling = dataclasses.replace(
      choose_tiling(case.stash_width + -case.stash_width % 128, itemsize),
      tile_rows=case.tile_rows,
      column_blocks=case.column_blocks,
      landing_slots=4,  # The fewest, so that they are used often.
      assembly_slots=2,
    )
    interpret = implementation == "mosaic_interpret" and interpret
    module, options = mosaic_tpu, {"tiling": tiling, "interpret": interpret}

  def expand(stash, runs, blank, fill):
    like_rows = {"total_rows": case.total_rows, "width": case.width}
    return module.expand(stash, runs, blank, fill, **like_rows, **options)

  def in_large_chunks_of_about_a_tile(kernel):
    chunk_bytes = (case.tile_rows + 9) * case.width * itemsize

    def traced(*args):
      with mock.patch.object(xla, "LARGE_CHUNK_BYTES", chunk_bytes):
        return kernel(*args)

    # Of interpreted kernels nothing is left to the compiler that users have.
    return jax.jit(traced, compiler_options=OPTIMIZED if implementation == "xla" else None)

  compact = functools.partial(module.compact, **options)
  return tuple(map(in_large_chunks_of_about_a_tile, (compact, expand)))


@functools.partial(jax.jit, static_argnums=0)
def copy_runs(case, sizes, starts, start):
  """Returns the runs of compact and of expand, `GROUPS` of each."""
  ragged = RaggedRows(sizes, case.total_rows, starts)
  runs = ragged.compact_runs(start, case.stash_rows), ragged.expand_runs(start, case.stash_rows)
  return jax.tree.map(lambda field: jnp.pad(field, (0, GROUPS - field.shape[0])), runs)


def check(implementation, case, dtype, layout, start, seed=0, **options):
  """Compacts random bits from among NaN into random bits, then expands them from among NaN."""
  compact, expand = kernels_of(implementation, case, dtype, **options)
  to_stash, from_stash = copy_runs(case, *map(as_rows, (*layout, start)))
  ones = lambda length: np.ones((length, 1), np.int8)
  is_read = ragged_rows.expand(ones(case.stash_rows), start, case.total_rows, *layout)[:, 0] == 1
  is_written = ragged_rows.compact(ones(case.total_rows), 0 * ones(case.stash_rows), start, *layout)
  is_written = is_written[:, 0] == 1

  rng = np.random.default_rng(seed)
  bits = lambda *shape: random_bits(rng, shape, dtype)
  rows, stash = bits(case.total_rows, case.width), bits(case.stash_rows, case.stash_width)
  if seed % 2 == 0:
    rows[~is_read] = nan_of(dtype)
  actual = np.asarray(compact(rows, stash, to_stash))
  expected = ragged_rows.compact(rows, stash[:, : case.width], start, *layout)
  assert_same_bits(actual[:, : case.width], expected, message=f"compact {layout} {start}")
  assert_same_bits(actual[~is_written], stash[~is_written], message=f"compact {layout} {start}")

  stash[:, : case.width] = expected
  if seed % 2 == 0:
    stash[~is_written] = nan_of(dtype)
  blank = random_bits(rng, (1,), dtype)[0] if seed % 3 else np.nan
  blank = np.asarray(blank if jnp.issubdtype(dtype, jnp.inexact) else seed - 1).astype(dtype)
  expected = ragged_rows.expand(stash[:, : case.width], start, case.total_rows, *layout)
  expected[~is_read] = blank
  message = f"expand {layout} {start} {blank}"
  assert_same_bits(expand(stash, from_stash, blank, True), expected, message=message)
  if seed % 3 == 0:
    actual = np.asarray(expand(stash, from_stash, blank, False))
    assert_same_bits(actual[is_read], expected[is_read], message=f"{message}, undefined padding")


def edge_cases(case):
  """Yields (layout, start)."""
  rows, stash_rows = case.total_rows, case.stash_rows
  yield ([0] * GROUPS, None), 8
  yield ([rows], [0]), 0
  yield ([rows // GROUPS] * GROUPS, None), -3
  yield ([rows - 13], [13]), 5  # Crosses every tile, shifted by whole words and not.
  yield ([2], [13]), 11  # Within one block, at neither edge.
  yield ([8, 16, 8], [40, 0, 32]), 32  # Aligned groups, out of order.
  yield ([1, 0, 9, 1, 0, 1, 1, 1], [31, 9, 2, 30, 0, 17, 0, 12]), 33  # Many groups, one tile.
  yield ([20, 0, 17, 3], [1, 64, 44, 25]), stash_rows - 35  # Falls past the end.
  # From the last row of a block to within one, and blank tiles between the groups.
  yield ([41, 2, 9, 0, 14], [rows - 42, 15, 1, 0, 17]), 7
  yield ([5, 9], None), stash_rows
