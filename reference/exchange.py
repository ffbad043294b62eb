"""Rows from each device of a mesh axis to each: a ragged all-to-all."""

import functools

import jax
from jax import lax
import jax.numpy as jnp


def exchange_rows(rows, sizes, total_rows, axis_name):
  """Sends each device the rows that are for it. Call it inside a `shard_map`.

  Differentiable in `rows`, whose gradients go the same way back.

  Args:
    rows: [rows, width], those for the first device, those for the second, and so on; then padding,
      which may hold anything.
    sizes: int32[devices, devices], the same on each device: how many rows i sends to j.
    total_rows: a Python integer, at least as many as any device receives.
    axis_name: the mesh axis of the devices.

  Returns:
    [total_rows, width], the rows from the first device, those from the second, and so on; then
    padding, zero.
  """
  return _exchange(rows, sizes, rows.shape[0], total_rows, axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _exchange(rows, sizes, sent_rows, total_rows, axis_name):
  del sent_rows
  options = {"total_rows": total_rows, "axis_name": axis_name}
  return lax.platform_dependent(
    rows,
    sizes,
    cpu=functools.partial(by_gather, **options),
    default=functools.partial(by_ragged_all_to_all, **options),
  )


def _exchange_forward(rows, sizes, sent_rows, total_rows, axis_name):
  return _exchange(rows, sizes, sent_rows, total_rows, axis_name), sizes


def _exchange_backward(sent_rows, total_rows, axis_name, sizes, d_out):
  return _exchange(d_out, sizes.T, total_rows, sent_rows, axis_name), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def by_ragged_all_to_all(rows, sizes, *, total_rows, axis_name):
  """`exchange_rows` by the collective of that name: each row goes to its device alone."""
  here = lax.axis_index(axis_name)
  return lax.ragged_all_to_all(
    rows,
    jnp.zeros_like(rows, shape=(total_rows, *rows.shape[1:])),
    input_offsets=_starts(sizes, axis=1)[here],
    send_sizes=sizes[here],
    output_offsets=_starts(sizes, axis=0)[here],
    recv_sizes=sizes[:, here],
    axis_name=axis_name,
  )


def by_gather(rows, sizes, *, total_rows, axis_name):
  """`exchange_rows` for a CPU, which has no such collective: each device picks from all rows."""
  here = lax.axis_index(axis_name)
  gathered = lax.all_gather(rows, axis_name)  # [devices, rows, width]
  row, ends = jnp.arange(total_rows), jnp.cumsum(sizes[:, here])
  is_row = row < ends[-1]
  source = jnp.where(is_row, jnp.searchsorted(ends, row, side="right"), 0)
  in_source = row - _starts(sizes, axis=0)[source, here] + _starts(sizes, axis=1)[source, here]
  picked = gathered.at[source, jnp.where(is_row, in_source, 0)].get(mode="promise_in_bounds")
  return jnp.where(is_row[:, None], picked, 0)


def _starts(sizes, axis):
  return jnp.cumsum(sizes, axis=axis) - sizes
