"""A decoder with the seams of MaxText's that `pallas_stash.integrations.maxtext` changes.

Layers are nnx modules, stacked and scanned; experts are in a `shard_map` full of closures.
"""

import dataclasses
import functools

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

NAMES = "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"


@dataclasses.dataclass(frozen=True)
class Config:
  """The keys of MaxText's configuration that are read; its names are where they are there."""

  use_ragged_sort: bool = False
  buffer: int = 0
  chunks: int = 1
  moe_mlpwi_0: str = "remat"
  moe_mlpwi_1: str = "remat"
  moe_mlpwo: str = "remat"
  stash_capacity: float = 1.1
  use_ring_of_experts: bool = True
  num_experts: int = 4
  num_experts_per_tok: int = 2
  width: int = 8
  layers: int = 3


class RoutedMoE(nnx.Module):
  _expert_parallelism_name = "expert"

  def __init__(self, config, mesh, rngs):
    self.config, self.mesh = config, mesh
    shape = config.num_experts, config.width, config.width
    weights = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) / 3)
    self.gate = weights(config.width, config.num_experts)
    self.wi_0, self.wi_1, self.wo = weights(*shape), weights(*shape), weights(*shape)
    self.updates = nnx.Variable(jnp.zeros(config.num_experts, jnp.int32))

  def get_expert_parallelism_size(self):
    return self.mesh.shape["expert"]

  def permute(self, inputs, logits, roll_to_expert_id):
    config = self.config
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), config.num_experts_per_tok)
    if not config.use_ragged_sort:
      experts = (experts - roll_to_expert_id) % config.num_experts
    order = jnp.argsort(experts.ravel())
    rows = inputs[order // config.num_experts_per_tok]
    sizes, here = jnp.bincount(experts.ravel(), length=config.num_experts), None
    if config.buffer:  # Rows from the first one of this device on.
      count = config.num_experts // self.get_expert_parallelism_size()
      first = jnp.cumsum(sizes)[roll_to_expert_id] - sizes[roll_to_expert_id]
      rows = jnp.roll(rows, -first, axis=0)[: config.buffer]
      here = jax.lax.dynamic_slice_in_dim(sizes, roll_to_expert_id, count)
      here = jnp.diff(jnp.minimum(jnp.cumsum(here), config.buffer), prepend=0)
    return rows, order, weights, sizes, None, None, None, here, False, None, None

  def __call__(self, x):
    config, count = self.config, self.config.num_experts // self.get_expert_parallelism_size()

    def local_sizes(sizes, here, first):
      """Returns the rows that are not of this device and before, its own, and those behind."""
      if here is not None:
        return jnp.int32(0), here
      if not config.use_ragged_sort:
        return jnp.int32(0), sizes[:count]
      before = jnp.sum(jnp.where(jnp.arange(config.num_experts) < first, sizes, 0))
      return before, jax.lax.dynamic_slice_in_dim(sizes, first, count)

    @functools.partial(
      jax.shard_map,
      mesh=self.mesh,
      in_specs=(P("expert"), P("expert"), P("expert"), P("expert"), P("expert")),
      out_specs=(P("expert"), P()),
      check_vma=False,
    )
    def route_and_compute(x, logits, wi_0, wi_1, wo):
      def body(x, logits):
        gather = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)
        x, logits, first = gather(x), gather(logits), count * jax.lax.axis_index("expert")
        rows, order, weights, sizes, *_, here, _, _, _ = self.permute(x, logits, first)
        before, groups = local_sizes(sizes, here, first)
        place = jnp.arange(rows.shape[0])
        is_here = ((place >= before) & (place < before + jnp.sum(groups)))[:, None]

        expert = jnp.sum(place[:, None] >= before + jnp.cumsum(groups), axis=1)

        def gmm(rows, weights, name):
          of_row = jnp.take(weights, expert, axis=0, mode="clip")
          out = jnp.einsum("rk,rkn->rn", jnp.where(is_here, rows, 0), of_row)
          return checkpoint_name(jnp.where(is_here, out, 0), name)

        hidden = jax.nn.silu(gmm(rows, wi_0, NAMES[0])) * gmm(rows, wi_1, NAMES[1])
        out = gmm(hidden, wo, NAMES[2])
        if here is not None:
          first_row = jnp.cumsum(sizes)[first] - sizes[first]
          full = jnp.zeros((order.shape[0], out.shape[1])).at[: out.shape[0]].set(out)
          out = jnp.roll(full, first_row, axis=0)
        out = out[jnp.argsort(order)].reshape(*weights.shape, -1)
        out = jnp.einsum("tke,tk->te", out, weights)
        return jax.lax.psum_scatter(out, "expert", tiled=True), jnp.sign(sizes.max() - sizes)

      chunks = [jnp.split(value, config.chunks) for value in (x, logits)]
      outs, updates = zip(*map(body, *chunks), strict=True)
      return jnp.concatenate(outs), sum(updates)

    x, updates = route_and_compute(
      x, x @ self.gate[...], self.wi_0[...], self.wi_1[...], self.wo[...]
    )
    self.updates[...] += updates
    return x


class Layer(nnx.Module):
  def __init__(self, config, mesh, has_experts, rngs):
    self.dense = nnx.Linear(config.width, config.width, rngs=rngs)
    self.rngs = rngs
    self.experts = nnx.data(RoutedMoE(config, mesh, rngs) if has_experts else None)

  def __call__(self, x):
    noise = jax.random.uniform(self.rngs.dropout(), ())
    x = x + noise * checkpoint_name(self.dense(x), "dense")
    return x + self.experts(x) if self.experts is not None else x


class NNXDecoder(nnx.Module):
  """Two dense layers, and `layers` with experts; another of these alone if it `has_remainder`."""

  def __init__(self, config, mesh, rngs, has_remainder=False):
    self.config = config

    def stacked(count, has_experts):
      make = lambda rngs: Layer(config, mesh, has_experts, rngs)
      return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(count))

    self.dense_layers, self.moe_layers = stacked(2, False), stacked(config.layers, True)
    self.remainder = nnx.data(Layer(config, mesh, True, rngs) if has_remainder else None)

  def get_remat_policy(self):
    on_device = [name for name in NAMES if getattr(self.config, name) == "device"]
    return jax.checkpoint_policies.save_only_these_names(*on_device)

  def _apply_layers_sequentially(self, layers, x):
    graph, params, rest = nnx.split(layers, nnx.Param, ...)

    def layer_fn(x, scanned):
      layer = nnx.merge(graph, *scanned)
      x = layer(x)
      return x, nnx.state(layer, nnx.Not(nnx.Param))

    layer_fn = jax.checkpoint(layer_fn, policy=self.get_remat_policy(), prevent_cse=False)
    x, rest = jax.lax.scan(layer_fn, x, (params, rest))
    nnx.update(layers, nnx.filter_state(rest, nnx.Not(nnx.RngState)))
    return x

  def __call__(self, x):
    x = self._apply_layers_sequentially(self.dense_layers, x)
    x = self._apply_layers_sequentially(self.moe_layers, x)
    if self.remainder is not None:
      graph, state = nnx.split(self.remainder)
      alone = lambda state, x: nnx.merge(graph, state)(x)
      x = jax.checkpoint(alone, policy=self.get_remat_policy())(state, x)
    return x
