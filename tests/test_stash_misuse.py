"""Push, restore and pop as they are not meant: refused, counted, or NaN for good."""

import jax
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, is_any_nan
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


@pytest.mark.parametrize(
  "sizes, starts",
  [([5, -1], None), ([40, 40], None), ([5, 5], [0, 4]), ([5, 5], [60, 0]), ([2**31 - 1] * 2, None)],
)
def test_groups_that_make_no_sense_are_counted_and_store_nothing(sizes, starts):
  ragged = ragged_of(sizes, starts)
  stash = ps.Stash.empty(128, SPECS)
  values = [jnp.ones((TOTAL_ROWS, *spec.shape), spec.dtype) for spec in SPECS]
  after, slot = push(stash, values, ragged)
  assert not slot.is_stored() and stats_of(after) == [0, 0, 0, 1]
  assert_trees_equal(after.buffers, stash.buffers)


def test_pop_out_of_order_breaks_the_stash_for_good():
  ragged = ragged_of([8])
  stash, first = push(ps.Stash.empty(24, SPECS), values_of(SPECS, 0, ragged)[0], ragged)
  stash, second = push(stash, values_of(SPECS, 1, ragged)[0], ragged)
  stash = pop(stash, first)
  assert stats_of(stash)[0] == 16
  stash = pop(stash, second)
  assert is_any_nan(restore(stash, first, ragged)) and is_any_nan(restore(stash, second, ragged))


def test_restore_with_other_groups_is_nan():
  ragged = ragged_of([8])
  stash, slot = push(ps.Stash.empty(8, SPECS), values_of(SPECS, 0, ragged)[0], ragged)
  assert is_any_nan(restore(stash, slot, ragged_of([9])))


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: ps.Stash.empty(-1, SPECS), "capacity_rows=-1 must be at least 0"),
    (lambda: ps.Stash.empty(1.5, SPECS), "capacity_rows=1.5 must be a static int"),
    (lambda: ps.Stash.empty(8, SPECS, 0), "num_shards=0 must be at least 1"),
    (lambda: ps.Stash.empty(8, []), "residuals is empty"),
    (lambda: ps.Stash.empty(8, SPECS, page_rows=8), "page_rows=8 must be at least 32"),
    (lambda: ps.Stash.empty(8, SPECS, page_rows=48), "page_rows=48 must be a multiple of 32"),
    (lambda: ps.Stash.empty(8, SPECS, page_rows=32.0), "page_rows=32.0 must be a static int"),
    (lambda: ps.Stash.empty(8, [jax.ShapeDtypeStruct((8,), jnp.int32)]), "floating-point dtype"),
  ],
)
def test_empty_refuses(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize(
  "values, message",
  [
    ([jnp.zeros((64, 128), jnp.bfloat16)], "must be those that the stash was made for"),
    ([jnp.zeros((64, *s.shape)) for s in SPECS], "must be those that the stash was made for"),
    ([jnp.zeros((63, *s.shape), s.dtype) for s in SPECS], "must start with ragged.total_rows=64"),
  ],
)
def test_push_refuses_other_residuals(values, message):
  with pytest.raises(ValueError, match=message):
    ps.Stash.empty(8, SPECS).push(values, ragged_of([3]))


def test_a_stash_of_several_shards_is_refused_outside_shard_map():
  ragged = ragged_of([3])
  stash = ps.Stash.empty(8, SPECS, num_shards=4)
  assert all(leaf.shape[0] % 4 == 0 for leaf in jax.tree.leaves(stash))
  slot = ps.Slot(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
  for use in (
    lambda: stash.push(values_of(SPECS, 0, ragged)[0], ragged),
    lambda: stash.restore(slot, ragged),
    lambda: stash.pop(slot),
  ):
    with pytest.raises(ValueError, match="has 4 shards here and must have 1"):
      use()


def test_push_and_restore_refuse_to_be_differentiated():
  ragged = ragged_of([3])
  specs = [jax.ShapeDtypeStruct((4,), jnp.float32)]

  def round_trip(x):
    stash, slot = ps.Stash.empty(8, specs).push([x], ragged)
    return stash.restore(slot, ragged)[0].sum()

  with pytest.raises(NotImplementedError, match="second-order and forward-mode"):
    jax.grad(round_trip)(jnp.ones((TOTAL_ROWS, 4)))
