"""Rows of a stash in host memory: which rows of a push go there, and when they move.

The first rows of each push, its head, are left in a stage in HBM. The next push stores the stage to
host memory: that is of static size and depends on nothing that the layer computes, so that it runs
beside the matmuls of it, and then the head of the layer itself goes to the stage. `seal` hands over
the stage with the rest, so that in the backward pass the first use finds its head there; each use
loads, for the one behind it, the head of the push before its own. What is no head goes to HBM as
far as that reaches, and else to host memory at once, which nothing overlaps.

A push takes rows of host memory as it takes those in HBM, the last are freed first: the head, and
behind it what did not fit HBM. If there are such rows, then either the stage is full of the head,
or host memory is. So what is stored of a stage behind its head lands on rows that are free.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_stash import dtypes, storage
from pallas_stash.allocators import Slot
from pallas_stash.arguments import describe
from pallas_stash.checks import debugging
from pallas_stash.handover import NUMBERS
from pallas_stash.kernels import host, Implementation, int32
from pallas_stash.kernels.tiling import round_up
from pallas_stash.ragged import RaggedRows
from pallas_stash.varying import vary_alike

_NOBODY = -1.0  # No number of a push.


class Split(NamedTuple):
  """How the rows of a push are shared out, in their order, each int32[].

  All but the last that is not zero are multiples of a tile.

  Attributes:
    head: rows that are left in the stage.
    device: rows behind them that go to HBM.
    spilled: all others, which go to host memory at once.
  """

  head: jax.Array
  device: jax.Array
  spilled: jax.Array


def split_rows(
  rows: jax.Array, staging_rows: int, device_free: jax.Array, host_free: jax.Array
) -> Split:
  """Returns how `rows` are shared out, where so many rows of each tier are free.

  The push fits if `rows <= device_free + host_free`, which is if what is spilled fits beside the
  head.

  Args:
    rows: int32[], of a push.
    staging_rows: static, rows of the stage, a multiple of a tile.
    device_free, host_free: int32[], multiples of a tile.
  """
  head = jnp.minimum(jnp.minimum(rows, staging_rows), host_free)
  device = jnp.minimum(rows - head, device_free)
  return Split(head, device, rows - head - device)


class HostSlot(NamedTuple):
  """The part of a slot that is not in HBM, each int32[shards].

  Attributes:
    start: first row in host memory, of the head and then of what was spilled.
    head: rows of the head.
    device: rows in HBM.
    previous: where in host memory this push stored the stage: the first row of the push before, or
      its own where the stage had nothing of that.
  """

  start: jax.Array
  head: jax.Array
  device: jax.Array
  previous: jax.Array


class HostCounters(NamedTuple):
  """What a stash counts of host memory, each int32[shards].

  Attributes:
    peak_rows, spilled_rows, spilled_pushes: as in `TierStats`.
    wanted_rows: rows that would be in use had every push been stored.
  """

  peak_rows: jax.Array
  spilled_rows: jax.Array
  spilled_pushes: jax.Array
  wanted_rows: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostTier:
  """Rows in host memory, and those on their way there or back.

  Attributes:
    buffers: one array [shards * rows, width] a residual, in pinned host memory. Behind the capacity
      of each shard are `slack_rows` that hold nothing.
    stage: one array [shards * staging_rows, width] a residual, in HBM: the head of a push.
    staged: float32[shards], the `Slot.number` of that push: integers have no cotangent. Of no push
      where it is negative.
    staged_row: int32[shards], where in host memory the next push stores the stage. None in a
      cotangent, as are the next two.
    top: int32[shards], first free row of host memory.
    counters: what it counts.
    capacity: static, rows of a shard in host memory.
    alignment: static, rows of a tile.
  """

  buffers: tuple[jax.Array, ...]
  stage: tuple[jax.Array, ...]
  staged: jax.Array
  staged_row: jax.Array | None
  top: jax.Array | None
  counters: HostCounters | None
  capacity: int = dataclasses.field(metadata={"static": True})
  alignment: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def empty(
    cls,
    specs: Sequence[jax.ShapeDtypeStruct],
    capacity: int,
    staging_rows: int,
    alignment: int,
    num_shards: int,
  ) -> "HostTier":
    """Returns one that holds nothing; `capacity` and `staging_rows` are rounded up to tiles."""
    capacity, staging_rows = (round_up(rows, alignment) for rows in (capacity, staging_rows))
    stage = storage.empty_buffers(specs, min(staging_rows, capacity) * num_shards)
    rows = capacity + _slack_rows(stage, num_shards)
    if rows >= 2**31:
      raise ValueError(
        f"host_capacity_rows, rounded up to {capacity}, must be below 2**31 with a chunk behind it."
      )
    buffers = tuple(host.empty(rows * num_shards, s.shape[1], s.dtype) for s in stage)
    zeros = lambda: jnp.zeros((num_shards,), jnp.int32)
    counters = HostCounters(*(zeros() for _ in HostCounters._fields))
    staged = jnp.full((num_shards,), _NOBODY, jnp.float32)
    tier = cls(buffers, stage, staged, zeros(), zeros(), counters, capacity, alignment)
    return tier.with_free_rows_poisoned()

  @property
  def staging_rows(self) -> int:
    """Rows of the stage of a shard."""
    return self.stage[0].shape[0] // self.staged.shape[0]

  @property
  def slack_rows(self) -> int:
    """Rows behind the capacity of a shard: what moves is whole stages, and whole chunks."""
    return _slack_rows(self.stage, self.staged.shape[0])

  def as_cotangent(self) -> "HostTier":
    """Returns what the backward pass is given of it."""
    return dataclasses.replace(self, staged_row=None, top=None, counters=None)

  def without_buffers(self) -> "HostTier":
    """Returns it without host memory, which is to be no operand of a conditional."""
    return dataclasses.replace(self, buffers=())

  def split(self, rows: jax.Array, device_free: jax.Array) -> Split:
    """Returns how the rows of a push are shared out, as `split_rows` does."""
    return split_rows(rows, self.staging_rows, device_free, self.capacity - self.top[0])

  def has_room(self, split: Split) -> jax.Array:
    """Returns bool[], whether host memory has room for its part of a push."""
    return split.spilled <= self.capacity - self.top[0] - split.head

  def take(
    self, split: Split, is_stored: jax.Array, number: jax.Array
  ) -> tuple["HostTier", HostSlot]:
    """Takes the rows of a push; `store` is to move them.

    Args:
      split: of the push.
      is_stored: bool[], whether to take them; only where there is room.
      number: int32[1], of the push.

    Returns:
      The tier, and its part of the slot.
    """
    start, taken = self.top, round_up(split.head + split.spilled, self.alignment)
    top = start + jnp.where(is_stored, taken, 0)
    counters, spilled = self.counters, jnp.where(is_stored, split.spilled, 0)
    counters = HostCounters(
      jnp.maximum(counters.peak_rows, top),
      int32.add(counters.spilled_rows, spilled),
      counters.spilled_pushes + (spilled > 0).astype(jnp.int32),
      int32.add(counters.wanted_rows, taken),
    )
    slot = HostSlot(start, split.head[None], split.device[None], self.staged_row)
    staged = number.astype(jnp.float32)
    fields = {"staged": staged, "staged_row": start, "top": top, "counters": counters}
    return dataclasses.replace(self, **fields), slot

  def store(
    self,
    values: Sequence[jax.Array],
    order: Sequence[int],
    ragged: RaggedRows,
    slot: Slot,
    implementation: Implementation | None,
  ) -> "HostTier":
    """Stores the stage to host memory, and of a push the head to the stage and what was spilled.

    Args:
      values: arrays [total_rows, *row_shape].
      order: which buffer each of them goes to.
      ragged: where the rows of the push are.
      slot: of the push, that of the tier among it: where the stage goes, and where the head will.
      implementation: as of `kernels.compact`.
    """
    part, is_stored = slot.host, slot.is_stored()[0]
    head = jnp.where(is_stored, part.head[0], 0)
    spilled_from = jnp.where(is_stored, head + part.device[0], 0)
    last, row = jnp.where(is_stored, slot.rows[0], 0), part.start[0] + head
    buffers = list(self._stored(part.previous[0]))
    # Only now, as the head that comes is written over the one that leaves.
    stage = self.stage
    if self.staging_rows:
      runs = ragged.runs_between(0, head, 0)
      stage = storage.store(stage, values, order, runs, implementation, None)
    spilled = host.Stretch(ragged, spilled_from, last, row)
    for value, index in zip(values, order, strict=True):
      flat = storage.flat(value)
      buffers[index] = host.store_ragged(flat, buffers[index], spilled, implementation)
    return dataclasses.replace(self, buffers=tuple(buffers), stage=stage)

  def settle(self) -> "HostTier":
    """Returns it with all heads in host memory, where any use may read its own.

    What the stage holds may then become another head, and the next push stores it on free rows.
    """
    buffers = self._stored(self.staged_row[0])
    return dataclasses.replace(self, buffers=buffers, staged_row=self.top)

  def _stored(self, row):
    """Returns the buffers with the stage from a row on."""
    if not self.staging_rows:
      return self.buffers
    pairs = zip(self.stage, self.buffers, strict=True)
    return tuple(host.store(stage, buffer, row) for stage, buffer in pairs)

  def holds(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the rows of a slot in host memory were not freed since."""
    return self._end(slot) <= self.top

  def is_last(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the rows of a slot in host memory are the last."""
    return self._end(slot) == self.top

  def free(self, slot: Slot, is_right: jax.Array) -> "HostTier":
    """Frees the rows of the last slot, where `is_right`, bool[1], says that it is, or not stored.

    The next push stores the stage, whatever is in it, on the rows that are free then.
    """
    top = jnp.where(is_right & slot.is_stored(), slot.host.start, self.top)
    counters = self.counters
    wanted = jnp.where(is_right, self._end(slot) - slot.host.start, 0)
    counters = counters._replace(wanted_rows=counters.wanted_rows - wanted)
    fields = {"top": top, "staged_row": top, "counters": counters}
    # Of a push that was not stored nothing is in the stage, nor of the one before it any more.
    staged = jnp.where(is_right, _NOBODY, self.staged)
    return dataclasses.replace(self, staged=staged, **fields).with_free_rows_poisoned()

  def reset(self) -> "HostTier":
    """Frees all rows."""
    top = jnp.zeros_like(self.top)
    counters = self.counters._replace(wanted_rows=jnp.zeros_like(top))
    staged = jnp.full_like(self.staged, _NOBODY)
    fields = {"staged": staged, "top": top, "staged_row": top, "counters": counters}
    return dataclasses.replace(self, **fields).with_free_rows_poisoned()

  def prefetch(self, slot: Slot) -> "HostTier":
    """Returns the cotangent with the head of the push before that of a slot, on its way in."""
    for buffer in self.buffers:
      if not host.is_on_host(buffer):
        raise ValueError(
          f"The cotangent of host memory of the stash, {describe(buffer)}, must be in host memory:"
          " jax made zeros of it, as the stash that the last layer returned was not sealed. Call"
          " seal(y, stash) behind it."
        )
    if not self.staging_rows:
      return self
    row = slot.host.previous[0]
    stage = tuple(host.load(buffer, row, self.staging_rows) for buffer in self.buffers)
    staged = ((slot.number - 1) & (NUMBERS - 1)).astype(jnp.float32)
    # What is behind a push that stored nothing of the one before is its own.
    staged = jnp.where(slot.host.previous == slot.host.start, _NOBODY, staged)
    return dataclasses.replace(self, stage=stage, staged=staged)

  def is_staged(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the stage has the head of a slot; if not, host memory has it."""
    return self.staged == slot.number.astype(jnp.float32)

  def scatter_stage(
    self,
    values: Sequence[jax.Array],
    ragged: RaggedRows,
    slot: Slot,
    is_readable: jax.Array,
    implementation: Implementation | None,
  ) -> tuple[jax.Array, ...]:
    """Returns `values` [total_rows, *row_shape] with the head of a slot, if the stage has it."""
    if not self.staging_rows:
      return tuple(values)
    stage, staged, slot, ragged, *values = vary_alike(
      self.stage, self.is_staged(slot)[0], slot, ragged, *values
    )
    runs = ragged.runs_between(0, jnp.where(is_readable & staged, slot.host.head[0], 0), 0)
    scatter = lambda rows, flat: host.scatter(rows, flat, runs, implementation)
    return _in_rows(scatter, stage, values)

  def scatter_host(
    self,
    values: Sequence[jax.Array],
    ragged: RaggedRows,
    slot: Slot,
    is_readable: jax.Array,
    implementation: Implementation | None,
  ) -> tuple[jax.Array, ...]:
    """Returns `values` [total_rows, *row_shape] with the rows of a slot from host memory.

    Args:
      values: one a buffer, in their order.
      ragged, slot: of the push.
      is_readable: bool[], whether to.
      implementation: as of `kernels.compact`.
    """
    buffers, staged, slot, ragged, *values = vary_alike(
      self.buffers, self.is_staged(slot)[0], slot, ragged, *values
    )
    start, head, device, _ = (field[0] for field in slot.host)
    head_to_load = jnp.where(is_readable & ~staged, head, 0)
    last = jnp.where(is_readable, slot.rows[0], head + device)

    stretches = [host.Stretch(ragged, head + device, last, start + head)]
    if self.staging_rows:
      stretches.insert(0, host.Stretch(ragged, jnp.zeros_like(start), head_to_load, start))

    def read(buffer, flat):
      for stretch in stretches:
        flat = host.load_ragged(buffer, flat, stretch, implementation)
      return flat

    return _in_rows(read, buffers, values)

  def with_free_rows_poisoned(self) -> "HostTier":
    """Returns it with NaN in host memory that is free: in the debug mode. Else as it is."""
    if not debugging.is_debugging():
      return self
    buffers = list(self.buffers)
    rows = self.capacity + self.slack_rows
    for index, buffer in enumerate(buffers):
      for shard in range(self.top.shape[0]):
        last = (shard + 1) * rows
        buffer = host.fill(buffer, self.top[shard] + shard * rows, last, jnp.nan)
      buffers[index] = buffer
    return dataclasses.replace(self, buffers=tuple(buffers))

  def _end(self, slot):
    rows = slot.rows - slot.host.device
    return slot.host.start + round_up(rows, self.alignment)


def _in_rows(function, buffers, values):
  """Returns `function(buffer, value)` of pairs, with the values flat and of the buffer's dtype."""
  results = []
  for buffer, value in zip(buffers, values, strict=True):
    flat = function(buffer, storage.flat(value))
    results.append(dtypes.bit_cast(flat, value.dtype).reshape(value.shape))
  return tuple(results)


def _slack_rows(stage, num_shards):
  chunks = (host.chunk_rows(array.shape[1], array.dtype.itemsize) for array in stage)
  return max(stage[0].shape[0] // num_shards, *chunks)
