"""`grouped_mlp` under the transformations of jax, on several devices, and in `debug`."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, is_any_nan, long, needs_devices, once
from tests.helpers.mlp import (
  assert_close,
  differentiate,
  LIVE,
  operands,
  ROWS,
  SIZES,
  specs,
  stashed,
  TILING,
  WIDTH,
)

SAVE_SLOTS = jax.checkpoint_policies.save_only_these_names(ps.SLOT_NAME)
LAYERS = 2


def layer(carry, weights, **options):
  x, stash = carry
  out, stash = ps.grouped_mlp(stash, x, *weights, SIZES, tiling=TILING, **options)
  return (x + jnp.where(LIVE[:, None], jnp.sin(out[:, :WIDTH]), 0), stash), None


def of_layers(arrays):
  return [jnp.stack([array, 2 * array]) for array in arrays]


def gradients_of_layers(transform, capacity):
  (x, *weights, _, _, _), d_out = operands()

  def loss(x, weights):
    carry = x, ps.Stash.empty(capacity, specs())
    (x, stash), _ = lax.scan(transform(layer), carry, weights)
    return jnp.sum(jnp.where(LIVE[:, None], ps.seal(x, stash) * d_out[:, :WIDTH], 0))

  return jax.jit(jax.grad(loss, (0, 1)))(jnp.where(LIVE[:, None], x, 0), of_layers(weights))


@pytest.mark.parametrize("capacity", [long(LAYERS * (ROWS + 1)), once(ROWS + 1)])
def test_a_replay_of_the_layer(capacity):
  """Which makes the hidden rows again, but keeps no stash; of the last layer all rows, or none."""
  replayed = gradients_of_layers(functools.partial(jax.checkpoint, policy=SAVE_SLOTS), capacity)
  assert not is_any_nan(replayed)
  assert_trees_equal(replayed, gradients_of_layers(lambda layer: layer, LAYERS * (ROWS + 1)))


@pytest.mark.once
def test_under_vmap_examples_run_one_by_one():
  (x, *others), d_out = operands()

  def gradients(x):
    _, vjp = jax.vjp(lambda x, *others: stashed()(x, *others)[0], x, *others)
    return vjp(d_out)

  both = jnp.stack([x, 2 * x])
  actual = jax.jit(jax.vmap(gradients))(both)
  for i, one in enumerate(both):
    assert_close(jax.tree.map(lambda x, i=i: x[i], actual), jax.jit(gradients)(one), "float32")


@pytest.mark.once
def test_without_jit():
  args, d_out = operands()
  out, vjp, stats = jax.vjp(stashed(), *args, has_aux=True)
  actual = jnp.where(LIVE[:, None], out, 0), vjp(d_out), stats
  assert_close(actual, differentiate(stashed(), args, d_out), "float32")


DEVICES = 2


def in_shard_map(check_vma, is_inside, capacity):
  """Gradients where each device has rows of its own, the second half as many as the first."""
  (x, *weights, row_weights, _, _), d_out = operands()
  mesh = jax.make_mesh((DEVICES,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  of_devices = lambda array: jnp.concatenate([array, array / 2])
  x, row_weights, d_out = map(
    of_devices, (jnp.where(LIVE[:, None], x, 0), row_weights, d_out[:, :WIDTH])
  )
  sizes = jnp.concatenate([SIZES, SIZES // 2])

  def one_layer(carry, weights, row_weights, sizes):
    x, stash = carry
    options = {"row_weights": row_weights, "tiling": TILING, "axis_name": "expert"}
    out, stash = ps.grouped_mlp(stash, x, *weights, sizes, **options)
    is_live = jnp.arange(x.shape[0]) < jnp.sum(sizes)
    return x + jnp.where(is_live[:, None], out[:, :WIDTH], 0), stash

  options = {"mesh": mesh, "check_vma": check_vma}
  rows, whole = P("expert"), P()

  def loss(x, weights, row_weights):
    if is_inside:

      def on_device(x, weights, row_weights, sizes):
        carry, _ = lax.scan(
          lambda carry, w: (one_layer(carry, w, row_weights, sizes), None),
          (x, lax.pcast(ps.Stash.empty(capacity, specs()), "expert", to="varying")),
          weights,
        )
        return ps.seal(*carry), carry[1].stats().overflowed_pushes

      run = jax.shard_map(
        on_device, in_specs=(rows, whole, rows, rows), out_specs=(rows, rows), **options
      )
      y, overflowed = run(x, weights, row_weights, sizes)
    else:
      carry = rows, rows
      run = jax.shard_map(
        one_layer, in_specs=(carry, whole, rows, rows), out_specs=carry, **options
      )
      stash = ps.Stash.empty(capacity, specs(), DEVICES)
      body = lambda carry, w: (run(carry, w, row_weights, sizes), None)
      (x, stash), _ = lax.scan(body, (x, stash), weights)
      y, overflowed = ps.seal(x, stash), stash.stats().overflowed_pushes
    return jnp.sum(jnp.where(jnp.abs(d_out) > 0, y * d_out, 0)), overflowed

  with jax.set_mesh(mesh):
    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, of_layers(weights), row_weights)


@needs_devices(DEVICES)
@pytest.mark.once
@pytest.mark.parametrize("capacity", [long(LAYERS * (ROWS + 1)), ROWS + 9])
def test_in_both_structures(capacity):
  """With types of what varies along the mesh, and without; where all rows fit, and where not."""
  expected, _ = in_shard_map(False, True, LAYERS * (ROWS + 1))
  # On the device with half as many rows both layers would fit: `axis_name` has them agree.
  overflowed = LAYERS - capacity // (ROWS + 1)
  for check_vma in False, True:
    for is_inside in False, True:
      gradients, of_devices = in_shard_map(check_vma, is_inside, capacity)
      assert_close(gradients, expected, "float32")
      assert of_devices.tolist() == [overflowed] * DEVICES


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("tiling", [TILING, (8, *TILING[1:])], ids=["in place", "copied"])
def test_debug_sums_up_the_rows(tiling, is_changed):
  """A bit that changes before the backward pass makes its gradients NaN."""

  def run(x, w_gate, *others):
    stash = ps.Stash.empty(ROWS + 1, specs())
    out, stash = ps.grouped_mlp(stash, x, w_gate, *others[:2], SIZES, tiling=tiling)
    changed = stash.buffers[0].at[7, 3].add(float(is_changed))
    stash = dataclasses.replace(stash, buffers=(changed, stash.buffers[1]))
    return ps.seal(out, stash), None

  args, d_out = operands()
  expected = differentiate(run, args, d_out)
  with ps.debug():
    actual = differentiate(run, args, d_out)
  assert_close(actual[0], expected[0], "float32")
  assert is_any_nan(actual[1][1]) == is_changed
  if not is_changed:
    assert_close(actual[1][:4], expected[1][:4], "float32")


@pytest.mark.once
def test_there_is_no_second_derivative():
  args, d_out = operands()

  def gradient(w_gate):
    run = lambda w_gate: jnp.sum(stashed()(args[0], w_gate, *args[2:])[0] * d_out)
    return jnp.sum(jax.grad(run)(w_gate))

  with pytest.raises(NotImplementedError, match="first-order"):
    jax.grad(gradient)(args[1])
