"""Gathers of rows and their gradients, keeping indices only. `permute` says what padding is.

`spread` and `total` are of choices: `row_choices` [total_rows] is the choice of each row, and
`choice_rows` [tokens, top_k] the row of each choice, so that each knows where the other gathers
from: one's gradient is the other. Each gradient is made of these, and can be differentiated again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_stash import dtypes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(num_rows, x, index):
  """Returns the rows of `x`, [num_rows, ...], by any index."""
  del num_rows
  return _copy(x, index)


def _gather_forward(num_rows, x, index):
  return gather(num_rows, x, index), index


def _gather_backward(num_rows, index, d_out):
  if not jnp.issubdtype(d_out.dtype, jnp.inexact):
    return None, None
  # Deselected, and added to a row that there is: nothing is left to a scatter that drops rows.
  is_row = (index >= 0) & (index < num_rows)
  d_rows = _wide(d_out)
  d_rows = jnp.where(_over(is_row, d_rows), d_rows, jnp.zeros_like(d_rows))
  d_x = jnp.zeros((max(num_rows, 1), *d_out.shape[1:]), d_rows.dtype)
  d_x = d_x.at[jnp.where(is_row, index, 0)].add(d_rows, mode="promise_in_bounds")
  return d_x[:num_rows].astype(d_out.dtype), None


gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def spread(x, row_choices, choice_rows):
  """Returns [total_rows, ...], of `x` [tokens, ...] the token of each row."""
  return _copy(x, row_choices // choice_rows.shape[1])


def _spread_forward(x, *indices):
  return spread(x, *indices), indices


def _spread_backward(indices, d_rows):
  is_differentiable = jnp.issubdtype(d_rows.dtype, jnp.inexact)
  return total(d_rows, None, *indices) if is_differentiable else None, None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def total(rows, weights, row_choices, choice_rows):
  """Returns [tokens, ...], the sum of the rows of each token, times `weights` unless None."""
  del row_choices
  chosen = _wide(_take(rows, choice_rows))
  if weights is not None:
    chosen *= _over(weights, chosen).astype(chosen.dtype)
  out = jnp.sum(chosen, axis=1)
  has_room = _over(jnp.all(choice_rows >= 0, axis=1), out)
  return jnp.where(has_room, out, jnp.full_like(out, jnp.nan)).astype(rows.dtype)


def _total_forward(rows, weights, *indices):
  kept = None if weights is None else (rows, weights)
  return total(rows, weights, *indices), (kept, indices)


def _total_backward(residuals, d_out):
  kept, (row_choices, choice_rows) = residuals
  d_rows = spread(d_out, row_choices, choice_rows)
  if kept is None:
    return d_rows, None, None, None
  rows, weights = kept
  each_choice = row_choices, choice_rows.reshape(-1, 1)
  d_rows, row_weights = _wide(d_rows), spread(weights.reshape(-1), *each_choice)
  # A sum over each row where it lies, NaN in padding: what is gathered is as little as the weights.
  d_weights = jnp.sum(d_rows * _wide(rows), axis=range(1, rows.ndim))
  d_weights = total(d_weights, None, *each_choice).reshape(weights.shape)
  d_rows *= _over(row_weights, d_rows).astype(d_rows.dtype)
  return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None, None


total.defvjp(_total_forward, _total_backward)


def _copy(x, index):
  """Is `_take` bit for bit. XLA for a TPU copies `x` where it is cast to be moved by XLA for a CPU.

  That is little beside the rows: `total`, whose `x` they are, does without.
  """
  moved = dtypes.bit_cast(x, dtypes.moved_by_xla(x.dtype))
  return dtypes.bit_cast(_take(moved, index), x.dtype)


def _take(x, index):
  """Returns [*index.shape, ...], rows of `x`; zero where the index is not of a row."""
  is_row = (index >= 0) & (index < x.shape[0])
  if not x.shape[0]:
    x = jnp.zeros((1, *x.shape[1:]), x.dtype)  # XLA gathers nothing from nothing.
  rows = x.at[jnp.where(is_row, index, 0)].get(mode="promise_in_bounds")
  return dtypes.select(_over(is_row, rows), rows, dtypes.blank(x.dtype))


def _over(values, rows):
  """Returns values with as many axes as `rows`, to be broadcast over those that they have not."""
  return values.reshape(values.shape + (1,) * (rows.ndim - values.ndim))


def _wide(array):
  """Returns an array of float32 at least."""
  return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array
