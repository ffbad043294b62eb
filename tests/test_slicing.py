"""dynamic_update_slice and dynamic_slice: as lax has them, and with ragged rows."""

import dataclasses
import functools
import inspect
import re
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import jax.test_util
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash.kernels import dispatch
from pallas_stash.kernels.tiling import choose_tiling
from tests.helpers import ragged_rows
from tests.helpers.checks import assert_trees_equal, needs_devices, once, OPTIMIZED
from tests.helpers.sampling import run_sampled
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

OPERAND_ROWS, TOTAL_ROWS, WIDTH = 41, 34, 100
SIZES, STARTS = np.array([5, 0, 9, 2]), np.array([28, 9, 11, 20])

XLA, MOSAIC = IMPLEMENTATIONS
COMPILED = [name for name in IMPLEMENTATIONS if name != "mosaic_interpret"]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
  """Several tiles in each operand: to interpret large ones takes long."""
  tiling = lambda *args: dataclasses.replace(choose_tiling(*args), tile_rows=32)
  with mock.patch.object(dispatch, "choose_tiling", tiling):
    yield


def write_and_read(operand, update, *groups, implementation=XLA):
  """Writes rows, and reads from three rows before them."""
  start, *layout = groups
  operand = update_rows(operand, update, *groups, implementation)
  return operand, slice_rows(operand, start - 3, *layout, update.shape[0], implementation)


def value_and_vjp(fun, *args):
  """The value, and gradients that depend on it. Exact where the arguments are small integers."""
  out, vjp = jax.vjp(fun, *args)
  return out, vjp(jax.tree.map(lambda leaf: 3 * leaf + 1, out))


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
  "dtype, width", [("float32", 128), ("float16", 100), ("bfloat16", 1), ("int8", 257)]
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2", "int32"])
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


# With groups: gradients.


@pytest.mark.parametrize("implementation", [XLA, once(MOSAIC)])
def test_gradient_of_each_is_the_other(implementation):
  @jax.jit
  def gradients(operand, update, start):
    groups = start, SIZES, STARTS
    update_with = lambda *args: update_rows(*args, *groups, implementation)
    slice_with = lambda operand: slice_rows(operand, *groups, TOTAL_ROWS, implementation)
    _, of_update = jax.vjp(update_with, operand, update)
    _, of_slice = jax.vjp(slice_with, operand)
    return *of_update(operand), *of_slice(update)

  operand, update = integers(0, OPERAND_ROWS, WIDTH), integers(1, TOTAL_ROWS, WIDTH)
  is_row = ragged_rows.expand(np.ones((TOTAL_ROWS, 1)), 0, TOTAL_ROWS, SIZES, STARTS) == 1
  update = np.where(is_row, update, nan_of("float32"))
  for start in (16, 33, -50):
    row = start if start >= 0 else start + OPERAND_ROWS
    d_operand, d_update, d_sliced = gradients(operand, update, np.int32(start))
    expected = ragged_rows.compact(np.zeros_like(update), operand, row, SIZES, STARTS)
    assert_same_bits(d_operand, expected)
    expected = ragged_rows.expand(operand, row, TOTAL_ROWS, SIZES, STARTS)
    assert_same_bits(d_update, expected)
    expected = ragged_rows.compact(update, np.zeros_like(operand), row, SIZES, STARTS)
    assert_same_bits(d_sliced, expected)
    assert not np.isnan(d_sliced).any()


# To interpret its hundreds of kernels takes a minute.
@pytest.mark.once
@pytest.mark.parametrize("implementation", COMPILED)
def test_numerical_gradients(implementation):
  groups = np.int32(30), SIZES, STARTS
  operand, update = integers(0, OPERAND_ROWS, 2), integers(1, TOTAL_ROWS, 2)
  check = functools.partial(jax.test_util.check_grads, order=2, modes=["rev"], eps=1.0)
  check(lambda *args: update_rows(*args, *groups, implementation), (operand, update))
  check(lambda operand: slice_rows(operand, *groups, TOTAL_ROWS, implementation), (operand,))


def test_integers_have_no_gradient():
  groups = np.int32(5), SIZES, STARTS

  def through_integers(x, ints):
    written = update_rows(ints, x.astype(jnp.int32), *groups)
    return slice_rows(written, *groups, TOTAL_ROWS)

  x, ints = integers(0, TOTAL_ROWS, 2), np.ones((OPERAND_ROWS, 2), np.int32)
  loss = lambda x, ints: jnp.sum(x * through_integers(x, ints))
  d_x, d_ints = jax.grad(loss, argnums=(0, 1), allow_int=True)(x, ints)
  np.testing.assert_array_equal(d_x, through_integers(x, ints))
  assert d_ints.dtype == jax.dtypes.float0


# With groups: transformations.


@pytest.mark.parametrize(
  "implementation, wrap",
  [
    (XLA, lambda step: step),
    long_if_interpreted(MOSAIC, lambda step: step),
    # JAX refuses callbacks, the interpreter's, in what it recomputes.
    *((implementation, jax.checkpoint) for implementation in COMPILED),
  ],
)
def test_scan(implementation, wrap):
  def step(operand, layer):
    return write_and_read(operand, *layer, implementation=implementation)

  def scanned(operand, updates):
    return lax.scan(wrap(step), operand, (updates, *groups))

  def unrolled(operand, updates):
    outs = []
    for layer in zip(updates, *groups, strict=True):
      operand, out = write_and_read(operand, *layer)
      outs.append(out)
    return operand, jnp.stack(outs)

  operand, updates = integers(0, OPERAND_ROWS, WIDTH), integers(1, 3, TOTAL_ROWS, WIDTH)
  sizes = np.stack([SIZES, SIZES[::-1], 0 * SIZES])
  groups = np.array([0, 29, 33], np.int32), sizes, np.stack([STARTS, STARTS[::-1], STARTS])
  actual = jax.jit(functools.partial(value_and_vjp, scanned))(operand, updates)
  assert_trees_equal(actual, value_and_vjp(unrolled, operand, updates))


@pytest.mark.parametrize(
  "implementation, in_axes",
  [
    (XLA, (0, 0, 0, 0, 0)),
    (XLA, (None, 0, None, 0, None)),
    (XLA, (1, 1, 0, None, 1)),
    long_if_interpreted(MOSAIC, (None, 0, 0, None, 1)),
  ],
)
def test_vmap(implementation, in_axes):
  def run(operand, update, *groups, implementation=XLA):
    fun = lambda *args: write_and_read(*args, *groups, implementation=implementation)
    return value_and_vjp(fun, operand, update)

  args = (
    integers(0, 3, OPERAND_ROWS, 2),
    integers(1, 3, TOTAL_ROWS, 2),
    np.array([0, 29, -50], np.int32),
    np.stack([SIZES, 0 * SIZES, SIZES[::-1]]),
    np.stack([STARTS, STARTS, STARTS[::-1]]),
  )
  args = [
    arg[:1].repeat(3, 0) if axis is None else arg for arg, axis in zip(args, in_axes, strict=True)
  ]
  expected = jax.tree.map(lambda *leaves: np.stack(leaves), *map(run, *args))
  args = [
    arg[0] if axis is None else np.moveaxis(arg, 0, axis)
    for arg, axis in zip(args, in_axes, strict=True)
  ]
  batched = jax.vmap(functools.partial(run, implementation=implementation), in_axes)
  assert_trees_equal(jax.jit(batched)(*args), expected)


@needs_devices(4)
@pytest.mark.parametrize(
  "implementation, check_vma, spec",
  [
    (XLA, True, P()),
    (XLA, False, P()),
    (XLA, True, P("x")),
    (XLA, False, P("x")),
    long_if_interpreted(MOSAIC, True, P()),
    long_if_interpreted(MOSAIC, False, P("x")),
  ],
)
def test_shard_map(implementation, check_vma, spec):
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
  operands = integers(0, 4 if spec else 1, OPERAND_ROWS, WIDTH)
  updates, starts = integers(1, 4, TOTAL_ROWS, WIDTH), np.array([0, 29, 33, -50], np.int32)
  sizes = np.stack([SIZES, 0 * SIZES, SIZES[::-1], SIZES])

  def on_device(*sharded):
    args = [arg[0] for arg in sharded]
    outs = write_and_read(*args, STARTS, implementation=implementation)
    return jax.tree.map(lambda out: out[None], outs)

  in_specs = spec, P("x"), P("x"), P("x")
  options = {"mesh": mesh, "in_specs": in_specs, "out_specs": P("x"), "check_vma": check_vma}
  sharded = jax.shard_map(on_device, **options)

  def one_by_one(operands, updates, starts, sizes):
    stacked = jnp.broadcast_to(operands, (4, OPERAND_ROWS, WIDTH)), updates, starts, sizes
    outs = [write_and_read(*args, STARTS) for args in zip(*stacked, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

  run = lambda fun, *args: value_and_vjp(lambda *args: fun(*args, starts, sizes), *args)
  actual = jax.jit(functools.partial(run, sharded))(operands, updates)
  assert_trees_equal(actual, run(one_by_one, operands, updates))


@needs_devices(4)
@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_undefined_padding_in_shard_map(implementation):
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
  operands = integers(0, 4, OPERAND_ROWS, 8)

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
  def read(operands):
    return slice_rows(
      operands[0], np.int32(3), SIZES, STARTS, TOTAL_ROWS, implementation, "undefined"
    )[None]

  rows = np.asarray(read(operands))
  for operand, actual in zip(operands, rows, strict=True):
    expected = ragged_rows.expand(operand, 3, TOTAL_ROWS, SIZES, STARTS)
    is_row = expected.any(1)
    assert_same_bits(actual[is_row], expected[is_row])


def test_a_donated_operand_is_updated_in_place():
  operand = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
  update = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
  donating = jax.jit(update_rows.__wrapped__, donate_argnums=0)
  compiled = donating.lower(operand, update, jnp.int32(0), SIZES, STARTS).compile()
  memory, operand_bytes = compiled.memory_analysis(), 4 * operand.size
  assert memory.alias_size_in_bytes == operand_bytes
  assert memory.temp_size_in_bytes < operand_bytes / 4
  assert not re.search(r"f32\[4096,100\]\S* copy\(", compiled.as_text())


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
    (BOTH, dict(operand=(4,), start=(0,)), r"operand of shape \(4,\) must have rank 2"),
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
