"""Which rows of the stash a push gets.

An allocator is a pytree whose arrays have an entry for each shard. `Stash` asks it whether there is
room, takes rows and frees them, and asks whether it still holds those of a slot; by its copy runs
the kernels find them. Where a method is given a slot or a push, it sees one shard, as in
`shard_map`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_stash.kernels.tiling import round_up
from pallas_stash.ragged import CopyRuns, RaggedRows

_MAX_INT32 = jnp.iinfo(jnp.int32).max


class Slot(NamedTuple):
  """Where the rows of one push are: what the forward pass keeps instead of them.

  Attributes:
    start: int32[shards], first row in the stash; -1 where the rows were not stored.
    rows: int32[shards], rows pushed, stored or not; 0 for groups that were invalid.
    checksum: uint32[shards, residuals], of the rows that were pushed in the mode of
      `pallas_stash.debug`; None without it.
    number: int32[shards], of the push among those into its stash, below 2**22 and then from 0
      again; the backward pass requires it.
  """

  start: jax.Array
  rows: jax.Array
  checksum: jax.Array | None = None
  number: jax.Array | None = None

  def is_stored(self) -> jax.Array:
    """Returns bool[shards]."""
    return self.start >= 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bump:
  """Rows in the order of the pushes; the last are freed first.

  The rows of a push are contiguous, and start on a tile boundary: or `lead` rows behind one.

  Attributes:
    top: int32[shards], first free row. None in a cotangent: integers have none.
    wanted_rows: int32[shards], rows that would be in use had every push been stored. None as well.
    capacity: static, rows of a shard, a multiple of `alignment`.
    alignment: static, rows of a tile.
  """

  top: jax.Array | None
  wanted_rows: jax.Array | None
  capacity: int = dataclasses.field(metadata={"static": True})
  alignment: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def empty(cls, capacity: int, alignment: int, num_shards: int) -> "Bump":
    """Returns one of which all rows are free."""
    # An array for each leaf: one that is donated is donated once.
    zeros = lambda: jnp.zeros((num_shards,), jnp.int32)
    return cls(zeros(), zeros(), capacity, alignment)

  def as_cotangent(self) -> "Bump":
    """Returns what the backward pass is given of it."""
    return dataclasses.replace(self, top=None, wanted_rows=None)

  def rows_in_use(self) -> jax.Array:
    """Returns int32[shards], alignment included."""
    return self.top

  def is_free(self) -> jax.Array:
    """Returns bool[shards * capacity], whether no push holds a row."""
    return (jnp.arange(self.capacity, dtype=jnp.int32) >= self.top[:, None]).reshape(-1)

  def has_room(self, rows: jax.Array, lead: jax.Array | int = 0) -> jax.Array:
    """Returns bool[], whether a push of `rows`, int32[], fits behind `lead` rows of its tile."""
    return lead + rows <= self.capacity - self.top[0]

  def take(
    self, rows: jax.Array, is_stored: jax.Array, lead: jax.Array | int = 0
  ) -> tuple["Bump", jax.Array]:
    """Takes the rows of a push.

    Args:
      rows: int32[], of the push. They are wanted, stored or not.
      is_stored: bool[], whether to take them; only where there is room.
      lead: int32[], rows of its first tile, less than `alignment`, that the push leaves free.

    Returns:
      The allocator, and int32[], `Slot.start` of the push if it is stored.
    """
    top, taken = self.top[0], round_up(lead + rows, self.alignment)
    # Pushes that overflow may add up to more rows than an int32 counts: it stays at its largest.
    wanted_rows = self.wanted_rows + jnp.minimum(taken, _MAX_INT32 - self.wanted_rows)
    new_top = top + jnp.where(is_stored, taken, 0)
    return dataclasses.replace(self, top=new_top[None], wanted_rows=wanted_rows), top + lead

  def holds(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the rows of a slot are there: stored, and not freed since."""
    return slot.is_stored() & (round_up(slot.start + slot.rows, self.alignment) <= self.top)

  def free(self, slot: Slot) -> tuple["Bump", jax.Array]:
    """Frees the rows of the slot that was pushed last; of one that was not stored, nothing.

    Returns:
      The allocator, and bool[1], whether the slot was such a one; of another, nothing is freed.
    """
    start = jnp.maximum(slot.start, 0)
    first = start // self.alignment * self.alignment
    end = round_up(start + slot.rows, self.alignment)
    is_last = slot.is_stored() & (end == self.top)
    is_right = is_last | ~slot.is_stored()
    top = jnp.where(is_last, first, self.top)
    wanted_rows = self.wanted_rows - jnp.where(is_right, end - first, 0)
    return dataclasses.replace(self, top=top, wanted_rows=wanted_rows), is_right

  def reset(self) -> "Bump":
    """Frees all rows."""
    top, wanted_rows = map(jnp.zeros_like, (self.top, self.wanted_rows))
    return dataclasses.replace(self, top=top, wanted_rows=wanted_rows)

  def compact_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy ragged rows to where a push has them, int32[] `Slot.start`."""
    return ragged.compact_runs(start, self.capacity)

  def expand_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy them back. Also of a cotangent."""
    return ragged.expand_runs(start, self.capacity)
