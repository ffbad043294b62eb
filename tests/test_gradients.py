"""Gradients of the reference model with a stash equal those of saving the residuals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import moe_training
from tests.helpers.checks import assert_trees_equal, is_any_nan, long, needs_devices, once
from tests.helpers.moe_training import CONFIG

AMPLE = 320 * 32


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


def rows_needed(group_sizes, devices, unit):
  """Returns the rows that the fullest device needs, each push rounded up to a tile or to pages."""
  rows = np.asarray(group_sizes).reshape(CONFIG.layers, devices, -1).sum(-1)
  return int((-(-rows // unit) * unit).sum(0).max())


def check(capacity, devices, structure, config=CONFIG, is_static=False, **options):
  """Compares a stash with saving the residuals.

  Args:
    capacity: rows of the stash, or a function of the rows that are needed.
    devices, structure, config: as for `moe_training.gradients`.
    is_static: whether the stash is made so large, by a program of its own; else a large one is
      filled up to that, by a program that is compiled once.
    **options: as for `moe_training.gradients`.
  """
  page_rows = options.pop("page_rows", None)
  saved = moe_training.gradients(config, devices, structure, **options)
  loss, gradients, _, group_sizes = saved
  needed = rows_needed(group_sizes, devices, page_rows or 8)
  capacity = capacity(needed) if callable(capacity) else capacity
  options |= {"capacity": capacity} if is_static else {"capacity": AMPLE, "room": capacity}
  options["page_rows"] = page_rows
  stashed = moe_training.gradients(config, devices, structure, **options)
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


def half(rows):
  return rows // 2


def half_of_the_tiles(rows):
  return rows // 16 * 8


def exact(rows):
  return rows


def one_page_short(rows):
  return rows - 32


# With the 4 devices "inside" of the test below all pairs of structure and check_vma; for long, with
# those of the number of devices.
@pytest.mark.parametrize(
  "devices, structure, check_vma",
  [
    pytest.param(*case, marks=[needs_devices(case[0]), *marks])
    for case, marks in [
      ((1, "outside", False), [pytest.mark.long]),
      ((2, "inside", True), []),
      ((4, "outside", True), [pytest.mark.long]),
      ((1, "inside", True), [pytest.mark.long]),
      ((2, "outside", False), [pytest.mark.long]),
    ]
  ],
)
def test_gradients_in_both_structures(devices, structure, check_vma):
  """At any capacity, by one program."""
  for capacity in half_of_the_tiles, exact, 0, AMPLE:
    check(capacity, devices, structure, check_vma=check_vma)


@needs_devices(2)
@pytest.mark.parametrize("structure", [long("inside"), once("outside")])
def test_gradients_with_pages(structure):
  for capacity in exact, one_page_short, 0:
    check(capacity, 2, structure, page_rows=32)


@pytest.mark.once
@needs_devices(4)
@pytest.mark.parametrize("capacity", list(map(long, (0, 1, half, exact, AMPLE))))
def test_gradients_at_any_capacity(capacity):
  """By a program for each, compiled as a user would."""
  check(capacity, 4, "inside", is_static=True, check_vma=False, is_optimized=True)


@pytest.mark.long
@needs_devices(4)
def test_gradients_of_a_bfloat16_model():
  """Bit for bit, once XLA rounds to bfloat16 wherever the program says so."""
  config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
  for capacity in half_of_the_tiles, exact:
    check(capacity, 4, "inside", config)


@needs_devices(2)
def test_devices_overflow_on_their_own():
  """A capacity that is enough for one device and not for the other."""
  options = {"check_vma": True}
  *_, group_sizes = moe_training.gradients(CONFIG, 2, "inside", **options)
  rows = np.asarray(group_sizes).reshape(CONFIG.layers, 2, -1).sum(-1)
  needed = (-(-rows // 8) * 8).sum(0)
  assert needed[0] != needed[1]
  capacity = int(needed.min())
  check(capacity, 2, "inside", **options)
  options |= {"capacity": AMPLE, "room": capacity}
  *_, stats, _ = moe_training.gradients(CONFIG, 2, "inside", **options)
  assert sorted(np.asarray(stats.overflowed_pushes) > 0) == [False, True]


@needs_devices(4)
@pytest.mark.parametrize(
  "seals, structure",
  [
    (0, "inside"),
    long(2, "outside"),
    long(0, "outside"),
    long(2, "inside"),
  ],
)
def test_gradients_are_nan_unless_sealed_once(seals, structure):
  """Never sealed, or twice, is known only in the backward pass."""
  loss, gradients, *_ = moe_training.gradients(CONFIG, 4, structure, capacity=AMPLE, seals=seals)
  assert not is_any_nan(loss)
  experts = gradients["layers"]["moe"]
  assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(experts["router"]))
  assert is_any_nan(gradients["embedding"]) and is_any_nan(experts["experts"])
