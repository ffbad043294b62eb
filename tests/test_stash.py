"""Push, restore, pop and stats outside autodiff: every row is compared bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, is_any_nan, OPTIMIZED
from tests.helpers.pushes import (
  pop,
  push,
  ragged_of,
  restore,
  SPECS,
  stats_of,
  TOTAL_ROWS,
  values_of,
)
from tests.helpers.stashes import with_allocator, with_rows_taken
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted

XLA, MOSAIC = IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_what_is_pushed_comes_back(implementation):
  specs = SPECS
  layouts = [
    ragged_of([5, 0, 7]),
    ragged_of([0, 0, 0]),
    ragged_of([9, 1, 3], [40, 0, 20]),
    ragged_of([64, 0, 0]),
  ]
  if implementation == "mosaic_interpret":
    # Seconds for each kernel that is compiled: the same layouts for one, of two dtypes.
    specs, starts = SPECS[:2], [[0, 0, 5], [0, 0, 0], [40, 0, 20], [0, 0, 0]]
    layouts = [ragged_of(layout.group_sizes, s) for layout, s in zip(layouts, starts, strict=True)]
  options = OPTIMIZED if implementation == "xla" else None  # What is interpreted compiles for long.
  jit = functools.partial(jax.jit, compiler_options=options)
  push = jit(lambda stash, *a: stash.push(*a, implementation=implementation))
  restore = jit(lambda stash, *a: stash.restore(*a, implementation=implementation))
  stash = ps.Stash.empty(120, specs)
  pushed = []
  for seed, ragged in enumerate(layouts):
    poisoned, expected = values_of(specs, seed, ragged)
    stash, slot = push(stash, poisoned, ragged)
    pushed.append((slot, ragged, expected))
  assert stats_of(stash) == [16 + 0 + 16 + 64, 96, 0, 0]
  for slot, ragged, expected in pushed:
    assert_trees_equal(restore(stash, slot, ragged), tuple(expected))


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_undefined_padding(implementation):
  options = {"padding": "undefined", "implementation": implementation}
  ragged = ragged_of([9, 1, 3], [40, 0, 20])
  poisoned, expected = values_of(SPECS, 0, ragged)
  stash, slot = push(ps.Stash.empty(24, SPECS), poisoned, ragged)
  is_row = ~np.isnan(poisoned[0]).any(1)
  of_rows = lambda values: [value[is_row] for value in values]
  assert_trees_equal(of_rows(stash.restore(slot, ragged, **options)), of_rows(expected))
  stash, lost = push(stash, poisoned, ragged)
  restored = stash.restore(lost, ragged, **options)
  assert all(np.isnan(value).all() for value in restored)  # What is not there is never undefined.
  with pytest.raises(ValueError, match="padding='blank' must be one of"):
    stash.restore(slot, ragged, padding="blank")


def test_values_are_matched_by_shape_and_dtype_not_by_position():
  ragged = ragged_of([5, 6])
  specs = [*SPECS, SPECS[0]]
  poisoned, expected = values_of(specs, 0, ragged)
  order = [3, 1, 2, 0]
  stash, slot = push(ps.Stash.empty(64, specs), [poisoned[i] for i in order], ragged)
  # The first and the last are alike: those two keep the order in which they were pushed.
  swapped = [expected[3], expected[1], expected[2], expected[0]]
  assert_trees_equal(restore(stash, slot, ragged), tuple(swapped))


@pytest.mark.parametrize("dtype, wasted", [(jnp.float32, 7), (jnp.float8_e4m3fn, 31)])
def test_a_push_wastes_less_than_a_tile(dtype, wasted):
  specs = [jax.ShapeDtypeStruct((128,), dtype), SPECS[0]]
  stash = ps.Stash.empty(64, specs)
  values = values_of(specs, 0, ragged_of([33]))[0]
  for rows in range(1, 34):
    after, _ = push(stash, values, ragged_of([rows]))
    assert 0 <= int(after.stats().rows_in_use[0]) - rows <= wasted
  assert stash.alignment == wasted + 1


def test_a_stash_can_be_donated():
  donated = jax.jit(lambda stash: jax.tree.map(lambda leaf: leaf + 1, stash), donate_argnums=0)
  stash = ps.Stash.empty(8, SPECS)
  donated(stash)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(stash))


def test_the_stash_holds_its_capacity_and_no_more():
  stash = ps.Stash.empty(20, SPECS)
  assert stash.rows_per_shard == 24  # One tile more at the most.
  assert [b.nbytes for b in stash.buffers] == [24 * 128 * 2, 24 * 128 * 4, 24 * 128 * 2]


def test_overflow_stores_nothing_and_changes_nothing():
  first, second, third = ragged_of([16]), ragged_of([9]), ragged_of([8])
  poisoned, expected = values_of(SPECS, 0, first)
  stash, slot = push(ps.Stash.empty(24, SPECS), poisoned, first)
  before = stash.buffers
  stash, lost = push(stash, values_of(SPECS, 1, second)[0], second)
  assert_trees_equal(stash.buffers, before)
  assert not lost.is_stored() and stats_of(stash) == [16, 16, 1, 0]
  assert is_any_nan(restore(stash, lost, second))
  poisoned_third, expected_third = values_of(SPECS, 2, third)
  stash, fits = push(stash, poisoned_third, third)  # What fits later is still taken.
  assert_trees_equal(restore(stash, slot, first), tuple(expected))
  assert_trees_equal(restore(stash, fits, third), tuple(expected_third))
  assert stats_of(stash) == [24, 24, 1, 0]


@pytest.mark.parametrize("capacity", [0, 8])
def test_a_push_without_rows_always_fits(capacity):
  nothing, full = ragged_of([0, 0]), ragged_of([8])
  stash = ps.Stash.empty(capacity, SPECS)
  if capacity:
    stash, _ = push(stash, values_of(SPECS, 0, full)[0], full)
  poisoned, expected = values_of(SPECS, 0, nothing)
  stash, slot = push(stash, poisoned, nothing)
  assert bool(slot.is_stored()) and stats_of(stash)[2] == 0
  assert_trees_equal(restore(stash, slot, nothing), tuple(expected))


def test_pop_frees_rows_last_in_first_out():
  first, second = ragged_of([16]), ragged_of([7])
  poisoned, expected = values_of(SPECS, 0, first)
  stash, slot = push(ps.Stash.empty(24, SPECS), poisoned, first)
  stash, top = push(stash, values_of(SPECS, 1, second)[0], second)
  stash = pop(stash, top)
  assert stats_of(stash) == [16, 24, 0, 0]
  assert is_any_nan(restore(stash, top, second))  # It is no longer there.
  poisoned, expected_again = values_of(SPECS, 2, second)
  stash, again = push(stash, poisoned, second)
  assert_trees_equal(restore(stash, again, second), tuple(expected_again))
  assert_trees_equal(restore(stash, slot, first), tuple(expected))


def test_pop_of_what_was_not_stored_does_nothing():
  ragged = ragged_of([8])
  stash, slot = push(ps.Stash.empty(8, SPECS), values_of(SPECS, 0, ragged)[0], ragged)
  stash, lost = push(stash, values_of(SPECS, 0, ragged)[0], ragged)
  stash = pop(stash, lost)
  assert stats_of(stash)[0] == 8 and not is_any_nan(restore(stash, slot, ragged))


def test_sufficient_rows_is_the_capacity_that_stores_every_push():
  """Random pushes and pops: enough is enough, and a tile less is not.

  In one stash, whose rows before those of the capacity are taken, so that there is one program.
  """
  rng = np.random.default_rng(0)
  spec = [jax.ShapeDtypeStruct((128,), jnp.float32)]
  values = [jnp.ones((TOTAL_ROWS, 128))]

  def run(capacity, moves):
    stash, slots = ps.Stash.empty(1024, spec), []
    taken = 1024 - capacity
    stash = with_rows_taken(stash, taken)
    for rows in moves:
      if rows >= 0:
        stash, slot = push(stash, values, ragged_of([rows]))
        slots.append(slot)
      elif slots:
        stash = pop(stash, slots.pop())
    assert stash.canary[0] == 0
    stats = jax.tree.map(lambda x: int(x[0]), stash.stats())
    return stats._replace(peak_rows=max(0, stats.peak_rows - taken))

  for _ in range(8):
    moves = np.where(rng.random(12) < 0.3, -1, rng.integers(0, TOTAL_ROWS + 1, 12))
    enough = run(1024, moves).sufficient_rows
    for capacity in (enough, enough + 40):
      stats = run(capacity, moves)
      assert stats.overflowed_pushes == 0 and stats.sufficient_rows == stats.peak_rows == enough
    if enough:
      stats = run(enough - 8, moves)
      assert stats.overflowed_pushes > 0 and stats.sufficient_rows == enough


def test_sufficient_rows_do_not_wrap_around():
  spec = [jax.ShapeDtypeStruct((128,), jnp.float32)]
  values, ragged = [jnp.ones((TOTAL_ROWS, 128))], ragged_of([TOTAL_ROWS])
  stash = ps.Stash.empty(0, spec)
  wanted = jnp.full((1,), 2**31 - 65, jnp.int32)
  stash = with_allocator(stash, wanted_rows=wanted)
  for expected in (2**31 - 1, 2**31 - 1):
    stash, _ = push(stash, values, ragged)
    assert int(stash.stats().sufficient_rows[0]) == expected


def test_reset_frees_all_rows_and_counts_on():
  """One stash for two microbatches: the capacity that suffices is that of one of them."""
  ragged = ragged_of([8])
  stash = ps.Stash.empty(16, SPECS)
  for _ in range(2):
    for _ in range(3):
      stash, slot = push(stash, values_of(SPECS, 0, ragged)[0], ragged)
    stash = jax.jit(ps.Stash.reset)(stash)
    assert is_any_nan(restore(stash, slot, ragged))
  stats = jax.tree.map(lambda leaf: int(leaf[0]), stash.stats())
  assert stats == ps.StashStats(0, 16, overflowed_pushes=2, invalid_pushes=0, sufficient_rows=24)
