"""A stage of two layers, whose passes of several microbatches run in any order."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from tests.helpers.checks import FUSED
from tests.helpers.few_layers import SAVE

WIDTH, HIDDEN, GROUPS, ROWS, LAYERS = 16, 24, 4, 96, 2
SIZES = jnp.array([[10, 0, 31, 3], [5, 5, 5, 5], [40, 20, 1, 30]], jnp.int32)
MICROBATCHES = len(SIZES)
FIRST_IN_FIRST_OUT = "F0 F1 B0 F2 B1 B2"
LAST_IN_FIRST_OUT = "F0 F1 F2 B2 B1 B0"


def ffn(rows, sizes, weights):
  live = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]
  rows = jnp.where(live, rows, 0)
  hidden = jnp.where(live, lax.ragged_dot(rows, weights["in"], sizes), 0)
  hidden = jax.nn.silu(checkpoint_name(hidden, "hidden"))
  return jnp.where(live, lax.ragged_dot(hidden, weights["out"], sizes), 0)


stashed_ffn = ps.checkpoint(ffn)


def stage(stash, weights, x, sizes):
  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME))
  def layer(carry, weights):
    x, stash = carry
    y, stash = stashed_ffn(stash, ps.RaggedRows(sizes, ROWS), x, sizes, weights)
    return (x + y, stash), None

  return lax.scan(layer, (x, stash), weights)[0]


def plain_stage(weights, x, sizes):
  layer = jax.checkpoint(lambda x, weights: (x + ffn(x, sizes, weights), None))
  return lax.scan(layer, x, weights)[0]


def draw(*shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


WEIGHTS = {
  "in": draw(LAYERS, GROUPS, WIDTH, HIDDEN, seed=0),
  "out": draw(LAYERS, GROUPS, HIDDEN, WIDTH, seed=1),
}
ONE_LAYER = jax.tree.map(lambda w: w[0], WEIGHTS)
XS, D_OUTS = (draw(MICROBATCHES, ROWS, WIDTH, seed=seed) for seed in (2, 3))
SPECS = stashed_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)
forward, backward = ps.split_passes(stage)
compiled = functools.partial(jax.jit, compiler_options=FUSED)


@functools.partial(compiled, static_argnums=(0, 2))
def run(schedule, stash, passes=(forward, backward)):
  """Runs passes, "F0 B0" for example; returns the stash and the gradients of each backward pass.

  "I" and "W" are the halves of "B"; gradients are those of weights and of `x`.
  """
  forward, backward = passes
  saved, gradients = {}, {}
  for one in schedule.split():
    kind, number = one[0], int(one[1])
    args = WEIGHTS, XS[number], SIZES[number]
    if kind == "F":
      _, stash, saved[number] = forward(stash, *args)
      continue
    run = {"B": backward, "I": backward.early, "W": backward.late}[kind]
    stash, (d_weights, d_x, _) = run(stash, saved[number], D_OUTS[number], *args)
    gradients[one] = d_weights, d_x
  return stash, gradients


@functools.cache
def expected(number):
  pull_back = lambda *args: jax.vjp(lambda *a: plain_stage(*a, SIZES[number]), *args)[1]
  gradients = compiled(lambda weights, x, d_out: pull_back(weights, x)(d_out))
  return gradients(WEIGHTS, XS[number], D_OUTS[number])
