"""Pallas TPU kernels: compact and expand, with the contract of `kernels.xla`."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import dtypes
from pallas_stash.kernels.copy_runs import copy_runs
from pallas_stash.kernels.pieces import NO_ROW
from pallas_stash.kernels.tiling import (
  choose_tiling,
  LANES,
  round_up,
  row_alignment,
  SUBLANES,
  Tiling,
)
from pallas_stash.ragged import CopyRuns


def compact(
  rows: jax.Array,
  stash: jax.Array,
  runs: CopyRuns,
  *,
  page_rows: int | None = None,
  tiling: Tiling | None = None,
  interpret: Any = False,
  checks_bounds: bool = False,
) -> jax.Array:
  """Copies runs of `rows` [total_rows, width] into `stash` [stash_rows, stash_width], in place.

  Args:
    rows: the source. What it holds outside the runs has no influence.
    stash: the destination, `stash_width >= width`. Rows outside the runs keep every bit; in rows
      inside, columns from `width` on are undefined.
    runs: the copies, whose destinations leave no gap.
    page_rows: or they fill whole pages of so many rows but for the last; tiles divide a page then.
    tiling: static sizes; `choose_tiling` by default.
    interpret: False, or `pltpu.InterpretParams`.
    checks_bounds: whether each DMA is checked to lie inside the buffers, on a TPU.

  Returns:
    The stash. It is the buffer that came in, unless it is copied, as `_to_kernel_layout` says.
  """
  shape, dtype = stash.shape, stash.dtype
  is_strict = bool(interpret) or checks_bounds
  destination = _to_kernel_layout(stash, shape[1], interpret, is_strict)
  source = _to_kernel_layout(rows, shape[1], interpret, is_strict)
  tiling = tiling or choose_tiling(destination.shape[1], dtype.itemsize, page_rows)
  window = jnp.stack([*_rows_covered(runs), jnp.int32(0), jnp.int32(0)])
  # Between pages there may be anything: half of the window may have most of the rows.
  middle = None if page_rows is None else middle_of_runs(runs)
  out = copy_runs(source, destination, runs, window, tiling, interpret, checks_bounds, middle)
  return _from_kernel_layout(out, shape, dtype)


def expand(
  stash: jax.Array,
  runs: CopyRuns,
  blank: jax.Array,
  fill: jax.Array | None = None,
  *,
  total_rows: int,
  width: int,
  tiling: Tiling | None = None,
  interpret: Any = False,
  checks_bounds: bool = False,
) -> jax.Array:
  """Copies runs of `stash` [stash_rows, stash_width] into a new buffer [total_rows, width].

  Args:
    stash: the source. What it holds outside the runs has no influence.
    runs: the copies.
    blank: scalar of the stash's dtype: what every element outside the runs is set to.
    fill: bool[]: if false, what is outside the runs is undefined, and most of it is not written.
      None for true.
    total_rows: static, rows of the new buffer.
    width: static, columns of the new buffer, `width <= stash_width`.
    tiling: static sizes; `choose_tiling` by default.
    interpret: False, or `pltpu.InterpretParams`.
    checks_bounds: whether each DMA is checked to lie inside the buffers, on a TPU.

  Returns:
    The new buffer. The stash is first copied where `_to_kernel_layout` says so.
  """
  is_strict = bool(interpret) or checks_bounds
  source = _to_kernel_layout(stash, stash.shape[1], interpret, is_strict)
  padded_rows = round_up(total_rows, row_alignment(stash.dtype.itemsize))
  first, last = jnp.int32(0), jnp.int32(padded_rows)
  if fill is not None:
    # What is left undefined is not shared among the cores either.
    first_covered, last_covered = _rows_covered(runs)
    first, last = jnp.where(fill, first, first_covered), jnp.where(fill, last, last_covered)
  is_filled = jnp.int32(1) if fill is None else fill.astype(jnp.int32)
  window = jnp.stack([first, last, _repeat_in_word(blank), is_filled])
  shape = _kernel_shape((total_rows, width), source.shape[1], source.dtype, is_strict)
  new = jax.ShapeDtypeStruct(shape, source.dtype)
  out = copy_runs(source, new, runs, window, tiling, interpret, checks_bounds)
  return _from_kernel_layout(out, (total_rows, width), stash.dtype)


def _rows_covered(runs):
  """Returns the first and last (exclusive) destination row of the runs; (0, 0) if there is none."""
  occupied = runs.sizes > 0
  first = jnp.min(jnp.where(occupied, runs.destinations, NO_ROW))
  last = jnp.max(jnp.where(occupied, runs.destinations + runs.sizes, 0))
  return jnp.minimum(first, last), last


def middle_of_runs(runs):
  """Returns the destination row that halves the rows of the runs, wherever these are."""
  # Compared with each other in one pass: a cumulative sum is several.
  is_before = runs.destinations < runs.destinations[:, None]
  before = jnp.sum(jnp.where(is_before, runs.sizes, 0), axis=1, dtype=jnp.int32)
  half = (jnp.sum(runs.sizes, dtype=jnp.int32) + 1) // 2
  inside = jnp.clip(half - before, 0, runs.sizes)
  return jnp.max(jnp.where(inside > 0, runs.destinations + inside, 0))


def _to_kernel_layout(array, width, interpret, is_strict):
  """Returns `array` in a shape and a dtype that the kernel takes.

  Mosaic does not take every dtype, and XLA on a CPU, which interprets, computes with small floats.
  The kernel only moves bits, so it is given integers. What is of another shape is copied.
  """
  if interpret or not dtypes.is_of_mosaic(array.dtype):
    array = dtypes.as_integers(array)
  shape = _kernel_shape(array.shape, width, array.dtype, is_strict)
  padding = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
  return jnp.pad(array, padding) if shape != array.shape else array


def _kernel_shape(shape, width, dtype, is_strict):
  """Returns the shape, as that, of an array with the columns of `width` in whole HBM tiles.

  In HBM the last tile of rows and of columns is whole, whatever the shape says, and the kernel
  moves it as it lies. Not where that is looked at more closely, `is_strict`, by the interpreter or
  the chip's own bounds checks; and not of fewer rows than `SUBLANES`, which XLA tiles in another
  way, nor of one-byte elements, of which DMAs move more rows than XLA's tiles have.
  """
  rows, columns = shape
  align = row_alignment(dtype.itemsize)
  if is_strict or rows < SUBLANES or align > SUBLANES:
    rows = round_up(rows, align)
  if is_strict or round_up(columns, LANES) != round_up(width, LANES):
    columns = round_up(width, LANES)
  return rows, columns


def _from_kernel_layout(array, shape, dtype):
  if array.shape != shape:
    array = array[: shape[0], : shape[1]]
  return dtypes.bit_cast(array, dtype)


def _repeat_in_word(value):
  """Returns the bits of a scalar, repeated to fill an int32."""
  bits = 8 * value.dtype.itemsize
  word = lax.bitcast_convert_type(value, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
  repeated = word * jnp.uint32(sum(1 << shift for shift in range(0, 32, bits)))
  return lax.bitcast_convert_type(repeated, jnp.int32)
