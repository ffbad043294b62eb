"""A stash with pages, outside of training: rows in pages that are anywhere, freed in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import pushed_rows
from pallas_stash.kernels import mosaic_tpu
from pallas_stash.ragged import CopyRuns
from tests.helpers.checks import assert_trees_equal
from tests.helpers.pushes import ragged_of, SPECS, stats_of, TOTAL_ROWS, values_of
from tests.helpers.support import assert_same_bits, IMPLEMENTATIONS, long_if_interpreted

XLA, MOSAIC = IMPLEMENTATIONS
PAGE = 32


def compiled(implementation):
  push = lambda stash, *args: stash.push(*args, implementation=implementation)
  restore = lambda stash, *args: stash.restore(*args, implementation=implementation)
  return map(jax.jit, (push, restore, ps.Stash.free))


def fragmented(implementation, specs, page_rows=PAGE):
  """Returns a stash, and pushes (slot, ragged, values) whose pages lie between those of others.

  Of seven pages the pushes have 2, 1, 2 and 2; the second is freed, and then the last; what comes
  then has the page of the one and a page of the other.
  """
  push, restore, free = compiled(implementation)
  stash, pushes = ps.Stash.empty(7 * page_rows, specs, page_rows=page_rows), []
  unit = page_rows // 32
  layouts = [
    ([20 * unit, 0, 13 * unit], [0, 0, 40 * unit]),
    ([5, 20 * unit, 0], [55 * unit, 1, 0]),
    ([64 * unit, 0, 0], [0, 0, 0]),
    ([11, 11, 11 + 32 * (unit - 1)], [1, 22, 40]),
  ]
  across = [30 * unit, 1, 3 * unit], [5, 3, 40 * unit]
  for number, layout in enumerate([*layouts, across]):
    if number == len(layouts):
      for index in 3, 1:
        stash = free(stash, pushes.pop(index)[0])
    ragged = ragged_of(*layout, total_rows=TOTAL_ROWS * unit)
    poisoned, expected = values_of(specs, number, ragged)
    stash, slot = push(stash, poisoned, ragged)
    assert slot.is_stored()[0]
    pushes.append((slot, ragged, expected))
  return stash, pushes, restore, free


@pytest.mark.parametrize(
  "implementation, page_rows",
  [(XLA, 32), (MOSAIC, 32), pytest.param(MOSAIC, 96, marks=pytest.mark.long)],
)
def test_rows_come_back_from_wherever_their_pages_are(implementation, page_rows):
  specs = SPECS if implementation == XLA else SPECS[:1]
  stash, pushes, restore, free = fragmented(implementation, specs, page_rows)
  (last, *_), holder = pushes[-1], np.asarray(stash.allocator.holder)
  assert np.flatnonzero(holder == last.start + 1).tolist() == [2, 5]
  for slot, ragged, expected in pushes:
    assert_trees_equal(restore(stash, slot, ragged), tuple(expected))
  in_use = 6 * page_rows
  assert stats_of(stash) == [in_use, 7 * page_rows, 0, 0]
  for count, (slot, ragged, _) in enumerate(pushes):
    stash = free(stash, slot)
    assert stats_of(stash)[0] == in_use - 2 * page_rows * (count + 1)
    assert all(np.isnan(rows).all() for rows in restore(stash, slot, ragged))
  assert stash.canary[0] == 0


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_other_pages_keep_every_bit(implementation):
  """Also the rows of the last page of a push that it does not need are its own to write."""
  push, *_ = compiled(implementation)
  stash, *_ = fragmented(implementation, SPECS[:1])
  is_there = np.repeat(np.asarray(stash.allocator.holder) > 0, PAGE)
  before = np.asarray(stash.buffers[0])
  ragged = ragged_of([17, 0, 5], [3, 0, 30])
  after, slot = push(stash, values_of(SPECS[:1], 9, ragged)[0], ragged)
  assert slot.is_stored()[0]
  assert_same_bits(np.asarray(after.buffers[0])[is_there], before[is_there])
  full, overflowed = push(after, values_of(SPECS[:1], 9, ragged)[0], ragged)
  assert not overflowed.is_stored()[0]
  assert_same_bits(full.buffers[0], after.buffers[0])
  assert_trees_equal(full.allocator.holder, after.allocator.holder)


def test_a_slot_is_freed_once():
  stash, [(first, *_), (second, other, expected), *_], restore, free = fragmented(XLA, SPECS)
  freed = free(stash, first)
  again = free(freed, first)
  assert freed.canary[0] == 0 and np.isnan(again.canary).all()
  assert_trees_equal(again.allocator, freed.allocator)
  assert_trees_equal(restore(freed, second, other), tuple(expected))
  assert all(np.isnan(rows).all() for rows in restore(again, second, other))


def test_debug_poisons_freed_pages():
  with ps.debug():
    stash, pushes, restore, free = fragmented(XLA, SPECS[:1])
    for slot, ragged, expected in pushes:
      assert_trees_equal(restore(stash, slot, ragged), tuple(expected))
    stash = free(stash, pushes[0][0])
    free_pages = np.asarray(stash.allocator.holder) == 0
    is_nan = np.isnan(np.asarray(stash.buffers[0], np.float32)).all(1)
    assert free_pages.sum() == 3 and is_nan[np.repeat(free_pages, PAGE)].all()
    assert np.isnan(np.asarray(stash.reset().buffers[0], np.float32)).all()


def test_each_example_of_vmap_has_its_own_pages():
  specs, counts = SPECS[1:2], jnp.array([[40, 0, 3], [0, 0, 1], [10, 30, 24]])
  rows = jnp.asarray(np.random.default_rng(0).normal(size=(3, TOTAL_ROWS, 3, 5)), jnp.float32)

  def push_twice(rows, sizes):
    stash = ps.Stash.empty(4 * PAGE, specs, page_rows=PAGE)
    ragged = ps.RaggedRows(sizes, TOTAL_ROWS)
    stash, first = stash.push([rows], ragged)
    stash, second = stash.push([2 * rows], ragged)
    stash = stash.free(first)
    return stash.restore(second, ragged), stash.stats()

  batched = jax.jit(jax.vmap(push_twice))(rows, counts)
  for index in range(3):
    one = jax.jit(push_twice)(rows[index], counts[index])
    assert_trees_equal(jax.tree.map(lambda leaf, i=index: leaf[i], batched), one)


def test_the_state_has_no_float64_and_mixes_no_dtypes():
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    stash, [(slot, ragged, expected), *_], restore, free = fragmented(XLA, SPECS[:2])
    assert_trees_equal(restore(stash, slot, ragged), tuple(expected))
    after = free(stash, slot)
  dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(after)}
  assert dtypes == {"bfloat16", "float32", "int32"}


def test_a_stash_with_pages_prints_without_its_values():
  stash = ps.Stash.empty(64, SPECS[1:2], page_rows=PAGE)
  assert repr(stash) == (
    "Stash(float32[3, 5]; buffers=(float32[64, 128],), page_rows=32, holder=float32[2])"
  )


@pytest.mark.parametrize("seed", range(3))
def test_cores_share_the_rows_not_the_pages_between_them(seed):
  rng = np.random.default_rng(seed)
  pages = np.sort(rng.permutation(1000)[:20]) * PAGE
  sizes = np.where(rng.random(20) < 0.3, 0, rng.integers(1, PAGE + 1, 20))
  runs = CopyRuns(*map(jnp.int32, (np.zeros(20), np.where(sizes > 0, pages, 0), sizes)))
  middle = int(mosaic_tpu.middle_of_runs(runs))
  before = np.clip(middle - pages, 0, sizes).sum()
  assert before == (sizes.sum() + 1) // 2
  assert mosaic_tpu.middle_of_runs(jax.tree.map(jnp.zeros_like, runs)) == 0


WIDTH, HIDDEN, GROUPS, ROWS = 128, 256, 2, 64
SIZES = jnp.array([20, 25], jnp.int32)


def gradients_of(layer, page_rows, num_residuals, width):
  keys = jax.random.split(jax.random.key(0), 4)
  x = jax.random.normal(keys[0], (ROWS, WIDTH))
  shapes = [(GROUPS, WIDTH, HIDDEN)] * 2 + [(GROUPS, HIDDEN, WIDTH)]
  matrices = [jax.random.normal(k, s) / 16 for k, s in zip(keys[1:], shapes, strict=True)]
  specs = [jax.ShapeDtypeStruct((width,), jnp.float32)] * num_residuals

  def loss(x, matrices):
    stash = ps.Stash.empty(128, specs, page_rows=page_rows)
    out, stash = layer(stash, x, matrices)
    live = jnp.arange(ROWS)[:, None] < SIZES.sum()
    return jnp.sum(ps.seal(jnp.where(live, out, 0), stash) ** 2)

  return jax.jit(jax.grad(loss, (0, 1)))(x, matrices)


def by_gmm(stash, x, matrices):
  return ps.gmm(stash, x, matrices[0], SIZES, grouped_matmul=jax.lax.ragged_dot)


def by_mlp(stash, x, matrices):
  return ps.grouped_mlp(stash, x, *matrices, SIZES)


@pytest.mark.parametrize("layer, residuals", [(by_gmm, (1, WIDTH)), (by_mlp, (2, HIDDEN))])
def test_matmuls_that_keep_their_operands_copy_them_to_pages(layer, residuals):
  paged, contiguous = (gradients_of(layer, rows, *residuals) for rows in (PAGE, None))
  assert_trees_equal(paged, contiguous)


@pytest.mark.once
@pytest.mark.parametrize("implementation", [XLA, MOSAIC])
def test_rows_beside_those_of_a_slot_that_is_not_held_go_nowhere(implementation):
  """Every page is another's, and behind the last one is no memory."""
  specs = SPECS[:1] * 2
  stash, ragged = (
    ps.Stash.empty(2 * PAGE, specs, page_rows=PAGE),
    ragged_of([17, 0, 30], [3, 0, 30]),
  )
  values, _ = values_of(specs[:1], 0, ragged)
  push = jax.jit(
    lambda stash, values: pushed_rows.push_some(
      stash, values, ragged, specs[1:], None, implementation
    )
  )
  stash, slot = push(stash, values)
  assert slot.is_stored()[0]
  overflowed, other = push(stash, values)
  store = jax.jit(
    lambda stash, slot: pushed_rows.store_others(stash, slot, values, ragged, [1], implementation)
  )
  stored = store(overflowed, slot)
  assert stored.allocator.holder.tolist() == [-1, -1]
  for wrong in other, slot._replace(start=slot.start + 5):
    after = store(stored, wrong)
    assert_trees_equal(after.buffers, stored.buffers)
    assert after.allocator.holder.tolist() == [-1, -1]


def test_pages_set_aside_are_neither_free_nor_held():
  """So a pass between the halves of another takes none of its pages, and nobody reads them."""
  stash, pushes, restore, free = fragmented(XLA, SPECS[:1])
  slot, ragged, expected = pushes[1]
  aside = stash.set_aside(slot)
  assert stats_of(aside) == stats_of(stash)
  assert np.isnan(restore(aside, slot, ragged)[0]).all()
  assert np.isnan(free(aside, slot).canary).all()
  assert_trees_equal(restore(aside, *pushes[0][:2]), tuple(pushes[0][2]))
  assert_trees_equal(aside.set_aside(slot), stash)
  assert stats_of(free(aside, pushes[0][0]))[0] == stats_of(stash)[0] - 2 * PAGE
  not_stored = slot._replace(start=jnp.array([-1], jnp.int32))
  assert_trees_equal(stash.set_aside(not_stored), stash)
