"""The bump allocator by itself, against a plain Python model of it."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_stash.allocators import Bump, Slot
from pallas_stash.ragged import RaggedRows
from tests.helpers.checks import assert_trees_equal

CAPACITY, TILE = 64, 8


@jax.jit
def push(allocator, rows):
  is_stored = allocator.has_room(rows)
  allocator, start = allocator.take(rows, is_stored)
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
  after, start = allocator.take(jnp.int32(6), True, 3)
  assert (int(start), int(after.top[0]), int(after.wanted_rows[0])) == (43, 56, 56)
  slot = Slot(start[None], jnp.array([6], jnp.int32))
  assert after.holds(slot) and not allocator.holds(slot)
  freed, is_right = after.free(slot)
  assert is_right
  assert_trees_equal(freed, allocator)
  after, _ = allocator.take(jnp.int32(22), False, 3)
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
