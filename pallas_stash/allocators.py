"""Which rows of the stash a push gets.

`Bump` hands out rows from the first on, and takes them back last in, first out: the rows of a push
are contiguous, and a matmul can read them where they are. `Pages` hands out whole pages, wherever
they are free, and takes them back in any order, as a pipeline needs in which the backward passes of
some microbatches run between the forward passes of others.

An allocator is a pytree whose arrays have an entry, or a block of pages, for each shard. `Stash`
asks it whether there is room, takes rows and frees them, and asks whether it still holds those of a
slot; by its copy runs the kernels find them. Where a method is given a slot or a push, it sees one
shard, as in `shard_map`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash.kernels import int32
from pallas_stash.kernels.tiling import round_up
from pallas_stash.ragged import CopyRuns, RaggedRows

_MAX_INT32 = jnp.iinfo(jnp.int32).max


class Slot(NamedTuple):
  """Where the rows of one push are: what the forward pass keeps instead of them.

  Attributes:
    start: int32[shards], first row in the stash, or with pages what they are held by; -1 where the
      rows were not stored.
    rows: int32[shards], rows pushed, stored or not; 0 for groups that were invalid.
    checksum: uint32[shards, residuals], of the rows that were pushed in the mode of
      `pallas_stash.debug`; None without it.
    number: int32[shards], of the push among those into its stash, below 2**22 and then from 0
      again; the backward pass requires it.
    host: where its rows in host memory are; None of a stash that has none.
  """

  start: jax.Array
  rows: jax.Array
  checksum: jax.Array | None = None
  number: jax.Array | None = None
  host: Any = None

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

  page_rows = None

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
    self, rows: jax.Array, is_stored: jax.Array, number: jax.Array, lead: jax.Array | int = 0
  ) -> tuple["Bump", jax.Array]:
    """Takes the rows of a push.

    Args:
      rows: int32[], of the push. They are wanted, stored or not.
      is_stored: bool[], whether to take them; only where there is room.
      number: int32[], `Slot.number` of the push, by which pages are held.
      lead: int32[], rows of its first tile, less than `alignment`, that the push leaves free.

    Returns:
      The allocator, and int32[], `Slot.start` of the push if it is stored.
    """
    del number
    top, taken = self.top[0], round_up(lead + rows, self.alignment)
    # Pushes that overflow may add up to more rows than an int32 counts: it stays at its largest.
    wanted_rows = int32.add(self.wanted_rows, taken)
    new_top = top + jnp.where(is_stored, taken, 0)
    return dataclasses.replace(self, top=new_top[None], wanted_rows=wanted_rows), top + lead

  def holds(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the rows of a slot are there: stored, and not freed since.

    Of a cotangent, too: the backward pass frees nothing.
    """
    if self.top is None:
      return slot.is_stored()
    return slot.is_stored() & (round_up(slot.start + slot.rows, self.alignment) <= self.top)

  def free(self, slot: Slot) -> tuple["Bump", jax.Array]:
    """Frees the rows of the slot that was pushed last; of one that was not stored, nothing.

    Of a cotangent it frees nothing.

    Returns:
      The allocator, and bool[1], whether the slot was such a one; of another, nothing is freed.
    """
    if self.top is None:
      return self, jnp.ones_like(slot.is_stored())
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
    """Returns the runs that copy ragged rows to where their push is to have them.

    Of the allocator before the rows were taken.

    Args:
      ragged: of the push.
      start: int32[], its `Slot.start`.
    """
    return ragged.compact_runs(start, self.capacity)

  def expand_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy them back, of the allocator that has them; or of a cotangent."""
    return ragged.expand_runs(start, self.capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Pages, each held whole by one push: an inverted page table.

  A push takes the first pages that are free, and knows them by its number alone. So a slot is as
  small as without pages, the pages of a push ascend, and a slot that was freed holds nothing for
  good, whoever has its pages now. What the backward pass reads and frees is float32: integers have
  no cotangent.

  Attributes:
    holder: float32[shards * pages], one more than the number of the push that holds each page,
      negative while it is set aside; 0 for a page that is free.
    wanted_pages: float32[shards], pages that would be in use had every push been stored.
    page_rows: static, rows of a page, a multiple of a tile.
    alignment: static, rows of a tile.
  """

  holder: jax.Array
  wanted_pages: jax.Array
  page_rows: int = dataclasses.field(metadata={"static": True})
  alignment: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def empty(cls, capacity: int, alignment: int, num_shards: int, page_rows: int) -> "Pages":
    """Returns one of which all pages are free; `capacity` is a multiple of `page_rows`."""
    holder = jnp.zeros((num_shards * (capacity // page_rows),), jnp.float32)
    return cls(holder, jnp.zeros((num_shards,), jnp.float32), page_rows, alignment)

  @property
  def capacity(self) -> int:
    return self.holder.shape[0] // self.wanted_pages.shape[0] * self.page_rows

  @property
  def wanted_rows(self) -> jax.Array:
    """Rows that would be in use had every push been stored, int32[shards], at most 2**31 - 1."""
    most = _MAX_INT32 // self.page_rows
    return jnp.minimum(self.wanted_pages, most).astype(jnp.int32) * self.page_rows

  def as_cotangent(self) -> "Pages":
    """Returns what the backward pass is given of it: everything."""
    return self

  def rows_in_use(self) -> jax.Array:
    """Returns int32[shards], those of whole pages."""
    is_held = (self.holder != 0).reshape(self.wanted_pages.shape[0], -1)
    return jnp.sum(is_held, axis=1, dtype=jnp.int32) * self.page_rows

  def is_free(self) -> jax.Array:
    """Returns bool[shards * capacity], whether no push holds a row."""
    return jnp.repeat(self.holder == 0, self.page_rows)

  def has_room(self, rows: jax.Array, lead: jax.Array | int = 0) -> jax.Array:
    """Returns bool[], whether a push of `rows`, int32[], fits; `lead` must be 0."""
    return lead + self._pages_of(rows) <= jnp.sum(self.holder == 0, dtype=jnp.int32)

  def take(
    self, rows: jax.Array, is_stored: jax.Array, number: jax.Array, lead: jax.Array | int = 0
  ) -> tuple["Pages", jax.Array]:
    """Takes the pages of a push, as `Bump.take` does rows; `lead` must be 0."""
    del lead
    pages, is_free = self._pages_of(rows), self.holder == 0
    is_taken = is_stored & is_free & (jnp.cumsum(is_free, dtype=jnp.int32) <= pages)
    holder = jnp.where(is_taken, _holder_of(number), self.holder)
    wanted_pages = self.wanted_pages + pages.astype(jnp.float32)
    return dataclasses.replace(self, holder=holder, wanted_pages=wanted_pages), number

  def holds(self, slot: Slot) -> jax.Array:
    """Returns bool[1], whether the rows of a slot are there: stored, and not freed since."""
    held = jnp.sum(self._is_held(slot.start), dtype=jnp.int32)
    return slot.is_stored() & (held == self._pages_of(slot.rows))

  def free(self, slot: Slot) -> tuple["Pages", jax.Array]:
    """Frees the pages of a slot; of one that was not stored, nothing.

    Returns:
      The allocator, and bool[1], whether the slot still had its rows, or was not stored.
    """
    is_right = self.holds(slot) | ~slot.is_stored()
    holder = jnp.where(self._is_held(slot.start), 0, self.holder)
    wanted = jnp.where(is_right, self._pages_of(slot.rows), 0)
    wanted_pages = self.wanted_pages - wanted.astype(jnp.float32)
    return dataclasses.replace(self, holder=holder, wanted_pages=wanted_pages), is_right

  def set_aside(self, slot: Slot) -> "Pages":
    """Sets the pages of a slot aside, or takes them back if they are set aside.

    What is aside is not free, and the slot does not hold it: the first half of a backward pass
    leaves it so to the second, and to nothing else.
    """
    is_of_slot = (jnp.abs(self.holder) == _holder_of(slot.start)) & slot.is_stored()
    return dataclasses.replace(self, holder=jnp.where(is_of_slot, -self.holder, self.holder))

  def reset(self) -> "Pages":
    """Frees all pages."""
    return jax.tree.map(jnp.zeros_like, self)

  def compact_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy ragged rows to where their push is to have them, as of `Bump`."""
    del start
    return self._runs_to(ragged, self.holder == 0)  # Ranked as `take` does: once.

  def further_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy ragged rows to the pages that their push has."""
    return self._runs_to(ragged, self._is_held(start))

  def expand_runs(self, ragged: RaggedRows, start: jax.Array) -> CopyRuns:
    """Returns the runs that copy them back, of the allocator that has them."""
    sources, destinations, sizes = self.further_runs(ragged, start)
    runs = CopyRuns(destinations, sources, sizes)
    if ragged.group_starts is None:
      return runs
    order = jnp.argsort(jnp.where(sizes > 0, sources, _MAX_INT32))
    return CopyRuns(*(field[order] for field in runs))

  def _pages_of(self, rows):
    return lax.div(rows + (self.page_rows - 1), jnp.int32(self.page_rows))

  def _is_held(self, start):
    return (self.holder == _holder_of(start)) & (start >= 0)

  def _runs_to(self, ragged, is_page):
    """Returns the runs that copy ragged rows to the first of some pages, bool[pages]."""
    most = max(1, min(-(-ragged.total_rows // self.page_rows), self.holder.shape[0]))
    rank = jnp.cumsum(is_page, dtype=jnp.int32)
    # Compared with each other in one pass: a TPU gathers, and scatters, one by one.
    is_before = rank < jnp.arange(1, most + 1, dtype=jnp.int32)[:, None]
    pages = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    # Laid end to end first, and then each page of them to where that is.
    runs = ragged.compact_runs(jnp.int32(0), most * self.page_rows)
    return _split_at_pages(runs, pages, self.page_rows)


def _holder_of(number):
  return (number + 1).astype(jnp.float32)


def _split_at_pages(runs, pages, page_rows):
  """Returns runs to rows of pages, from runs to the same rows laid end to end.

  Args:
    runs: `CopyRuns` whose destinations start at row 0 and leave no gap.
    pages: int32[most pages], where row 0, row `page_rows` and so on are to be, ascending.
    page_rows: static.
  """
  rows = jnp.sum(runs.sizes, dtype=jnp.int32)
  number = jnp.arange(pages.shape[0], dtype=jnp.int32)
  first_rows = number * page_rows
  if runs.sizes.shape[0] == 1:
    sizes = jnp.clip(rows - first_rows, 0, page_rows)
    runs = CopyRuns(runs.sources + first_rows, pages * page_rows, sizes)
  else:
    starts = jnp.sort(jnp.concatenate([runs.destinations, first_rows]))
    stops = jnp.minimum(jnp.append(starts[1:], rows), rows)
    run = jnp.sum(runs.destinations + runs.sizes <= starts[:, None], axis=1, dtype=jnp.int32)
    page = lax.div(starts, jnp.int32(page_rows))
    runs = CopyRuns(
      sources=starts + _look_up(runs.sources - runs.destinations, run),
      destinations=starts + _look_up(pages - number, page) * page_rows,
      sizes=jnp.maximum(stops - starts, 0),
    )
  # Of pages that are not held, nothing: an empty run may be anywhere, but not behind the buffer.
  return CopyRuns(*(jnp.where(runs.sizes > 0, field, 0) for field in runs))


def _look_up(table, index):
  """Returns `table[index]`, 0 behind its end, in one pass: a TPU gathers one by one."""
  is_entry = index[:, None] == jnp.arange(table.shape[0], dtype=jnp.int32)
  return jnp.sum(jnp.where(is_entry, table, 0), axis=1, dtype=jnp.int32)


Allocator = Bump | Pages
