"""What a stash does where it has two tiers, and where it has one: HBM, and host memory as well."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import dtypes
from pallas_stash.allocators import Bump, Slot
from pallas_stash.arguments import check_local
from pallas_stash.checks import debugging
from pallas_stash.host_tier import HostTier
from pallas_stash.kernels import Implementation
from pallas_stash.ragged import CopyRuns, RaggedRows


def check_implementation(tier: HostTier | None, implementation: Implementation | None) -> None:
  """Raises a ValueError for kernels that are interpreted, in a program with host memory."""
  if tier is not None and implementation == "mosaic_interpret":
    # Its callbacks are ordered, and jax loses count of results where memories are several.
    raise ValueError(
      f"{implementation=} must be None or 'xla' for a stash with host_capacity_rows: jax lowers no"
      " interpreted kernels beside host memory."
    )


def device_part(slot: Slot) -> Slot:
  """Returns a slot as the allocator of HBM knows it: with its rows there."""
  return slot if slot.host is None else slot._replace(rows=slot.host.device)


def device_runs(slot: Slot, ragged: RaggedRows) -> CopyRuns:
  """Returns the runs that copy the rows of a push that are in HBM there."""
  head = slot.host.head[0]
  return ragged.runs_between(head, head + slot.host.device[0], jnp.maximum(slot.start[0], 0))


def free_both(allocator: Bump, tier: HostTier, slot: Slot) -> tuple[Bump, HostTier, jax.Array]:
  """Frees the rows of a slot in both tiers, or of one that is not the last in both, in none.

  Of cotangents it frees nothing, and loads the head of the push before.

  Returns:
    The allocator, the tier, and bool[1], whether the slot was the last, or not stored.
  """
  tier = refuse_vmap(tier)
  if tier.top is None:
    return allocator, tier.prefetch(slot), jnp.ones_like(slot.is_stored())
  freed, is_right = allocator.free(device_part(slot))
  is_right &= tier.is_last(slot) | ~slot.is_stored()
  keep = lambda new, old: jnp.where(is_right, new, old)
  return jax.tree.map(keep, freed, allocator), tier.free(slot, is_right), is_right


def settled(stash: Any) -> Any:
  """Returns a stash as `HostTier.settle` makes it; without host memory, as it is.

  Raises:
    ValueError: for several shards.
  """
  if stash.host is None:
    return stash
  check_local(stash)
  return dataclasses.replace(stash, host=refuse_vmap(stash.host).settle())


def on_device(stash: Any) -> Any:
  """Returns a stash without host memory, for what is conditional: host memory is no operand of it.

  What is read of it lacks the rows that are there: `with_host_rows` adds them.
  """
  if stash.host is None:
    return stash
  return dataclasses.replace(stash, host=stash.host.without_buffers())


def with_host_rows(
  stash: Any,
  slot: Slot,
  ragged: RaggedRows,
  values: Sequence[jax.Array],
  order: Sequence[int],
  implementation: Implementation | None,
) -> Sequence[jax.Array]:
  """Returns what was read of a cotangent `on_device`, or made again, with rows in host memory.

  Args:
    stash: the cotangent, with host memory or without.
    slot, ragged: of the push.
    values: arrays [total_rows, *row_shape], rows of the slot if it was stored.
    order: which buffer each of them is of.
    implementation: as of `kernels.compact`.
  """
  if stash.host is None:
    return values
  is_stored = (slot.is_stored() & (slot.rows == ragged.num_rows()))[0]
  of_buffers = [values[order.index(index)] for index in range(len(order))]
  of_buffers = stash.host.scatter_host(of_buffers, ragged, slot, is_stored, implementation)
  if slot.checksum is not None:
    verified = debugging.verify(of_buffers, ragged, slot.checksum, is_stored)
    pairs = zip(verified, of_buffers, strict=True)
    # Nobody summed up what is made again.
    of_buffers = [dtypes.select(is_stored, checked, value) for checked, value in pairs]
  return tuple(of_buffers[index] for index in order)


def before_loads(
  stash: Any, slot: Slot, values: Sequence[jax.Array]
) -> tuple[Slot, Sequence[jax.Array]]:
  """Returns the slot and what was read of it, of which nothing is there before all of it is.

  By this slot the head of the push before is loaded, into a stage that then nothing is read of any
  more: else the compiler copies the stage first, and holds both.
  """
  if stash.host is None:
    return slot, values
  return lax.optimization_barrier((slot, tuple(values)))


def refuse_vmap(tier: HostTier) -> HostTier:
  """Returns the tier, or the cotangent; `jax.vmap` raises a ValueError here."""
  return dataclasses.replace(tier, staged=_refuse_vmap(tier.staged))


@jax.custom_batching.custom_vmap
def _refuse_vmap(array):
  return array


@_refuse_vmap.def_vmap
def _refuse_vmap_rule(axis_size, is_batched, array):
  del is_batched, array
  raise ValueError(
    f"A stash with host_capacity_rows must not be under jax.vmap, here of {axis_size} examples: of"
    " host memory no slices at different rows are taken at once. Use lax.map, or a stash without."
  )
