"""A small MoE language model in plain JAX: embedding, scanned decoder layers, head.

The same code runs in the two structures that trainers use:

1. `forward` inside one `shard_map`, the batch sharded over the expert axis and the parameters as
   `param_specs` says;
2. `forward` in plain `jit`, with `moe` a function that puts a `shard_map` around `moe_block`.

An opaque `state` is threaded through the layers, like a random key.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from reference import mla
from reference import moe as moe_lib
from reference.norm import rms_norm


@dataclasses.dataclass(frozen=True)
class Config:
  """The sizes of a model, and what it is made of.

  Attributes:
    vocab: tokens are integers below it.
    width: features of a token between layers.
    hidden: features inside an expert.
    num_experts: experts of all devices together.
    top_k: experts a token.
    layers: decoder layers.
    num_heads: attention heads; 0 for layers without attention.
    latent_attention: the sizes of multi-head latent attention; None for plain attention.
    expert_axis: the mesh axis that the experts are spread over.
    fsdp_axis: a mesh axis that each expert's weights are sharded over between uses; None for none.
    dtype: of parameters and activations. Norms and router compute in float32.
    grouped_matmul: as for `moe.expert_ffn`, returning the dtype of its `lhs`.
    weights_before_down_projection: as for `moe.expert_ffn`.
  """

  vocab: int
  width: int
  hidden: int
  num_experts: int
  top_k: int
  layers: int
  num_heads: int = 0
  latent_attention: mla.Sizes | None = None
  expert_axis: str = "expert"
  fsdp_axis: str | None = None
  dtype: Any = jnp.float32
  grouped_matmul: Callable[..., jax.Array] = lax.ragged_dot
  weights_before_down_projection: bool = False

  def __post_init__(self):
    if self.top_k > self.num_experts:
      raise ValueError(f"{self.top_k=} must be at most {self.num_experts=}")
    if self.latent_attention is not None:
      if not self.num_heads:
        raise ValueError(f"{self.num_heads=} must be at least 1 with {self.latent_attention=}")
    elif self.num_heads and self.width % self.num_heads:
      raise ValueError(f"{self.width=} must be a multiple of {self.num_heads=}")


def init(config, key):
  """Random parameters, a pytree. Those under "layers" have a leading axis, one entry a layer."""
  keys = iter(jax.random.split(key, 8))
  layers, width, hidden, heads = config.layers, config.width, config.hidden, config.num_heads

  def normal(*shape, scale):
    return (scale * jax.random.normal(next(keys), shape)).astype(config.dtype)

  def ones(*shape):
    return jnp.ones(shape, config.dtype)

  wi_shape = (layers, config.num_experts, width, hidden)
  wo_shape = (layers, config.num_experts, hidden, width)
  layer_params = {
    "moe_norm": ones(layers, width),
    "moe": {
      "router": normal(layers, width, config.num_experts, scale=width**-0.5),
      "experts": {
        "wi_0": normal(*wi_shape, scale=width**-0.5),
        "wi_1": normal(*wi_shape, scale=width**-0.5),
        "wo": normal(*wo_shape, scale=hidden**-0.5),
      },
    },
  }
  if heads:
    layer_params["attention_norm"] = ones(layers, width)
  if config.latent_attention is not None:
    layer_params["attention"] = mla.init(
      config.latent_attention, heads, width, layers, config.dtype, next(keys)
    )
  elif heads:
    layer_params["attention"] = {
      "qkv": normal(layers, width, 3, heads, width // heads, scale=width**-0.5),
      "out": normal(layers, heads, width // heads, width, scale=width**-0.5),
    }
  return {
    "embedding": normal(config.vocab, width, scale=1.0),
    "layers": layer_params,
    "norm": ones(width),
    # A small head: the first predictions are near uniform, and the first loss near log(vocab).
    "head": normal(width, config.vocab, scale=0.1 * width**-0.5),
  }


def param_specs(config):
  """How the model's parameters are sharded, as a pytree prefix of `PartitionSpec`s."""
  replicated = PartitionSpec()
  sharded = PartitionSpec(None, config.expert_axis, config.fsdp_axis)
  layer_specs = {"moe_norm": replicated, "moe": {"router": replicated, "experts": sharded}}
  if config.num_heads:
    layer_specs |= {"attention_norm": replicated, "attention": replicated}
  return {
    "embedding": replicated,
    "layers": layer_specs,
    "norm": replicated,
    "head": replicated,
  }


def attention(x, params):
  """Causal self-attention over x, [batch, seq, width], without position encoding."""
  query, key, value = jnp.einsum("bsw,wphd->pbshd", x, params["qkv"])
  out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
  return jnp.einsum("bshd,hdw->bsw", out, params["out"])


def attention_of(config):
  """Returns the attention that a model has: `(x, params) -> y`, both [batch, seq, width]."""
  if config.latent_attention is None:
    return attention
  sizes, num_heads = config.latent_attention, config.num_heads
  return functools.partial(mla.attention, sizes=sizes, num_heads=num_heads)


def decoder_layer(x, state, layer_params, *, config, ffn=None, moe=moe_lib.moe_block):
  """One layer: attention, if the model has any, then MoE; both read a normalised x and add to it.

  Args:
    x: [batch, seq, width].
    state: any pytree.
    layer_params: one layer of `params["layers"]`.
    config, ffn, moe: as for `forward`.

  Returns:
    x: [batch, seq, width].
    state: as `ffn` returned it.
    group_sizes: int32[experts], the rows that each expert received.
  """
  if config.num_heads:
    normed = rms_norm(x, layer_params["attention_norm"])
    x += attention_of(config)(normed, layer_params["attention"])
  normed = rms_norm(x, layer_params["moe_norm"])
  y, state, group_sizes = moe(normed, layer_params["moe"], state, config=config, ffn=ffn)
  return x + y, state, group_sizes


def forward(
  params,
  tokens,
  *,
  config,
  state=None,
  ffn=None,
  policy=None,
  moe=moe_lib.moe_block,
  finish=lambda x, state: x,
):
  """Runs the model.

  Args:
    params: as `init` makes them, or in structure 1 this device's shard of them.
    tokens: int[batch, seq].
    config: a `Config`.
    state: any pytree; threaded through the `ffn` of every layer.
    ffn: replaces `expert_ffn`, see `moe_block`.
    policy: of the `jax.checkpoint` around each layer; None saves nothing.
    moe: replaces `moe_block`, and is called like it.
    finish: `(x, state) -> x`, applied once after the last layer.

  Returns:
    logits: float32[batch, seq, vocab].
    state: after the last layer.
    group_sizes: int32[layers, experts], the rows that each expert received: in structure 1 this
      device's experts, in structure 2 all.
  """
  layer = functools.partial(decoder_layer, config=config, ffn=ffn, moe=moe)
  layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # a scan does not need it

  def step(carry, layer_params):
    x, state, group_sizes = layer(*carry, layer_params)
    return (x, state), group_sizes

  carry = (params["embedding"][tokens], state)
  (x, state), group_sizes = lax.scan(step, carry, params["layers"])
  x = rms_norm(finish(x, state), params["norm"])
  return (x @ params["head"]).astype(jnp.float32), state, group_sizes


def cross_entropy(logits, targets):
  """The mean over targets, int[...], of their cross-entropy under logits, [..., vocab]."""
  log_probs = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


def loss(params, tokens, **options):
  """The mean cross-entropy of each next token.

  In structure 1 it is the mean of one device, and `lax.pmean` makes it that of all. Take gradients
  outside the `shard_map`, or inside it with `check_vma=True`; without that, JAX does not sum the
  gradients of replicated parameters over the devices.

  Args:
    params: as for `forward`.
    tokens: int[batch, seq + 1].
    **options: keyword arguments of `forward`.

  Returns:
    A float32 scalar, and (state, group_sizes) as `forward` returns them.
  """
  logits, state, group_sizes = forward(params, tokens[:, :-1], **options)
  return cross_entropy(logits, tokens[:, 1:]), (state, group_sizes)
