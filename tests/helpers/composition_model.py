"""A mixture-of-experts model in exact arithmetic, and the plain program that judges a stash.

All numbers are small integers: activations are zeroed where they leave a window, so no sum or
product needs more than the 24 bits of a float32, and nothing is ever rounded. Gradients then do not
depend on the order of additions or on what XLA fuses, and one program, unrolled on one device,
gives the bits that every combination of transforms must give, recomputed layers included.
"""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from reference.moe import sort_rows

LAYERS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 64, 8, 16, 8, 2
WINDOW, BLOCKS = 8, 4
NAMES = ("hidden",)
SAVE = jax.checkpoint_policies.save_only_these_names


def params_and_tokens(model=0):
  """Small integers, most weights zero; the tokens are the same for all models."""
  rng = np.random.default_rng(model)

  def weights(*shape, density=0.25):
    values = rng.choice([-1.0, 1.0], shape) * (rng.random(shape) < density)
    return jnp.asarray(values, jnp.float32)

  params = {
    "dense": weights(LAYERS, WIDTH, WIDTH),
    "router": weights(LAYERS, WIDTH, EXPERTS, density=0.5),
    "wi": weights(LAYERS, EXPERTS, WIDTH, HIDDEN),
    "wo": weights(LAYERS, EXPERTS, HIDDEN, WIDTH),
  }
  tokens = np.random.default_rng(100).integers(-2, 3, (TOKENS, WIDTH))
  return params, jnp.asarray(tokens, jnp.float32)


def window(x):
  return jnp.where(jnp.abs(x) <= WINDOW, x, 0)


def matmul(x, w, subscripts="tk,kn->tn"):
  return jnp.einsum(subscripts, x, w, precision=lax.Precision.HIGHEST)


def experts(tokens, row_tokens, choice_rows, weights, group_sizes, wi, wo):
  """As `reference.moe.expert_ffn`, in exact arithmetic."""
  row = jnp.arange(row_tokens.shape[0])
  live = (row < jnp.sum(group_sizes))[:, None]
  row_expert = jnp.sum(row[:, None] >= jnp.cumsum(group_sizes)[:-1], axis=1)
  mask = lambda rows: jnp.where(live, rows, 0)

  def project(rows, w, name):
    return mask(checkpoint_name(mask(matmul(rows, w[row_expert], "rk,rkn->rn")), name))

  hidden = project(mask(tokens[row_tokens]), wi, "hidden")
  out = project(window(hidden), wo, "out")
  chosen = window(out).at[choice_rows].get(mode="fill", fill_value=0)
  return jnp.sum(chosen * weights[:, :, None], axis=1)


def dense_layer(weights, x):
  return window(x + matmul(x, weights["dense"]))


def moe_layer(weights, x, state, ffn, expert_axis=None):
  """Returns x, state and the chosen experts; inside a shard_map if it has an expert axis."""
  devices = lax.axis_size(expert_axis) if expert_axis else 1
  first = lax.axis_index(expert_axis) * (EXPERTS // devices) if expert_axis else 0
  tokens = lax.all_gather(x, expert_axis, tiled=True) if expert_axis else x
  scores, expert_ids = lax.top_k(matmul(tokens, weights["router"]), TOP_K)
  row_choices, choice_rows, sizes = sort_rows(expert_ids, first, EXPERTS // devices)
  gates = jnp.where(jnp.abs(scores) <= 2, scores, 0)
  matrices = weights["wi"], weights["wo"]
  args = (tokens, row_choices // TOP_K, choice_rows, gates, sizes, *matrices)
  out, state = ffn(state, sizes, *args)
  out = lax.psum_scatter(out, expert_axis, tiled=True) if expert_axis else out
  return window(x + out), state, expert_ids


@functools.partial(jax.jit, static_argnums=0)
def _plain_blocks(moe_layers, params, blocks):
  saving = jax.checkpoint(experts, policy=SAVE(*NAMES))
  ffn = lambda state, sizes, *args: (saving(*args), state)

  def loss(params, x):
    chosen = []
    for i, has_experts in enumerate(moe_layers):
      weights = jax.tree.map(lambda leaf, i=i: leaf[i], params)
      x = dense_layer(weights, x)
      if has_experts:
        x, _, expert_ids = moe_layer(weights, x, None, ffn)
        chosen.append(expert_ids)
    return jnp.sum(x**2), jnp.stack(chosen)

  return lax.map(lambda x: jax.value_and_grad(loss, has_aux=True)(params, x), blocks)


@functools.cache
def plain(moe_layers, model=0, dtype=jnp.float32):
  """Returns what the plain program, which saves residuals, computes for each block of the tokens.

  Tokens do not depend on each other, so that the gradient of many is the sum of those of blocks.

  Args:
    moe_layers: which layers have experts.
    model: which model.
    dtype: of everything.

  Returns:
    loss [BLOCKS], gradients [BLOCKS, ...], chosen experts [BLOCKS, MoE layers, tokens, top_k].
  """
  cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
  params, tokens = cast(params_and_tokens(model))
  blocks = tokens.reshape(BLOCKS, -1, WIDTH)
  (value, chosen), gradients = _plain_blocks(moe_layers, params, blocks)
  return jax.device_get((value, gradients, chosen))


def split_tokens(tokens, split):
  """Returns [microbatches, examples, tokens, width]."""
  return tokens.reshape(*split, -1, WIDTH)
