"""The drop-in pair on one value a row, such as token ids: as on a buffer of one column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers import ragged_rows
from tests.helpers.checks import assert_trees_equal
from tests.helpers.support import (
  assert_same_bits,
  IMPLEMENTATIONS,
  long_if_interpreted,
  random_bits,
)

XLA, MOSAIC = IMPLEMENTATIONS
SIZES, STARTS = np.array([3, 0, 5], np.int32), np.array([9, 0, 1], np.int32)
OPERAND_ROWS, TOTAL_ROWS, START = 24, 16, 18  # The last two rows are past the end.


def update_and_slice(operand, update, start_indices, starts, **options):
  groups = {"group_sizes": SIZES, "group_starts": starts, **options}
  updated = ps.dynamic_update_slice(operand, update, start_indices, **groups)
  return updated, ps.dynamic_slice(operand, start_indices, (TOTAL_ROWS,), **groups)


@pytest.mark.parametrize(
  "implementation, dtype",
  [(XLA, "int32"), (XLA, "bfloat16"), (XLA, "int8"), long_if_interpreted(MOSAIC, "int32")],
)
@pytest.mark.parametrize("starts", [None, STARTS])
def test_as_one_column(implementation, dtype, starts):
  rng = np.random.default_rng(0)
  operand, update = (random_bits(rng, (n,), dtype) for n in (OPERAND_ROWS, TOTAL_ROWS))
  run = jax.jit(lambda *args: update_and_slice(*args, starts, implementation=implementation))
  updated, sliced = run(operand, update, (START,))
  layout = SIZES, np.cumsum(SIZES) - SIZES if starts is None else starts
  expected = ragged_rows.compact(update[:, None], operand[:, None], START, *layout)
  assert_same_bits(updated, expected[:, 0])
  expected = ragged_rows.expand(operand[:, None], START, TOTAL_ROWS, *layout)
  assert_same_bits(sliced, expected[:, 0])


def test_start_indices():
  operand, update = np.arange(OPERAND_ROWS), -np.arange(TOTAL_ROWS)
  expected = update_and_slice(operand, update, (4,), STARTS)
  for start in ([4], np.array([4]), [jnp.int32(4)], (4 - OPERAND_ROWS,)):
    assert_trees_equal(update_and_slice(operand, update, start, STARTS), expected)


def test_gradients_are_those_of_one_column():
  rng = np.random.default_rng(0)
  operand, d_updated = rng.normal(size=(2, OPERAND_ROWS)).astype(np.float32)
  update, d_sliced = rng.normal(size=(2, TOTAL_ROWS)).astype(np.float32)

  def loss(operand, update, is_column):
    groups = {"group_sizes": SIZES, "group_starts": STARTS}
    start, shape = (START,), (TOTAL_ROWS,)
    if is_column:
      operand, update = operand[:, None], update[:, None]
      start, shape = (START, 0), (TOTAL_ROWS, 1)
    updated = ps.dynamic_update_slice(operand, update, start, **groups).ravel()
    sliced = ps.dynamic_slice(operand, start, shape, **groups).ravel()
    return updated @ d_updated + sliced @ d_sliced

  gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
  actual = gradient(operand, update, False)
  assert_trees_equal(actual, gradient(operand, update, True))
  assert np.count_nonzero(actual[1]) == OPERAND_ROWS - START


@pytest.mark.parametrize(
  "start, size, message",
  [
    ((0, 0), (4,), r"start_indices=\(0, 0\) must have one entry for each axis of .*\(24,\)"),
    (0, (4,), "start_indices=0 must have one entry for each axis"),
    ((0,), (4, 1), r"slice_sizes=\(4, 1\) must be \(total_rows,\) for operand.shape=\(24,\)"),
  ],
)
def test_other_ranks_are_refused(start, size, message):
  with pytest.raises(ValueError, match=message):
    ps.dynamic_slice(np.arange(OPERAND_ROWS), start, size, group_sizes=SIZES)
  with pytest.raises(ValueError, match=r"update of shape \(4, 1\) must have rank 1, as operand"):
    ps.dynamic_update_slice(np.zeros(4), np.zeros((4, 1)), (0,), group_sizes=SIZES)
