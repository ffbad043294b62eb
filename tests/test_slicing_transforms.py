"""The ragged pair under transformations: its gradients, scan, vmap, shard_map, donation."""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import jax.test_util
import numpy as np
import pytest

from tests.helpers import ragged_rows
from tests.helpers.checks import assert_trees_equal, needs_devices, once
from tests.helpers.slicing import (
  OPERAND_ROWS,
  SIZES,
  STARTS,
  TOTAL_ROWS,
  WIDTH,
  with_small_tiles,
)
from tests.helpers.support import (
  assert_same_bits,
  IMPLEMENTATIONS,
  integers,
  long_if_interpreted,
  nan_of,
  slice_rows,
  update_rows,
)

XLA, MOSAIC = IMPLEMENTATIONS
COMPILED = [name for name in IMPLEMENTATIONS if name != "mosaic_interpret"]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
  with with_small_tiles():
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


# Gradients.


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
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


# To interpret its hundreds of kernels takes a minute, to compile them by XLA a few seconds.
@pytest.mark.long
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


# Transformations.


@pytest.mark.parametrize(
  "implementation, wrap",
  [
    once(XLA, lambda step: step),
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
    once(XLA, (0, 0, 0, 0, 0)),
    (XLA, (None, 0, None, 0, None)),
    once(XLA, (1, 1, 0, None, 1)),
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
    once(XLA, False, P()),
    once(XLA, True, P("x")),
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
