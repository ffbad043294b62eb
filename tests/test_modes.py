"""Five ways to spread an MoE layer over devices: each is the dense sum, with a stash or without."""

import functools

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from bench.parity import losses
from reference import local_experts, model, modes, moe
from tests.helpers.checks import assert_trees_equal, FUSED, long, needs_devices
from tests.helpers.reference_model import assert_close, assert_trees, dense_block, params_of

pytestmark = [pytest.mark.once, needs_devices(losses.DEVICES)]

DEVICES, TOKENS = losses.DEVICES, 4  # Of each device.
CONFIG = model.Config(
  vocab=1, width=16, hidden=24, num_experts=16, top_k=3, layers=1, fsdp_axis="fsdp"
)
# What each token chooses: any three experts; the same three, of two devices, all others empty.
ROUTINGS = ["any", "same"]


def layer_of(config, routing):
  """Returns x, [devices, tokens, width], a cotangent of it, and the layer's parameters."""
  params = jax.tree.map(lambda stacked: stacked[0], params_of(config)["layers"]["moe"])
  x, cotangent = jax.random.normal(jax.random.key(1), (2, DEVICES, TOKENS, config.width))
  if routing == "same":
    x = x.at[..., 0].set(4.0)
    router = params["router"].at[0].set(0).at[0, jnp.array([3, 4, 5][: config.top_k])].set(2.0)
    params = params | {"router": router}
  return x, cotangent, params


def dense_sum(x, params, *, config):
  """The layer on one device."""
  y, _, group_sizes = dense_block(x, params, None, config=config)
  return y, group_sizes


def sharded(mode, x, params, *, config):
  """The block of a mode, with a `shard_map` around it."""

  def on_device(x, params):
    y, _, group_sizes = modes.MODES[mode].block(x, params, None, config=config)
    return y, lax.psum(group_sizes, "fsdp")

  return jax.shard_map(
    on_device,
    mesh=losses.mesh_of(mode),
    in_specs=(P(losses.AXES), moe.param_specs(config)),
    out_specs=(P(losses.AXES), P("expert")),
  )(x, params)


@functools.cache
def program_of(mode, config):
  """Returns `(x, cotangent, params) -> (gradients, (y, group_sizes))`; no mode: `dense_sum`."""
  layer = functools.partial(sharded, mode) if mode else dense_sum

  def run(x, cotangent, params):
    y, group_sizes = layer(x, params, config=config)
    return jnp.vdot(y, cotangent), (y, group_sizes)

  return jax.jit(jax.grad(run, argnums=(0, 2), has_aux=True))


def results_of(mode, config, routing):
  """Returns the gradients of x and of the parameters, and (y, group_sizes)."""
  return program_of(mode, config)(*layer_of(config, routing))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mode", modes.MODES)
def test_is_the_dense_sum(mode, routing):
  expected = results_of(None, CONFIG, routing)
  sizes = np.asarray(expected[1][1])
  assert sizes.sum() == DEVICES * TOKENS * CONFIG.top_k
  if routing == "same":
    np.testing.assert_array_equal(np.flatnonzero(sizes), [3, 4, 5])
  assert_trees(assert_close, results_of(mode, CONFIG, routing), expected)


SIZES = np.array([3, 0, 5, 8, 0, 0, 1, 7])
LOCAL = 2


@pytest.mark.parametrize("offset", range(0, len(SIZES), LOCAL))
def test_local_grouped_matmul(offset):
  """As a loop over groups has it, and as megablox with its `group_offset` in all rows."""
  rng = np.random.default_rng(0)
  lhs = rng.integers(-9, 9, (SIZES.sum(), 8)).astype(np.float32)
  rhs = rng.integers(-9, 9, (len(SIZES), 8, 16)).astype(np.float32)
  total_rows = 13  # The most that two neighbours have.
  group_sizes, here = jnp.asarray(SIZES, jnp.int32), rhs[offset : offset + LOCAL]

  @jax.jit
  def run(lhs, rhs, offset):
    buffer = local_experts.ring_buffer(lhs, group_sizes, offset, total_rows)
    return buffer, local_experts.local_grouped_matmul(buffer, rhs, group_sizes, offset)

  buffer, out = run(lhs, here, jnp.int32(offset))
  start, stop = SIZES[:offset].sum(), SIZES[: offset + LOCAL].sum()
  np.testing.assert_array_equal(buffer, np.roll(lhs, -start, axis=0)[:total_rows])
  group = np.repeat(np.arange(len(SIZES)), SIZES)[start:stop]
  expected = np.einsum("rk,rkn->rn", lhs[start:stop], rhs[group])
  np.testing.assert_array_equal(out[: stop - start], expected)  # Integers: exact.
  megablox = gmm(lhs, here, group_sizes, jnp.float32, (8, 8, 16), jnp.int32(offset), interpret=True)
  np.testing.assert_array_equal(megablox[start:stop], expected)


TRAINED = model.Config(
  vocab=16, width=16, hidden=24, num_experts=16, top_k=3, layers=2, fsdp_axis="fsdp"
)


def step_of(mode, capacity_rows=None):
  """Returns (loss, group_sizes, gradients) of a training step, and what happened to the stash."""
  tokens = jax.random.randint(jax.random.key(2), (DEVICES, TOKENS + 1), 0, TRAINED.vocab)
  loss = losses.loss_of(mode, TRAINED, capacity_rows)
  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=FUSED)
  (loss, (stats, sizes)), gradients = gradient(params_of(TRAINED), tokens)
  return (loss, sizes, gradients), stats


@pytest.mark.long
@pytest.mark.parametrize("mode", modes.MODES)
def test_a_step_with_the_stash_is_the_same_in_every_bit(mode):
  expected, _ = step_of(mode)
  actual, stats = step_of(mode, losses.sufficient_rows(mode, TRAINED, TOKENS))
  assert_trees_equal(actual, expected)
  assert not np.any(stats.overflowed_pushes)
  assert stats.peak_rows.sum() >= TRAINED.layers * DEVICES * TOKENS * TRAINED.top_k


@pytest.mark.long
def test_all_devices_of_an_all_to_all_recompute_or_none():
  """A layer's rows fit on some of them alone, and the function has a collective."""
  expected, stats = step_of("all_to_all", losses.sufficient_rows("all_to_all", TRAINED, TOKENS))
  capacity_rows = int(np.mean(stats.peak_rows)) // 8 * 8
  actual, stats = step_of("all_to_all", capacity_rows)
  assert_trees(assert_close, actual, expected)
  assert np.ptp(stats.overflowed_pushes) == 0 < np.max(stats.overflowed_pushes)
  assert np.ptp(stats.sufficient_rows) > 0


def test_weights_before_the_down_projection_are_for_ring_and_fsdp():
  config = model.Config(**(vars(CONFIG) | dict(weights_before_down_projection=True)))
  for mode in "all_to_all", "dense_fsdp", "dense_ep":
    with pytest.raises(ValueError, match="is for the modes ring and fsdp alone"):
      modes.MODES[mode].ffn_of(config)


@pytest.mark.parametrize("mode", ["ring", long("fsdp")])
def test_weights_before_the_down_projection(mode):
  config = model.Config(**(vars(CONFIG) | dict(weights_before_down_projection=True)))
  expected = results_of(None, CONFIG, "any")
  assert_trees(assert_close, results_of(mode, config, "any"), expected)


@pytest.mark.long
def test_each_token_to_one_expert():
  """With as many rows for one device as its buffer has; and with one choice, which is the sum."""
  config = model.Config(**(vars(CONFIG) | dict(top_k=1)))
  expected = results_of(None, config, "same")
  assert np.max(expected[1][1]) == DEVICES * TOKENS
  assert_trees(assert_close, results_of("all_to_all", config, "same"), expected)
