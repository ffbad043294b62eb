"""What the tests of the reference model share: configurations, meshes, dense sums, structures."""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from reference import model, moe

NAMES = ("mlpwi_0", "mlpwi_1", "mlpwo")
CONFIG = model.Config(vocab=256, width=32, hidden=16, num_experts=8, top_k=3, layers=2, num_heads=2)

# Sums of up to 256 float32 terms of order one in another order: tens of roundings of 6e-8 each.
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def assert_trees(check, actual, expected):
  jax.tree.map(check, jax.device_get(actual), jax.device_get(expected))


def dense_block(x, layer_params, state, *, config, ffn=None):
  """`moe_block` for all experts on one device: every expert on every token, masked."""
  del ffn
  experts = layer_params["experts"]
  expert_ids, weights = moe.route(x, layer_params["router"], config)
  chosen = expert_ids[..., None] == jnp.arange(config.num_experts)
  gate = jax.nn.silu(jnp.einsum("bsw,ewh->bseh", x, experts["wi_0"]))
  up = jnp.einsum("bsw,ewh->bseh", x, experts["wi_1"])
  out = jnp.einsum("bseh,ehw->bsew", gate * up, experts["wo"])
  y = jnp.einsum("bsew,bske,bsk->bsw", out, chosen.astype(x.dtype), weights)
  return y, state, jnp.sum(chosen, axis=(0, 1, 2), dtype=jnp.int32)


@functools.cache
def params_of(config):
  return model.init(config, jax.random.key(0))


def mesh_of(*shape):
  return jax.sharding.Mesh(
    np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("data", "expert")
  )


def sharded_block(mesh, check_vma, x, layer_params, state, *, config, ffn):
  """Structure 2: a `shard_map` around `moe_block`."""
  devices = P(("data", "expert"))
  return jax.shard_map(
    functools.partial(moe.moe_block, config=config, ffn=ffn),
    mesh=mesh,
    in_specs=(devices, moe.param_specs(config), devices),
    out_specs=(devices, devices, devices),
    check_vma=check_vma,
  )(x, layer_params, state)


def in_one_shard_map(mesh, check_vma, params, tokens, *, state, **options):
  """Structure 1: the whole model inside one `shard_map`."""
  devices = P(("data", "expert"))

  def device_loss(params, tokens, state):
    loss, (state, sizes) = model.loss(params, tokens, state=state, **options)
    axes = ("data", "expert")
    return lax.pmean(loss, axes), (state, lax.psum(sizes, "data"))

  return jax.shard_map(
    device_loss,
    mesh=mesh,
    in_specs=(model.param_specs(options["config"]), devices, devices),
    out_specs=(P(), (devices, P(None, "expert"))),
    check_vma=check_vma,
  )(params, tokens, state)


def in_jit(mesh, check_vma, params, tokens, **options):
  """Structure 2: plain `jit`, a `shard_map` inside each layer."""
  block = functools.partial(sharded_block, mesh, check_vma)
  loss, (state, sizes) = model.loss(params, tokens, moe=block, **options)
  sizes = sizes.reshape(len(sizes), mesh.shape["data"], -1).sum(1)
  return loss, (state, sizes)
