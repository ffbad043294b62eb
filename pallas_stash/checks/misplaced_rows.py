"""Are the rows where `RaggedRows` says? Signs that they are not, for `debug` and `check_padding`.

A function may leave anything in padding, so that no sign is sure: what is here says what it sees,
and changes no value. What a right program shows, too, is in brackets. Said is

- that a residual has data outside of the groups (padding is undefined, or not masked);
- that it has zeros inside besides, as rows that are masked where the groups are not (rows may be
  zero by themselves);
- that rows outside, of a result of the function, hold data and have a cotangent: the loss depends
  on them (they may be no ragged rows at all, or made of no residual, as in a skip connection).

Data is what differs from row to row: padding that is filled with one constant is none. NaN says
nothing: it is what interpreted kernels leave where they write nothing.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_stash.arguments import describe
from pallas_stash.checks.debugging import describe_row, is_debugging, say_if
from pallas_stash.ragged import RaggedRows
from pallas_stash.varying import vary_alike

Keep = Callable[[Any], Any]

# Of the larger one, by which two rows differ that are not the same to rounding, of any dtype.
_SAME = 0.05


def data_outside(rows: jax.Array, is_in_group: jax.Array) -> jax.Array:
  """Returns bool[]: whether rows outside the groups differ from each other.

  Args:
    rows: [total_rows, ...] of a floating-point dtype.
    is_in_group: bool[total_rows].
  """
  flat = _as_matrix(rows)
  is_data = ~is_in_group[:, None] & ~jnp.isnan(flat)
  least = jnp.min(jnp.where(is_data, flat, jnp.inf), axis=0)
  most = jnp.max(jnp.where(is_data, flat, -jnp.inf), axis=0)
  is_same = most - least <= _SAME * jnp.maximum(jnp.abs(least), jnp.abs(most))
  return jnp.any((least < most) & ~is_same)


def zeros_inside(rows: jax.Array, is_in_group: jax.Array) -> jax.Array:
  """Returns int32[]: how many rows in groups are zero; arguments as for `data_outside`."""
  is_zero = jnp.all(_as_matrix(rows) == 0, axis=1)
  return jnp.sum(is_zero & is_in_group, dtype=jnp.int32)


def report_pushed(values: list[jax.Array], ragged: RaggedRows, keep: Keep) -> None:
  """In the mode of `debug`, says which residuals that are pushed seem to have rows elsewhere.

  Args:
    values: [total_rows, *row_shape] each, of a floating-point dtype.
    ragged: where they are pushed from.
    keep: marks values to be saved by an outer `jax.checkpoint`, which runs what prints again, and
      would replay what makes the residuals: `name_slot`.
  """
  if not is_debugging():
    return
  is_in_group, is_valid = ragged.is_in_group(), ragged.is_valid()
  for value in values:
    signs = is_valid & data_outside(value, is_in_group), zeros_inside(value, is_in_group)
    is_outside, zeros = keep(signs)
    outside = f"the residual {describe_row(value)} hold data, which the stash does not keep"
    say_if(
      is_outside & (zeros > 0),
      f"{{zeros}} of {{rows}} rows in groups are zero, and rows outside of the groups of {outside}."
      " Is RaggedRows given the right `group_starts`? (Yes, if rows may be zero by themselves, and"
      " nothing reads those outside.)",
      once=True,
      zeros=zeros,
      rows=ragged.num_rows(),
    )
    say_if(
      is_outside & (zeros == 0),
      f"rows outside of the groups of {outside}. If they are padding, undefined or not masked, then"
      " nothing may read them; else RaggedRows is given wrong `group_starts`, or lacks them.",
      once=True,
    )


def watch_results(results: Any, ragged: RaggedRows, keep: Keep) -> Any:
  """Returns results of a function as they are; in the mode of `debug`, says how they are misused.

  A line is printed in the backward pass if rows outside the groups hold data and have a cotangent:
  then a loss depends on them.

  Args:
    results: any pytree. What has `total_rows` rows and a floating-point dtype is watched.
    ragged: where the rows are.
    keep: as for `report_pushed`.
  """
  if not is_debugging():
    return results
  watch = lambda leaf: _watch(keep, leaf, ragged) if has_rows(leaf, ragged.total_rows) else leaf
  return jax.tree.map(watch, results)


def has_rows(value: jax.Array, total_rows: int) -> bool:
  """Returns whether there are numbers of a floating-point dtype for each row."""
  return jnp.issubdtype(value.dtype, jnp.floating) and value.shape[:1] == (total_rows,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watch(keep, rows, ragged):
  del keep, ragged
  return rows


def _watch_forward(keep, rows, ragged):
  holds_data = ragged.is_valid() & data_outside(*vary_alike(rows, ragged.is_in_group()))
  return rows, (keep(holds_data), ragged)


def _watch_backward(keep, saved, d_rows):
  del keep
  holds_data, ragged = saved
  operands = _as_matrix(d_rows), ragged.is_in_group(), holds_data
  flat, is_in_group, holds_data = vary_alike(*operands)
  is_used = jnp.any((flat != 0) & ~jnp.isnan(flat), axis=1) & ~is_in_group
  count = jnp.sum(is_used, dtype=jnp.int32)
  say_if(
    holds_data & (count > 0),
    f"the loss depends on {{count}} rows outside of the groups of a result, {describe(d_rows)}, and"
    " the stash does not keep what they are made of. Mask them, or give RaggedRows the right"
    " `group_starts`. (Nothing is wrong with rows that are made of no residual, as in a skip"
    " connection, or that are no ragged rows, but tokens, for instance.)",
    once=True,
    count=count,
  )
  return d_rows, None


_watch.defvjp(_watch_forward, _watch_backward)


def _as_matrix(rows):
  flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
  # Not every operation takes every small dtype.
  return flat.astype(jnp.float32) if flat.dtype.itemsize < 4 else flat
