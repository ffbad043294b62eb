"""Multi-head latent attention (MLA) as in DeepSeek-V2 and V3, in plain JAX.

Queries are made of a vector of low rank, keys and values together of another one. Positions enter
by features of their own, which are rotated: some of each head's query, and of the key some that all
heads share.

What the backward pass may need is named for checkpoint policies, by the names of MaxText. Each
value is [tokens, features], one row for each token, so that any of them can go into a stash:

  query_wa_proj: the low-rank query, [tokens, query_rank], and mla_q, normalised.
  kv_wa_proj: low-rank keys and values, and the shared part of the key, which is not rotated yet,
    [tokens, kv_rank + rope]; and mla_kv, keys and values normalised, [tokens, kv_rank].
  query_proj, key_proj: [tokens, heads * (nope + rope)], rotated; value_proj: [tokens, heads *
    value].
  out_proj: [tokens, width].

The parameters are a pytree:

  query_down: [width, query_rank]; query_norm: [query_rank];
  query_up: [query_rank, heads * (nope + rope)];
  kv_down: [width, kv_rank + rope]; kv_norm: [kv_rank];
  kv_up: [kv_rank, heads * (nope + value)]; out: [heads * value, width].
"""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from reference.norm import rms_norm

NAMES = (
  *("query_wa_proj", "mla_q", "kv_wa_proj", "mla_kv"),
  *("query_proj", "key_proj", "value_proj", "out_proj"),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of latent attention.

  Attributes:
    query_rank, kv_rank: features of the low-rank vectors.
    nope, rope: features of a head's query and key that know no position, and that are rotated.
    value: features of a head's value.
  """

  query_rank: int
  kv_rank: int
  nope: int
  rope: int
  value: int

  def __post_init__(self):
    if self.rope % 2:
      raise ValueError(f"{self.rope=} must be even: pairs of features are rotated.")


def init(sizes, num_heads, width, layers, dtype, key):
  """Random parameters, each with a leading axis, one entry a layer."""
  keys = iter(jax.random.split(key, 5))

  def normal(rows, columns):
    drawn = jax.random.normal(next(keys), (layers, rows, columns))
    return (rows**-0.5 * drawn).astype(dtype)

  return {
    "query_down": normal(width, sizes.query_rank),
    "query_norm": jnp.ones((layers, sizes.query_rank), dtype),
    "query_up": normal(sizes.query_rank, num_heads * (sizes.nope + sizes.rope)),
    "kv_down": normal(width, sizes.kv_rank + sizes.rope),
    "kv_norm": jnp.ones((layers, sizes.kv_rank), dtype),
    "kv_up": normal(sizes.kv_rank, num_heads * (sizes.nope + sizes.value)),
    "out": normal(num_heads * sizes.value, width),
  }


def rotate(x):
  """Rotates each pair of features by an angle that grows with the position.

  Args:
    x: [batch, seq, heads, features]; feature i is a pair with feature features / 2 + i, and the
      pair turns by 10,000 to the power of -2 i / features at each position.
  """
  seq, features = x.shape[1], x.shape[-1]
  frequency = 10_000.0 ** (-jnp.arange(0, features, 2) / features)
  angle = jnp.arange(seq)[:, None, None] * frequency  # [seq, 1, features / 2]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  rotated = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attention(x, params, sizes, num_heads):
  """Causal self-attention over x, [batch, seq, width]; returns the same shape."""
  batch, seq, width = x.shape
  tokens = x.reshape(-1, width)

  def named(value, name):
    return checkpoint_name(value.reshape(len(tokens), -1), name)

  def heads_of(value):
    return value.reshape(batch, seq, num_heads, -1)

  low_query = named(tokens @ params["query_down"], "query_wa_proj")
  low_query = named(rms_norm(low_query, params["query_norm"]), "mla_q")
  low_kv = named(tokens @ params["kv_down"], "kv_wa_proj")
  low_kv, shared_key = jnp.split(low_kv, [sizes.kv_rank], axis=-1)
  low_kv = named(rms_norm(low_kv, params["kv_norm"]), "mla_kv")

  query, query_rope = jnp.split(heads_of(low_query @ params["query_up"]), [sizes.nope], axis=-1)
  query = jnp.concatenate([query, rotate(query_rope)], axis=-1)
  key, value = jnp.split(heads_of(low_kv @ params["kv_up"]), [sizes.nope], axis=-1)
  shared_key = rotate(shared_key.reshape(batch, seq, 1, sizes.rope))
  shared_key = jnp.broadcast_to(shared_key, (batch, seq, num_heads, sizes.rope))
  key = jnp.concatenate([key, shared_key], axis=-1)

  query, key = heads_of(named(query, "query_proj")), heads_of(named(key, "key_proj"))
  value = heads_of(named(value, "value_proj"))
  scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
  is_past = jnp.tri(seq, dtype=bool)
  scores = jnp.where(is_past, scores * (sizes.nope + sizes.rope) ** -0.5, -jnp.inf)
  out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), value)
  out = named(out.reshape(len(tokens), -1) @ params["out"], "out_proj")
  return out.reshape(x.shape)
