"""A chain of three small layers through one stash: by `checkpoint`, `gmm` and `grouped_mlp`."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import pallas_stash as ps
from tests.helpers.support import ON_TPU

ROWS, WIDTH, LAYERS = 16, 4, 3
SAVE = jax.checkpoint_policies.save_only_these_names
RAGGED = ps.RaggedRows(jnp.array([ROWS], jnp.int32), ROWS)
SPECS = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)]
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
WEIGHTS = jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH))


def experts(x, w):
  return jnp.sin(checkpoint_name(x @ w, "hidden"))


stashed = ps.checkpoint(experts, policy=SAVE("hidden"))


def layer(carry, w):
  x, stash = carry
  return stashed(stash, RAGGED, x, w)


def with_gmm(carry, w):
  x, stash = carry
  sizes = jnp.array([ROWS], jnp.int32)
  return ps.gmm(stash, x, w[None], sizes, grouped_matmul=lax.ragged_dot)


TILING = (ROWS, 128, 128)


def with_gmm_in_place(carry, w):
  x, stash = carry
  sizes = jnp.array([ROWS], jnp.int32)
  return ps.gmm(stash, x, w[None], sizes, tiling=TILING, interpret=not ON_TPU)


def with_mlp(carry, w):
  x, stash = carry
  sizes = jnp.array([ROWS], jnp.int32)
  return ps.grouped_mlp(stash, x, w[None], w[None], w[None], sizes, tiling=TILING)


def mlp(x, w):
  return jax.nn.silu(x @ w) * (x @ w) @ w
