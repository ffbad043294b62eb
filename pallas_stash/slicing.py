"""`dynamic_update_slice` and `dynamic_slice` that take ragged rows.

Each is the transpose of the other in the rows that it moves, so each one's gradient is the other.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import dtypes, kernels
from pallas_stash.arguments import as_array, as_integer, describe, static_int
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.ragged import as_int32, RaggedRows
from pallas_stash.varying import refuse_sharded, vary_alike


def dynamic_update_slice(
  operand: jax.Array,
  update: jax.Array,
  start_indices: Any,
  *,
  group_sizes: jax.Array | None = None,
  group_starts: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Writes `update` into `operand`; with `group_sizes`, only its ragged rows, tight.

  Without `group_sizes` this is `lax.dynamic_update_slice`. With it, row `group_starts[g] + i` of
  the update becomes row `start + sum(group_sizes[:g]) + i` of the operand, for `i <
  group_sizes[g]`, and every other row of the operand keeps every bit; what the update holds in
  padding has no influence. The cost follows the rows that are written.

  It differs from `lax` in one place: the start is not clamped. A row that would lie past the end of
  the operand (or before its first row) is dropped, rather than moved onto other rows. Groups that
  overlap or lie outside the update write nothing.

  Differentiable in reverse mode. In place under the conditions of `lax.dynamic_update_slice`; on
  TPU the operand is copied if it has fewer than 8 rows, if its elements are of one byte and their
  rows no multiple of 32, and in `debug` if it does not consist of whole HBM tiles.

  One value a row, such as token ids, is [operand_rows], and moved as a buffer of one column. On a
  TPU it lies in HBM as 128 columns, 512 bytes of temporary memory a row of four bytes: 160 MiB for
  262,144 of them and 65,536 to write. With `implementation="xla"` it is 1 MiB at most, and a loop
  moves 32 rows a step.

  Args:
    operand: any array; with `group_sizes`, [operand_rows, width] or [operand_rows].
    update: any array that `lax` takes; with `group_sizes`, [total_rows, width] or [total_rows].
    start_indices: one integer for each axis of the operand; negative ones count from the end. With
      `group_sizes` whole rows are written, so that the second has no effect (`lax` clamps it to 0).
    group_sizes: int[groups], rows of each group.
    group_starts: int[groups], first row of each group in the update; None: the exclusive cumulative
      sum of `group_sizes`.
    implementation: "mosaic", "mosaic_interpret" or "xla"; None: by the platform that the program is
      lowered for, and "xla" there too for a dtype that Mosaic does not take. No effect without
      `group_sizes`.

  Returns:
    An array of the operand's shape and dtype.

  Raises:
    ValueError: with `group_sizes`, for other ranks than 1 and 2, ranks, widths or dtypes that
      differ, a dtype that nothing moves (float6, int1) or that `implementation` does not, or
      anything that `RaggedRows` refuses; where the program is lowered for a TPU, float64 and
      two-bit integers.
  """
  if group_sizes is None:
    _refuse_starts(group_starts)
    return lax.dynamic_update_slice(operand, update, start_indices)
  operand, update = as_array("operand", operand), as_array("update", update)
  start = _first_row(operand, start_indices)
  if update.ndim != operand.ndim:
    raise ValueError(f"update of shape {update.shape} must have rank {operand.ndim}, as operand.")
  if update.shape[1:] != operand.shape[1:]:
    raise ValueError(f"{update.shape=} must have the width of {operand.shape=}: rows are whole.")
  if update.dtype != operand.dtype:
    raise ValueError(f"{update.dtype=} must equal {operand.dtype=}.")
  _check_dtype(operand.dtype, implementation)
  ragged = RaggedRows(group_sizes, update.shape[0], group_starts)
  refuse_sharded(operand=operand, update=update, start_indices=start, ragged=ragged)
  columns = _as_columns(operand), _as_columns(update)
  out = _update(implementation, *vary_alike(*columns, start, ragged))
  return out.reshape(operand.shape)


def dynamic_slice(
  operand: jax.Array,
  start_indices: Any,
  slice_sizes: Sequence[int],
  *,
  group_sizes: jax.Array | None = None,
  group_starts: jax.Array | None = None,
  padding: Padding = "zero",
  implementation: Implementation | None = None,
) -> jax.Array:
  """Reads a slice of `operand`; with `group_sizes`, tight rows back to where their groups are.

  Without `group_sizes` this is `lax.dynamic_slice`. With it, row `start + sum(group_sizes[:g]) + i`
  of the operand becomes row `group_starts[g] + i` of the result, for `i < group_sizes[g]`, and
  padding is zero, or what `padding` says. Zero is the value whose bits are all 0: of
  float8_e8m0fnu, which has no other, that is 2**-127.

  It differs from `lax` in one place: the start is not clamped. A row that lies past the end of the
  operand (or before its first row) reads as padding. Groups that overlap or lie outside the result
  read as NaN everywhere (as zero in a dtype that has none).

  Differentiable in reverse mode.

  Args:
    operand: any array; with `group_sizes`, [operand_rows, width] or [operand_rows].
    start_indices: one integer for each axis of the operand; negative ones count from the end. With
      `group_sizes` whole rows are read, so that the second has no effect (`lax` clamps it to 0).
    slice_sizes: static size of the result in each axis; with `group_sizes`, (total_rows, width) or
      (total_rows,).
    group_sizes: int[groups], rows of each group.
    group_starts: int[groups], first row of each group in the result; None: the exclusive cumulative
      sum of `group_sizes`.
    padding: "zero"; or "undefined", which holds anything, NaN included, and on a TPU is not
      written: at 25% occupancy zeros are three quarters of what is. No effect without
      `group_sizes`.
    implementation: "mosaic", "mosaic_interpret" or "xla"; None: by the platform that the program is
      lowered for, and "xla" there too for a dtype that Mosaic does not take. No effect without
      `group_sizes`.

  Returns:
    An array of shape `slice_sizes` and the operand's dtype.

  Raises:
    ValueError: for an unknown `padding`; with `group_sizes`, for other ranks than 1 and 2, a rank
      or width other than the operand's, or anything else that `dynamic_update_slice` refuses.
  """
  kernels.check_padding(padding)
  if group_sizes is None:
    _refuse_starts(group_starts)
    return lax.dynamic_slice(operand, start_indices, slice_sizes)
  operand = as_array("operand", operand)
  start = _first_row(operand, start_indices)
  try:
    slice_sizes = tuple(slice_sizes)
  except TypeError as error:
    described = describe(slice_sizes)
    raise ValueError(f"slice_sizes={described} must be (total_rows, width).") from error
  slice_sizes = tuple(static_int(f"slice_sizes[{i}]", size) for i, size in enumerate(slice_sizes))
  if len(slice_sizes) != operand.ndim or slice_sizes[1:] != operand.shape[1:]:
    what = "(total_rows,) for" if operand.ndim == 1 else "(total_rows, width) with the width of"
    raise ValueError(f"{slice_sizes=} must be {what} {operand.shape=}.")
  _check_dtype(operand.dtype, implementation)
  ragged = RaggedRows(group_sizes, slice_sizes[0], group_starts)
  refuse_sharded(operand=operand, start_indices=start, ragged=ragged)
  out = _slice(implementation, padding, *vary_alike(_as_columns(operand), start, ragged))
  return out.reshape(slice_sizes)


def _as_columns(array):
  return array if array.ndim == 2 else array[:, None]


def _refuse_starts(group_starts):
  if group_starts is not None:
    raise ValueError("group_starts must come with group_sizes.")


def _check_dtype(dtype, implementation):
  if not dtypes.is_moved(dtype):
    raise ValueError(f"operand of dtype {dtype} must have another where rows are ragged.")
  kernels.check_implementation(implementation, dtype)


def _first_row(operand, start_indices):
  """Returns the start row as int32[], negative ones counted from the end as in `lax`."""
  if operand.ndim not in (1, 2):
    raise ValueError(f"operand of shape {operand.shape} must have rank 1 or 2: rows are ragged.")
  has_axes = isinstance(start_indices, list | tuple) or getattr(start_indices, "ndim", 0) == 1
  if not has_axes or len(start_indices) != operand.ndim:
    start_indices = describe(start_indices)
    raise ValueError(f"{start_indices=!s} must have one entry for each axis of {operand.shape=}.")
  start, *_ = (as_integer("start index", start_indices[axis]) for axis in range(operand.ndim))
  start = as_int32(start)
  return jnp.where(start < 0, start + operand.shape[0], start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _update(implementation, operand, update, start, ragged):
  runs = ragged.compact_runs(start, operand.shape[0])
  return kernels.compact(update, operand, runs, implementation)


def _update_forward(implementation, operand, update, start, ragged):
  return _update(implementation, operand, update, start, ragged), (start, ragged)


def _update_backward(implementation, residuals, d_out):
  start, ragged = residuals
  if not jnp.issubdtype(d_out.dtype, jnp.inexact):
    return None, None, None, None
  nothing = dtypes.blank(d_out.dtype, (ragged.total_rows, d_out.shape[1]))
  d_operand = _update(implementation, *vary_alike(d_out, nothing, start, ragged))
  d_update = _slice(implementation, "zero", d_out, start, ragged)
  return d_operand, d_update, None, None


_update.defvjp(_update_forward, _update_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _slice(implementation, padding, operand, start, ragged):
  runs = ragged.expand_runs(start, operand.shape[0])
  is_valid = ragged.is_valid()
  blank = dtypes.blank_or_nan(is_valid, operand.dtype)
  fill = None if padding == "zero" else ~is_valid
  _, runs, blank, fill = vary_alike(operand, runs, blank, fill)
  width = operand.shape[1]
  return kernels.expand(operand, runs, ragged.total_rows, width, blank, implementation, fill)


def _slice_forward(implementation, padding, operand, start, ragged):
  out = _slice(implementation, padding, operand, start, ragged)
  return out, (start, ragged, jnp.zeros((operand.shape[0], 0)))


def _slice_backward(implementation, padding, residuals, d_out):
  del padding
  start, ragged, like_operand = residuals
  if not jnp.issubdtype(d_out.dtype, jnp.inexact):
    return None, None, None
  nothing = dtypes.blank(d_out.dtype, (like_operand.shape[0], d_out.shape[1]))
  operands = vary_alike(nothing, d_out, start, ragged)
  return _update(implementation, *operands), None, None


_slice.defvjp(_slice_forward, _slice_backward)
