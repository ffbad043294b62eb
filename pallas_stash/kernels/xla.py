"""Compact and expand in plain lax, for every backend, with the contract of `kernels.mosaic_tpu`.

Runs are copied by dynamic slices in loops whose trip counts are known on the device, so the cost
follows the routed rows. All indices are row numbers: no element offset can pass int32. What XLA on
a CPU would compute with, rather than move, is moved as integers.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_stash import dtypes
from pallas_stash.kernels.int32 import div, repeat
from pallas_stash.ragged import CopyRuns
from pallas_stash.varying import empty, mesh_alike, vary_over, varying_axes

LARGE_CHUNK_BYTES = 2**21
SMALL_CHUNK_ROWS = 32
COLUMN = np.int32(0)  # An int would be int64 under `jax_enable_x64`, and no row is.


def compact(
  rows: jax.Array, stash: jax.Array, runs: CopyRuns, *, page_rows: int | None = None
) -> jax.Array:
  """Copies runs of `rows` [total_rows, width] into `stash` [stash_rows, stash_width], in place.

  Args:
    rows: the source. What it holds outside the runs has no influence.
    stash: the destination, `stash_width >= width`. Rows outside the runs keep every bit, and so do
      the columns from `width` on.
    runs: the copies.
    page_rows: has no influence: no rows but those of the runs are written.

  Returns:
    The stash; in place where XLA may overwrite it (a loop carry, a donated or temporary buffer) and
    updates its dtype. On a CPU it does not update small floats: those take a pass over the stash.
  """
  del page_rows
  moved = dtypes.bit_cast(stash, dtypes.moved_by_xla(stash.dtype))
  return dtypes.bit_cast(_copy_runs(rows, moved, runs), stash.dtype)


def expand(
  stash: jax.Array,
  runs: CopyRuns,
  blank: jax.Array,
  fill: jax.Array | None = None,
  *,
  total_rows: int,
  width: int,
) -> jax.Array:
  """Copies runs of `stash` [stash_rows, stash_width] into a new buffer [total_rows, width].

  Args:
    stash: the source. What it holds outside the runs has no influence.
    runs: the copies.
    blank: scalar of the stash's dtype: what every element outside the runs is set to.
    fill: bool[]: if false, what is outside the runs is undefined, and not written where XLA can
      leave memory as it is (not on a CPU). None for true.
    total_rows: static, rows of the new buffer.
    width: static, columns of the new buffer, `width <= stash_width`.

  Returns:
    The new buffer.
  """
  dtype = dtypes.moved_by_xla(stash.dtype)
  blanks = lambda: lax.broadcast(dtypes.as_integers(blank), (total_rows, width))
  full = lambda: dtypes.bit_cast(blanks(), dtype)
  nothing = lambda: vary_over(empty((total_rows, width), dtype), varying_axes(blank))
  out = full() if fill is None else lax.cond(fill, full, nothing)
  return dtypes.bit_cast(_copy_runs(stash, out, runs), stash.dtype)


def _copy_runs(source, destination, runs):
  """Copies each run: large chunks, then small ones, then what is smaller than a small chunk.

  The dtypes of source and destination have the same size, and the bits are copied.
  """
  source, destination = mesh_alike(source, destination)
  columns = min(source.shape[1], destination.shape[1])
  most_rows = min(source.shape[0], destination.shape[0])
  row_bytes = columns * source.dtype.itemsize
  large = min(most_rows, max(SMALL_CHUNK_ROWS, LARGE_CHUNK_BYTES // row_bytes))
  small = min(most_rows, SMALL_CHUNK_ROWS)

  def copy_run(run, destination):
    from_row, to_row, size = runs.sources[run], runs.destinations[run], runs.sizes[run]

    def copy_chunk(rows, offset, destination):
      chunk = _load(source, from_row + offset, rows, columns)
      return _store(destination, chunk, to_row + offset)

    large_chunks = div(size, large)
    copy_large = lambda i, destination: copy_chunk(large, i * large, destination)
    destination = repeat(large_chunks, copy_large, destination)

    # The last small chunk ends with the run, so it may repeat rows of the one before it.
    rest = size - large_chunks * large
    small_chunks = jnp.where(size >= small, div(rest + small - 1, small), 0)
    offset = lambda i: jnp.minimum(large_chunks * large + i * small, size - small)
    copy_small = lambda i, destination: copy_chunk(small, offset(i), destination)
    destination = repeat(small_chunks, copy_small, destination)

    # A run that is smaller is merged into the rows around it. XLA would gather its rows before the
    # loop, be it entered or not, were it not for a zero that seems to depend on the counter.
    merge = lambda i, destination: _merge_rows(
      source, destination, from_row + jnp.minimum(i, 0), to_row, size, small, columns
    )
    is_smaller = (size > 0) & (size < small)
    return repeat(is_smaller.astype(jnp.int32), merge, destination)

  return repeat(np.int32(runs.sizes.shape[0]), copy_run, destination)


def _merge_rows(source, destination, from_row, to_row, size, rows, columns):
  """Copies `size <= rows` rows; reads and writes `rows` rows, wherever they fit both buffers."""
  load_row = jnp.minimum(from_row, source.shape[0] - rows)
  store_row = jnp.minimum(to_row, destination.shape[0] - rows)
  loaded = dtypes.as_integers(_load(source, load_row, rows, columns))
  old = dtypes.as_integers(_load(destination, store_row, rows, columns))
  row = jnp.arange(rows, dtype=jnp.int32) + store_row - to_row
  is_copied = (row >= 0) & (row < size)
  new = jnp.take(loaded, jnp.clip(row + from_row - load_row, 0, rows - 1), axis=0)
  merged = jnp.where(is_copied[:, None], new, old)
  return _store(destination, dtypes.bit_cast(merged, destination.dtype), store_row)


def _load(array, row, rows, columns):
  """Returns `rows` rows from a row on, in the dtype that XLA moves."""
  dtype = dtypes.moved_by_xla(array.dtype)
  if dtype != array.dtype:
    # Bits first, then rows: XLA fuses that, and would convert what it slices as floats. It is not
    # to cast all the rows in front of the loop, so they seem to depend on the turn.
    array, row = lax.optimization_barrier((array, row))
  return lax.dynamic_slice(dtypes.bit_cast(array, dtype), (row, COLUMN), (rows, columns))


def _store(array, rows, row):
  return lax.dynamic_update_slice(array, rows, (row, COLUMN))
