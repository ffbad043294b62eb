"""The allocators by themselves, against plain Python models of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash.allocators import Bump, Pages, Slot
from pallas_stash.ragged import RaggedRows
from tests.helpers.checks import assert_trees_equal

CAPACITY, TILE = 64, 8


@jax.jit
def push(allocator, rows, number=0):
  is_stored = allocator.has_room(rows)
  allocator, start = allocator.take(rows, is_stored, number)
  slot = Slot(jnp.where(is_stored, start, -1)[None], rows[None])
  return allocator, slot, allocator.is_free()


free = jax.jit(lambda allocator, slot: (*allocator.free(slot), allocator.holds(slot)))


def test_random_pushes_and_frees():
  rng = np.random.default_rng(0)
  allocator, slots = Bump.empty(CAPACITY, TILE, 1), []
  top = wanted = overflowed = 0
  for _ in range(60):
    if slots and rng.random() < 0.4:
      slot, start, taken = slots.pop()
      allocator, is_right, is_held = free(allocator, slot)
      assert is_right and is_held == (start >= 0)
      top, wanted = top - taken * (start >= 0), wanted - taken
    else:
      rows = rng.integers(0, 30)
      taken = -(-rows // TILE) * TILE
      start = top if top + rows <= CAPACITY else -1
      allocator, slot, is_free = push(allocator, jnp.int32(rows))
      assert int(slot.start[0]) == start
      slots.append((slot, start, taken))
      top, wanted = top + taken * (start >= 0), wanted + taken
      overflowed += start < 0
      np.testing.assert_array_equal(is_free, np.arange(CAPACITY) >= top)
    assert (int(allocator.rows_in_use()[0]), int(allocator.wanted_rows[0])) == (top, wanted)
  assert overflowed


def test_another_than_the_last_is_not_freed():
  allocator, first, _ = push(Bump.empty(CAPACITY, TILE, 1), jnp.int32(9))
  allocator, second, _ = push(allocator, jnp.int32(3))
  after, is_right, _ = free(allocator, first)
  assert not is_right
  assert_trees_equal(after, allocator)
  after, is_right, _ = free(allocator, second)
  assert is_right and not after.holds(second) and after.holds(first)
  assert_trees_equal(after.reset(), Bump.empty(CAPACITY, TILE, 1))


def test_rows_behind_the_start_of_a_tile():
  allocator, _, _ = push(Bump.empty(CAPACITY, TILE, 1), jnp.int32(40))
  assert allocator.has_room(21, 3) and not allocator.has_room(22, 3)
  after, start = allocator.take(jnp.int32(6), True, jnp.int32(0), 3)
  assert (int(start), int(after.top[0]), int(after.wanted_rows[0])) == (43, 56, 56)
  slot = Slot(start[None], jnp.array([6], jnp.int32))
  assert after.holds(slot) and not allocator.holds(slot)
  freed, is_right = after.free(slot)
  assert is_right
  assert_trees_equal(freed, allocator)
  after, _ = allocator.take(jnp.int32(22), False, jnp.int32(0), 3)
  assert (int(after.top[0]), int(after.wanted_rows[0])) == (40, 72)


def test_a_cotangent_has_no_integers_and_finds_rows():
  allocator, slot, _ = push(Bump.empty(CAPACITY, TILE, 1), jnp.int32(9))
  cotangent = allocator.as_cotangent()
  assert jax.tree.leaves(cotangent) == []
  ragged = RaggedRows([4, 5], 32, [20, 3])
  for name in ("compact_runs", "expand_runs"):
    runs = [getattr(a, name)(ragged, slot.start[0]) for a in (allocator, cotangent)]
    assert_trees_equal(*runs)


def test_every_leaf_has_an_entry_for_each_shard():
  allocator = Bump.empty(CAPACITY, TILE, 3)
  assert all(leaf.shape == (3,) for leaf in jax.tree.leaves(allocator))
  assert allocator.is_free().shape == (3 * CAPACITY,) and allocator.is_free().all()
  pages = Pages.empty(4 * PAGE, TILE, 3, PAGE)
  assert (pages.holder.shape, pages.wanted_pages.shape) == ((3 * 4,), (3,))
  assert pages.capacity == 4 * PAGE and pages.is_free().shape == (3 * 4 * PAGE,)
  assert pages.rows_in_use().shape == pages.wanted_rows.shape == (3,)


# What follows is of pages.

PAGE = 32


def pages_of(allocator, slot):
  return np.flatnonzero(np.asarray(allocator.holder) == int(slot.start[0]) + 1).tolist()


def rows_of(allocator, slot):
  pages = np.array(pages_of(allocator, slot), int)
  return (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def test_pushes_take_the_first_free_pages_and_leave_what_is_there():
  """Of 3, 17, 8 and 23 rows at pages of 8, as of 12, 68, 32 and 92 at pages of 32."""
  allocator, slots = Pages.empty(8 * PAGE, TILE, 1, PAGE), []
  for number, rows in enumerate([12, 68, 32, 92]):
    allocator, slot, _ = push(allocator, jnp.int32(rows), jnp.int32(number))
    slots.append(slot)
  assert [pages_of(allocator, slot) for slot in slots] == [[0], [1, 2, 3], [4], [5, 6, 7]]
  assert not allocator.has_room(jnp.int32(1)) and allocator.has_room(jnp.int32(0))
  allocator, is_right, _ = free(allocator, slots[1])
  assert is_right and int(allocator.rows_in_use()[0]) == 5 * PAGE
  allocator, is_right, _ = free(allocator, slots[3])
  assert is_right
  assert not allocator.has_room(jnp.int32(6 * PAGE + 1))
  allocator, across, is_free = push(allocator, jnp.int32(4 * PAGE + 1), jnp.int32(4))
  assert pages_of(allocator, across) == [1, 2, 3, 5, 6]
  np.testing.assert_array_equal(is_free, np.arange(8 * PAGE) >= 7 * PAGE)
  assert [bool(allocator.holds(slot)[0]) for slot in slots] == [True, False, True, False]
  # One page short: it stores nothing and changes nothing.
  after, overflowed, _ = push(allocator, jnp.int32(PAGE + 1), jnp.int32(5))
  assert_trees_equal(after.holder, allocator.holder)
  assert not overflowed.is_stored()[0] and int(after.wanted_rows[0]) == 9 * PAGE
  after, is_right, _ = free(after, overflowed)
  assert is_right and int(after.wanted_rows[0]) == 7 * PAGE
  for slot in slots[0], slots[2], across:
    allocator, is_right, _ = free(allocator, slot)
    assert is_right
  assert_trees_equal(allocator, Pages.empty(8 * PAGE, TILE, 1, PAGE))


def test_a_page_is_freed_once():
  allocator, first, _ = push(Pages.empty(4 * PAGE, TILE, 1, PAGE), jnp.int32(40), jnp.int32(0))
  allocator, is_right, is_held = free(allocator, first)
  assert is_right and is_held
  allocator, second, _ = push(allocator, jnp.int32(40), jnp.int32(1))
  after, is_right, is_held = free(allocator, first)
  assert not is_right and not is_held and allocator.holds(second)
  assert_trees_equal(after, allocator)


def test_no_pages():
  allocator, slot, _ = push(Pages.empty(0, TILE, 1, PAGE), jnp.int32(1), jnp.int32(0))
  assert not slot.is_stored()[0] and allocator.is_free().shape == (0,)
  ragged = RaggedRows([1], 64)
  for runs in (
    allocator.compact_runs(ragged, slot.start[0]),
    allocator.expand_runs(ragged, slot.start[0]),
  ):
    assert all(field.shape == (1,) for field in runs)


def test_the_last_push_number():
  """It is one more in `holder`, and float32 holds that."""
  last = jnp.int32(2**22 - 1)
  allocator, slot, _ = push(Pages.empty(2 * PAGE, TILE, 1, PAGE), jnp.int32(40), last)
  assert allocator.holds(slot) and pages_of(allocator, slot) == [0, 1]
  assert not allocator.holds(slot._replace(start=slot.start - 1))


def copied(runs, source_rows, destination_rows):
  """Returns which source row each destination row gets, -1 for none."""
  found = np.full(destination_rows, -1)
  last = 0
  for source, destination, size in zip(*map(np.asarray, runs), strict=True):
    if size == 0:
      continue
    assert destination >= last and source + size <= source_rows
    last = destination + size
    assert last <= destination_rows
    found[destination:last] = range(source, source + size)
  return found


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_split_at_pages(seed):
  rng = np.random.default_rng(seed)
  total, capacity = 200, 12 * PAGE
  allocator, slots = Pages.empty(capacity, TILE, 1, PAGE), []
  for number in range(12):
    if slots and rng.random() < 0.4:
      allocator, *_ = free(allocator, slots.pop(rng.integers(len(slots)))[0])
    cuts = np.sort(rng.integers(0, total + 1, 8)).reshape(4, 2)
    starts, sizes = cuts[:, 0], cuts[:, 1] - cuts[:, 0]
    order = rng.permutation(4)
    ragged = RaggedRows(sizes[order], total, starts[order])
    if number % 3 == 0:
      ragged = RaggedRows(sizes[order], total)
      starts = np.cumsum(sizes[order]) - sizes[order]
      order = np.arange(4)
      sizes = np.asarray(ragged.group_sizes)
    before = allocator
    allocator, slot, _ = push(allocator, jnp.int32(sizes.sum()), jnp.int32(number))
    rows = np.concatenate([starts[g] + np.arange(sizes[g]) for g in order])
    if slot.is_stored()[0]:
      slots.append((slot, ragged, rows))
      expected = np.full(capacity, -1)
      expected[rows_of(allocator, slot)[: len(rows)]] = rows
      to_stash = before.compact_runs(ragged, slot.start[0])
      np.testing.assert_array_equal(copied(to_stash, total, capacity), expected)
    for slot, ragged, rows in slots:
      back = np.full(total, -1)
      back[rows] = rows_of(allocator, slot)[: len(rows)]
      from_stash = allocator.expand_runs(ragged, slot.start[0])
      np.testing.assert_array_equal(copied(from_stash, capacity, total), back)
  assert slots
