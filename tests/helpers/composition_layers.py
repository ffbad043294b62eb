"""The loss of a case of `tests.composition`: layers, loops, `jax.checkpoint` and `shard_map`."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_stash as ps
from tests.helpers.composition_flax import LAYERS_AS_MODULES
from tests.helpers.composition_model import (
  dense_layer,
  experts,
  HIDDEN,
  LAYERS,
  moe_layer,
  NAMES,
  SAVE,
)

MESH_AXES = ("data", "expert")
RESIDUALS = [jax.ShapeDtypeStruct((width,), jnp.float32) for width in (HIDDEN,)]


def mesh_of(case):
  devices = np.array(jax.devices()[: case.num_devices]).reshape(case.mesh_shape)
  return Mesh(devices, MESH_AXES)


def rematerialise(case, layer):
  """Wraps a layer, or what a loop runs in one turn, in `jax.checkpoint` as the case says."""
  policies = jax.checkpoint_policies
  policy = {
    "full": policies.nothing_saveable,
    "save names": SAVE(ps.SLOT_NAME),
    "offload names": policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[ps.SLOT_NAME],
      names_which_can_be_offloaded=["layer_input"],
      offload_src="device",
      offload_dst="pinned_host",
    ),
    "save everything": policies.everything_saveable,
  }
  return layer if case.remat == "none" else jax.checkpoint(layer, policy=policy[case.remat])


def run_layers(case, params, x, stash, moe):
  """Returns x and the stash behind the last layer."""

  def dense(x, weights):
    return dense_layer(weights, checkpoint_name(x, "layer_input")), None

  def layer(carry, xs):
    weights, has_experts = xs
    x, stash = carry
    x, _ = dense(x, weights)
    with_experts = lambda weights, x, stash: moe(weights, x, stash)[:2]
    if case.cond == "no":
      return with_experts(weights, x, stash), None
    without = lambda weights, x, stash: (x, stash)
    return lax.cond(has_experts, with_experts, without, weights, x, stash), None

  layer = LAYERS_AS_MODULES[case.module](layer)
  saved = rematerialise(case, layer)
  xs = params, jnp.array(case.moe_layers)
  carry = x, stash
  if case.loop == "scan":
    return lax.scan(saved, carry, xs)[0]
  if case.loop == "dense, then MoE":
    x, _ = lax.scan(rematerialise(case, dense), x, jax.tree.map(lambda a: a[: LAYERS // 2], params))
    return lax.scan(saved, (x, stash), jax.tree.map(lambda a: a[LAYERS // 2 :], xs))[0]
  at = lambda xs, i: jax.tree.map(lambda a: a[i], xs)
  if case.loop == "unrolled":
    for i in range(LAYERS):
      carry, _ = saved(carry, at(xs, i))
    return carry
  pairs = jax.tree.map(lambda a: a.reshape(LAYERS // 2, 2, *a.shape[1:]), xs)
  if case.loop == "scan of scan":
    return lax.scan(rematerialise(case, lambda *args: lax.scan(saved, *args)), carry, pairs)[0]

  def block(carry, xs):
    for i in range(2):
      carry, _ = layer(carry, at(xs, i))
    return carry, None

  return lax.scan(rematerialise(case, block), carry, pairs)[0]


def loss_function(case, capacity):
  """Returns `loss(params, x, stash) -> (loss, stash)`; a stash is made unless one is given."""
  f = ps.checkpoint(experts, policy=SAVE(*NAMES))
  ffn = lambda stash, sizes, *args: f(stash, ps.RaggedRows(sizes, args[1].shape[0]), *args)

  def loss(params, x, stash, moe):
    x, stash = run_layers(case, params, x, stash, moe)
    return jnp.sum(ps.seal(x, stash) ** 2), stash

  if case.shard_map == "none":
    moe = functools.partial(moe_layer, ffn=ffn)
    empty = lambda: ps.Stash.empty(capacity, RESIDUALS)
    return lambda params, x, stash: loss(params, x, stash or empty(), moe)

  mesh, axes = mesh_of(case), MESH_AXES
  moe = functools.partial(moe_layer, ffn=ffn, expert_axis="expert")
  shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=case.is_checked)
  specs = lambda expert: {"dense": P(), "router": P(), "wi": expert, "wo": expert}

  if case.shard_map.startswith("around"):

    def local(params, x, stash):
      if stash is None:
        stash = ps.Stash.empty(capacity, RESIDUALS)
        if case.is_checked:
          stash = jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), stash)
      value, stash = loss(params, x, stash, moe)
      return lax.psum(value, axes), stash

    in_specs = specs(P(None, "expert")), P(axes), P(axes)
    return shard_map(local, in_specs=in_specs, out_specs=(P(), P(axes)))

  in_layer = shard_map(
    lambda *args: moe(*args)[:2],
    in_specs=(specs(P("expert")), P(axes), P(axes)),
    out_specs=P(axes),
  )

  def outside(params, x, stash):
    if stash is None:
      stash = ps.Stash.empty(capacity, RESIDUALS, num_shards=case.num_devices)
    return loss(params, x, stash, in_layer)

  return outside
