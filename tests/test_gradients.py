"""Gradients of the reference model with a stash equal those of saving the residuals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import moe_training
from tests.checks import assert_trees_equal, is_any_nan, needs_devices
from tests.moe_training import CONFIG

AMPLE = 10_000


def assert_close(actual, expected):
  """XLA may fuse a recomputed layer differently, and so round it differently.

  That is some tens of roundings through three layers, of sums that may cancel.
  """

  def check(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    rounding = 32 * float(jnp.finfo(actual_dtype).eps)
    np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding * np.abs(b).max())

  actual_dtype = jax.tree.leaves(actual)[0].dtype
  jax.tree.map(check, jax.device_get(actual), jax.device_get(expected))


def rows_needed(group_sizes, devices):
  """Returns the rows that the fullest device needs, each push rounded up to a tile of 8."""
  rows = np.asarray(group_sizes).reshape(CONFIG.layers, devices, -1).sum(-1)
  return int((-(-rows // 8) * 8).sum(0).max())


def check(capacity_of, devices, structure, check_vma, config=CONFIG):
  saved = moe_training.gradients(config, devices, structure, check_vma=check_vma)
  loss, gradients, _, group_sizes = saved
  needed = rows_needed(group_sizes, devices)
  capacity = capacity_of(needed)
  stashed = moe_training.gradients(
    config, devices, structure, check_vma=check_vma, capacity=capacity
  )
  stats = stashed[2]
  assert not is_any_nan(gradients)
  assert_trees_equal((stashed[0], stashed[3]), (loss, group_sizes))
  if capacity >= needed:
    assert_trees_equal(stashed[1], gradients)
    assert int(stats.overflowed_pushes.sum()) == 0
    assert int(stats.peak_rows.max()) == needed
  else:
    assert_close(stashed[1], gradients)
    assert int(stats.overflowed_pushes.max()) > 0
  assert int(stats.invalid_pushes.sum()) == 0


STRUCTURES = [
  pytest.param(devices, structure, check_vma, marks=needs_devices(devices))
  for devices, structure, check_vma in [
    (1, "inside", True),
    (1, "outside", True),
    (2, "outside", False),
    (4, "inside", True),
    (4, "inside", False),
    (4, "outside", True),
    (4, "outside", False),
  ]
]
HALF, EXACT = (lambda rows: rows // 2), (lambda rows: rows)


@pytest.mark.parametrize("devices, structure, check_vma", STRUCTURES)
@pytest.mark.parametrize("capacity_of", [HALF, EXACT], ids=["half", "exact"])
def test_gradients_in_both_structures(capacity_of, devices, structure, check_vma):
  check(capacity_of, devices, structure, check_vma)


@needs_devices(4)
@pytest.mark.parametrize("structure", ["inside", "outside"])
@pytest.mark.parametrize("capacity", [0, 1, AMPLE])
def test_gradients_at_any_capacity(capacity, structure):
  check(lambda rows: capacity, 4, structure, True)


@needs_devices(4)
@pytest.mark.parametrize("capacity_of", [HALF, EXACT], ids=["half", "exact"])
def test_gradients_of_a_bfloat16_model(capacity_of):
  """Bit for bit, once XLA rounds to bfloat16 wherever the program says so."""
  config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
  check(capacity_of, 4, "inside", True, config)


@needs_devices(2)
def test_devices_overflow_on_their_own():
  """A capacity that is enough for one device and not for the other."""
  *_, group_sizes = moe_training.gradients(CONFIG, 2, "inside")
  rows = np.asarray(group_sizes).reshape(CONFIG.layers, 2, -1).sum(-1)
  needed = (-(-rows // 8) * 8).sum(0)
  assert needed[0] != needed[1]
  check(lambda _: int(needed.min()), 2, "inside", True)
  *_, stats, _ = moe_training.gradients(CONFIG, 2, "inside", capacity=int(needed.min()))
  assert sorted(np.asarray(stats.overflowed_pushes) > 0) == [False, True]


@needs_devices(4)
@pytest.mark.parametrize("structure", ["inside", "outside"])
@pytest.mark.parametrize("seals", [0, 2])
def test_gradients_are_nan_unless_sealed_once(seals, structure):
  """Never sealed, or twice, is known only in the backward pass."""
  loss, gradients, *_ = moe_training.gradients(CONFIG, 4, structure, capacity=AMPLE, seals=seals)
  assert not is_any_nan(loss)
  experts = gradients["layers"]["moe"]
  assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(experts["router"]))
  assert is_any_nan(gradients["embedding"]) and is_any_nan(experts["experts"])
