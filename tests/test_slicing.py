"""dynamic_update_slice and dynamic_slice: as lax has them, and the values of ragged rows."""

import functools
import inspect
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers import ragged_rows
from tests.helpers.checks import once, OPTIMIZED
from tests.helpers.sampling import run_sampled
from tests.helpers.slicing import (
  OPERAND_ROWS,
  SIZES,
  STARTS,
  TOTAL_ROWS,
  WIDTH,
  with_small_tiles,
)
from tests.helpers.support import (
  as_rows,
  assert_same_bits,
  IMPLEMENTATIONS,
  integers,
  layouts,
  long_if_interpreted,
  nan_of,
  random_bits,
  slice_rows,
  start_rows,
  update_rows,
)

XLA, MOSAIC = IMPLEMENTATIONS


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
  with with_small_tiles():
    yield


# Without groups: lax.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize(
  "shape, slice_shape, start",
  [
    ((9,), (4,), (3,)),
    ((9,), (4,), (7,)),
    ((9,), (4,), (-2,)),
    ((5, 6), (2, 3), (1, 2)),
    ((5, 6), (2, 6), (-5, 9)),
    ((3, 4, 5), (2, 2, 5), (-9, 1, 7)),
    ((), (), ()),
  ],
)
def test_without_groups_it_is_lax(shape, slice_shape, start, dtype):
  operand = jnp.asarray(integers(0, *shape), dtype)
  update = jnp.asarray(integers(1, *slice_shape), dtype)

  def both(module, operand, update):
    updated = module.dynamic_update_slice(operand, update, start)
    return updated, module.dynamic_slice(operand, start, slice_shape)

  actual, expected = (functools.partial(both, module) for module in (ps, lax))
  jax.tree.map(assert_same_bits, actual(operand, update), expected(operand, update))
  jaxprs = [str(jax.make_jaxpr(fun)(operand, update)) for fun in (actual, expected)]
  assert jaxprs[0] == jaxprs[1]


@pytest.mark.parametrize(
  "name, args",
  [
    ("dynamic_update_slice", (np.zeros(4, np.float32), np.zeros(2, np.int32), (0,))),
    ("dynamic_update_slice", (np.zeros(4), np.zeros((2, 2)), (0,))),
    ("dynamic_slice", (np.zeros(4), (0.0,), (2,))),
    ("dynamic_slice", (np.zeros(4), (0,), (5,))),
  ],
)
def test_without_groups_errors_are_those_of_lax(name, args):
  with pytest.raises(TypeError) as expected:
    getattr(lax, name)(*args)
  with pytest.raises(TypeError, match=f"^{re.escape(str(expected.value).splitlines()[0])}"):
    getattr(ps, name)(*args)


# With groups: values.


def optimized(fun, **options):
  return jax.jit(inspect.unwrap(fun), compiler_options=OPTIMIZED, **options)


update_rows_optimized = optimized(update_rows)
slice_rows_optimized = optimized(slice_rows, static_argnames="total_rows")


def check_values(dtype, width, layout, start):
  rng = np.random.default_rng(start + 100)
  operand = random_bits(rng, (OPERAND_ROWS, width), dtype)
  update = random_bits(rng, (TOTAL_ROWS, width), dtype)
  groups = (np.int32(start), *map(as_rows, layout))
  row = start if start >= 0 else start + OPERAND_ROWS  # As in lax.
  actual = update_rows_optimized(operand, update, *groups)
  assert_same_bits(actual, ragged_rows.compact(update, operand, row, *layout))
  actual = slice_rows_optimized(operand, *groups, total_rows=TOTAL_ROWS)
  assert_same_bits(actual, ragged_rows.expand(operand, row, TOTAL_ROWS, *layout))


@pytest.mark.parametrize(
  "dtype, width",
  [
    ("float32", 128),
    *(once(*c) for c in [("float16", 100), ("bfloat16", 1), ("int8", 257)]),
  ],
)
def test_values(dtype, width):
  sampled = {"layout": layouts(TOTAL_ROWS), "start": start_rows(OPERAND_ROWS)}
  run_sampled(check_values, dtype, width, max_examples=40, **sampled)


@pytest.mark.parametrize(
  "start, sizes",
  [
    (5, [2, 1]),
    (np.int8(5 - OPERAND_ROWS), np.array([2, 1], np.uint8)),
    (np.uint32(5), np.array([2, 1])),
    (jnp.int32(5), jnp.array([2, 1])),
  ],
)
def test_untraced_arguments(start, sizes):
  operand, update = integers(0, OPERAND_ROWS, 3), integers(1, 8, 3)
  groups = {"group_sizes": sizes, "group_starts": [4, 0]}
  actual = ps.dynamic_update_slice(operand, update, [start, 0], **groups)
  assert_same_bits(actual, ragged_rows.compact(update, operand, 5, [2, 1], [4, 0]))
  actual = ps.dynamic_slice(operand, [start, 0], [8, 3], **groups)
  assert_same_bits(actual, ragged_rows.expand(operand, 5, 8, [2, 1], [4, 0]))


@pytest.mark.parametrize("start", [5, 2**32 + 5, -(2**32) + 5, 2**63 - 1, -(2**63)])
def test_64_bit_rows_do_not_wrap_around(start):
  with jax.enable_x64(True):
    operand, update = integers(0, OPERAND_ROWS, 3), integers(1, TOTAL_ROWS, 3)
    groups = np.int64(start), np.array([5]), None
    expected = ragged_rows.compact(update, operand, start, [5])
    assert_same_bits(update_rows(operand, update, *groups), expected)
    expected = ragged_rows.expand(operand, start, TOTAL_ROWS, [5])
    assert_same_bits(slice_rows(operand, *groups, TOTAL_ROWS), expected)


@pytest.mark.parametrize("dtype", ["float32", once("float16"), once("float8_e5m2"), "int32"])
@pytest.mark.parametrize(
  "sizes, starts",
  [([3, -1], None), ([20, 15], None), ([3, 3], [0, 2]), ([3, 1], [32, 0]), ([1, 1], [-1, 5])],
)
def test_invalid_groups(sizes, starts, dtype):
  groups = (np.int32(4), np.array(sizes), as_rows(starts))
  operand = jnp.ones((OPERAND_ROWS, 3), dtype)
  assert_same_bits(update_rows(operand, jnp.zeros((TOTAL_ROWS, 3), dtype), *groups), operand)
  for padding in "zero", "undefined":
    rows = np.asarray(slice_rows(operand, *groups, TOTAL_ROWS, padding=padding))
    assert (np.isnan(rows) if jnp.issubdtype(dtype, jnp.inexact) else rows == 0).all()


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_undefined_padding(implementation):
  """Rows and gradients are those of zero padding, from whatever comes back in padding."""
  operand, d_out = integers(0, OPERAND_ROWS, WIDTH), integers(1, TOTAL_ROWS, WIDTH)
  is_row = ragged_rows.expand(np.ones((TOTAL_ROWS, 1)), 0, TOTAL_ROWS, SIZES, STARTS)[:, 0] == 1
  d_out[~is_row] = nan_of("float32")
  for start in 16, 33:  # The second falls past the end.
    groups = np.int32(start), SIZES, STARTS
    slice_with = lambda padding, groups=groups: jax.vjp(
      lambda operand: slice_rows(operand, *groups, TOTAL_ROWS, implementation, padding), operand
    )
    (zero, of_zero), (undefined, of_undefined) = map(slice_with, ("zero", "undefined"))
    is_inside = is_row & (np.asarray(zero) != 0).any(1)
    assert_same_bits(np.asarray(undefined)[is_inside], np.asarray(zero)[is_inside])
    assert is_inside.sum() == min(SIZES.sum(), OPERAND_ROWS - start)
    assert_same_bits(*of_undefined(d_out), *of_zero(d_out))
    if implementation == "mosaic_interpret":  # Where memory starts as NaN, which tells them apart.
      assert np.isnan(undefined).any() and not np.isnan(zero).any()


# Errors.


def update_of(operand=(4, 2), update=(4, 2), start=(0, 0), dtype="float32", **groups):
  groups = {"group_sizes": [1, 2]} | groups
  return ps.dynamic_update_slice(jnp.zeros(operand), jnp.zeros(update, dtype), start, **groups)


def slice_of(operand=(4, 2), start=(0, 0), slice_sizes=(4, 2), **groups):
  groups = {"group_sizes": [1, 2]} | groups
  return ps.dynamic_slice(jnp.zeros(operand), start, slice_sizes, **groups)


BOTH = [update_of, slice_of]


@pytest.mark.parametrize(
  "funs, change, message",
  [
    (BOTH, dict(group_sizes=None, group_starts=[0]), "group_starts must come with group_sizes"),
    (BOTH, dict(group_sizes=[1.0]), "group_sizes of dtype float32 must have an integer dtype"),
    (BOTH, dict(group_starts=[1]), r"group_starts of shape \(1,\) must have one entry for each"),
    (BOTH, dict(implementation="cuda"), "implementation='cuda' must be one of"),
    (BOTH, dict(operand=(4, 2, 1)), r"operand of shape \(4, 2, 1\) must have rank 1 or 2"),
    (BOTH, dict(start=(0,)), r"start_indices=\(0,\) must have one entry for each axis"),
    (BOTH, dict(start=(0.0, 0)), r"start index 0.0 of shape \(\) must be an integer scalar"),
    (BOTH, dict(start=([0], 0)), r"start index .* of shape \(1,\) must be an integer scalar"),
    ([update_of], dict(update=(2,)), r"update of shape \(2,\) must have rank 2"),
    ([update_of], dict(update=(4, 3)), r"update.shape=\(4, 3\) must have the width of .*\(4, 2\)"),
    ([update_of], dict(dtype="int32"), "update.dtype=.*int32.* must equal .*float32"),
    ([slice_of], dict(slice_sizes=(4,)), r"slice_sizes=\(4,\) must be \(total_rows, width\)"),
    ([slice_of], dict(slice_sizes=(4, 3)), r"slice_sizes=\(4, 3\) must be .*\(4, 2\)"),
    ([slice_of], dict(slice_sizes=(0, 2)), "total_rows=0 must be positive"),
    ([slice_of], dict(padding="nan"), r"padding='nan' must be one of \('zero', 'undefined'\)"),
    ([slice_of], dict(padding="nan", group_sizes=None), "padding='nan' must be one of"),
  ],
)
def test_errors(funs, change, message):
  for fun in funs:
    with pytest.raises(ValueError, match=f"^{message}"):
      fun(**change)
