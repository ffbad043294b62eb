"""How the rows of a push get into a stash, and out of it: for `Stash`, and for backward rules.

A stash here is a `Stash`, or where rows are read the cotangent of one.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import storage, tiers
from pallas_stash.allocators import Slot
from pallas_stash.arguments import check_local
from pallas_stash.checks import debugging
from pallas_stash.checks.misplaced_rows import report_pushed
from pallas_stash.handover import first_order_only, name_slot
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.ragged import RaggedRows
from pallas_stash.storage import match_residuals
from pallas_stash.varying import refuse_sharded, vary_alike


def push_some(
  stash: Any,
  values: Sequence[jax.Array],
  ragged: RaggedRows,
  others: Sequence[jax.ShapeDtypeStruct],
  axis_name: Any,
  implementation: Implementation | None,
) -> tuple[Any, Slot]:
  """Does what `Stash.push` does with all residuals of a stash but `others`, rows of a later time.

  Those are the last of equal ones; `store_others` stores them.
  """
  tiers.check_implementation(stash.host, implementation)
  if others and stash.host is not None:
    raise ValueError(
      f"{stash} with host_capacity_rows cannot keep rows for gradients of late_argnames: these are"
      " for passes in two halves, of a stash with pages."
    )
  others = tuple((spec.shape, jnp.dtype(spec.dtype)) for spec in others)
  check_push(stash, values, ragged, others)
  # Here, where it is traced for each program: each says once what it sees.
  report_pushed(*vary_alike(list(values), ragged), name_slot)
  return _push(stash, tuple(values), ragged, axis_name, implementation, others)


@functools.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _push(stash, values, ragged, axis_name, implementation, others):
  # Traced once for the layers of a program: to trace kernels takes long.
  order = _order_of(stash, values, others)
  stash, values = first_order_only((stash, values))
  stash, values, ragged = vary_alike(stash, values, ragged)
  checksum = None
  if debugging.is_debugging():
    # XLA may compute twice, and round differently, what is stored and what is summed.
    values = lax.optimization_barrier(values)
    checksum = debugging.checksums([values[order.index(i)] for i in sorted(order)], ragged)

  before = stash.allocator
  stash, slot = take_rows(stash, ragged, axis_name, checksum)
  host = stash.host
  if host is None:
    runs = before.compact_runs(ragged, slot.start[0])
  else:
    host = host.store(values, order, ragged, slot, implementation)
    runs = tiers.device_runs(slot, ragged)
  runs = runs._replace(sizes=jnp.where(slot.is_stored()[0], runs.sizes, 0))
  buffers = storage.store(stash.buffers, values, order, runs, implementation, stash.page_rows)
  return dataclasses.replace(stash, buffers=buffers, host=host), slot


def store_others(
  stash: Any,
  slot: Slot,
  values: Sequence[jax.Array],
  ragged: RaggedRows,
  indices: Sequence[int],
  implementation: Implementation | None,
) -> Any:
  """Stores rows beside those of a slot, and sets its pages aside; of one not stored, nothing.

  Args:
    stash: one with pages; or its cotangent.
    slot, ragged: of a push by `push_some`.
    values: arrays [total_rows, *row_shape].
    indices: which of the residuals of the stash each of them is.
    implementation: as of `Stash.push`.
  """
  allocator = stash.allocator
  runs = allocator.further_runs(ragged, slot.start[0])
  runs = runs._replace(sizes=jnp.where(allocator.holds(slot)[0], runs.sizes, 0))
  page_rows = stash.page_rows
  buffers = storage.store(stash.buffers, values, indices, runs, implementation, page_rows)
  return dataclasses.replace(stash, buffers=buffers).set_aside(slot)


def _order_of(stash, values, others=()):
  """Returns which residual each of `values` is, where `others`, which come behind them, are not."""
  found = [(v.shape[1:], v.dtype) for v in values]
  return match_residuals(stash.residuals, [*found, *others])[: len(found)]


def check_push(
  stash: Any, values: Sequence[jax.Array], ragged: RaggedRows, others: Sequence[Any] = ()
) -> None:
  """Raises a ValueError unless rows of `values` can be pushed to `stash`, as `Stash.push` says."""
  check_local(stash)
  refuse_sharded(stash=stash, values=values, ragged=ragged)
  for value in values:
    if value.shape[:1] != (ragged.total_rows,):
      raise ValueError(f"{value.shape=} must start with {ragged.total_rows=}.")
  _order_of(stash, values, others)


def take_rows(
  stash: Any,
  ragged: RaggedRows,
  axis_name: Any = None,
  checksum: jax.Array | None = None,
  *,
  is_congruent: bool = False,
) -> tuple[Any, Slot]:
  """Takes rows of the stash for a push, and leaves it to the caller to store them there.

  Args:
    stash, ragged, axis_name: as of `Stash.push`.
    checksum: of the slot.
    is_congruent: whether the rows are to start as far behind the start of a tile as the first group
      does in its buffer. Not with pages.

  Returns:
    The stash, and the slot of the push.
  """
  is_valid = ragged.is_valid()
  rows = jnp.where(is_valid, ragged.num_rows(), 0)
  lead = 0
  if is_congruent:
    lead = jnp.where(rows > 0, ragged.group_starts[0] % stash.alignment, 0)
  if stash.host is not None:
    return _take_rows_of_both(stash, rows, is_valid, axis_name, checksum)
  is_stored = all_along(axis_name, is_valid & stash.allocator.has_room(rows, lead))
  number = stash.counters.pushes
  allocator, start = stash.allocator.take(rows, is_stored, number[0], lead)
  slot = Slot(jnp.where(is_stored, start, -1)[None], rows[None], checksum, number)
  counters = stash.counters.after_push(is_valid, is_stored, allocator)
  return dataclasses.replace(stash, allocator=allocator, counters=counters), slot


def _take_rows_of_both(stash, rows, is_valid, axis_name, checksum):
  allocator, host, number = stash.allocator, tiers.refuse_vmap(stash.host), stash.counters.pushes
  split = host.split(rows, allocator.capacity - allocator.top[0])
  is_stored = all_along(axis_name, is_valid & host.has_room(split))
  allocator, start = allocator.take(split.device, is_stored, number[0])
  host, of_host = host.take(split, is_stored, number)
  slot = Slot(jnp.where(is_stored, start, -1)[None], rows[None], checksum, number, of_host)
  wanted = host.counters.wanted_rows
  counters = stash.counters.after_push(is_valid, is_stored, allocator, wanted)
  fields = {"allocator": allocator, "counters": counters, "host": host}
  return dataclasses.replace(stash, **fields), slot


def read_rows(
  stash: Any,
  slot: Slot,
  ragged: RaggedRows,
  is_readable: jax.Array,
  implementation: Implementation | None,
  padding: Padding = "zero",
  indices: Sequence[int] | None = None,
) -> tuple[jax.Array, ...]:
  """Returns the rows of a slot as `Stash.restore` does; NaN unless `is_readable`, bool[1].

  Of the stash, which may be a cotangent, it takes the buffers and how rows are found in them; of
  its residuals those of `indices`, ascending, None for all.
  """
  indices = range(len(stash.residuals)) if indices is None else indices
  buffers, specs = ([of[i] for i in indices] for of in (stash.buffers, stash.residuals))
  buffers, slot, ragged, is_readable = vary_alike(buffers, slot, ragged, is_readable)
  is_readable = (is_readable & (slot.rows == ragged.num_rows()))[0]
  if stash.host is None:
    runs = stash.allocator.expand_runs(ragged, slot.start[0])
  else:
    runs = ragged.back(tiers.device_runs(slot, ragged))
  runs = runs._replace(sizes=jnp.where(is_readable, runs.sizes, 0))
  is_debugging = slot.checksum is not None
  is_zero, fill = is_readable, None
  if padding == "undefined" and is_debugging:
    is_zero = jnp.zeros_like(is_readable)  # NaN, to be seen.
  elif padding == "undefined":
    fill = ~is_readable
  values = storage.load(buffers, specs, ragged.total_rows, runs, is_zero, fill, implementation)
  if stash.host is not None:
    given = ragged, slot, is_readable, implementation
    values = stash.host.scatter_stage(values, *given)
    if not stash.host.buffers:  # The caller is to add what is there, and to verify it then.
      return values
    values = stash.host.scatter_host(values, *given)
  if not is_debugging:
    return values
  return debugging.verify(values, ragged, slot.checksum, is_readable)


def sum_kept_rows(stash: Any, slot: Slot, total_rows: int) -> Slot:
  """Returns the slot; in the mode of `debug`, with a checksum of its rows where the stash has them.

  For what stores rows itself, where `take_rows` says. `total_rows` is the most that a slot has.
  """
  if not debugging.is_debugging():
    return slot
  return slot._replace(checksum=debugging.checksums(*_rows_in_stash(stash, slot, total_rows)))


def are_kept_rows_intact(stash: Any, slot: Slot, total_rows: int) -> jax.Array:
  """Returns bool[]: whether the rows of a slot are what `sum_kept_rows` summed up, if it did."""
  if slot.checksum is None:
    return jnp.bool_(True)
  values, ragged = _rows_in_stash(stash, slot, total_rows)
  return jnp.all(debugging.check_rows(values, ragged, slot.checksum, slot.is_stored()[0]))


def _rows_in_stash(stash, slot, total_rows):
  """Returns a part of each buffer in which the rows of the slot are, and where they are in it."""
  count = min(total_rows, stash.rows_per_shard)
  first = jnp.clip(slot.start[0], 0, stash.rows_per_shard - count)
  values = [lax.dynamic_slice_in_dim(buffer, first, count) for buffer in stash.buffers]
  rows = jnp.where(slot.is_stored(), slot.rows, 0)
  return values, RaggedRows(rows, count, slot.start - first)


def all_along(axis_name: Any, predicate: jax.Array) -> jax.Array:
  """Returns whether a predicate holds on all devices along mesh axes; None for this one alone."""
  if axis_name is None:
    return predicate
  return lax.pmin(predicate.astype(jnp.int32), axis_name) == 1
