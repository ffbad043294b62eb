"""A small masked expert layer under `checkpoint`, alone and scanned."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import pallas_stash as ps

ROWS, WIDTH, HIDDEN, LAYERS = 64, 8, 16, 4
SAVE = jax.checkpoint_policies.save_only_these_names
COUNTS = jnp.array([20, 0, 33, 1], jnp.int32)
NEEDED = 24 + 0 + 40 + 8


def experts(rows, w_in, w_out, count):
  live = (jnp.arange(ROWS) < count)[:, None]
  gate = checkpoint_name(jnp.where(live, rows @ w_in, 0), "residual")
  up = checkpoint_name(jnp.where(live, jnp.sin(rows) @ w_in, 0), "residual")
  return jnp.where(live, (jnp.tanh(gate) * up) @ w_out, 0)


def weights():
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
  return tuple(jax.random.normal(k, s) / 3 for k, s in zip(keys, shapes, strict=True))


X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
TWO = [jax.ShapeDtypeStruct((HIDDEN,), jnp.float32)] * 2


def ragged_of(count, total_rows=ROWS):
  return ps.RaggedRows(count[None], total_rows)


def scanned_loss(weights, capacity=None, outer_names=("residual", ps.SLOT_NAME), **options):
  """The loss of a scan of layers under `jax.checkpoint`, or without it if no names are given."""
  if capacity is None:
    saving = jax.checkpoint(experts, policy=SAVE("residual"))
    f = lambda stash, ragged, *args: (saving(*args), stash)
    stash = None
  else:
    f = ps.checkpoint(experts, policy=SAVE("residual"), **options)
    stash = ps.Stash.empty(capacity, TWO)

  def layer(carry, xs):
    x, stash = carry
    (w, w_in, w_out), count = xs
    out, stash = f(stash, ragged_of(count), jnp.tanh(x @ w), w_in, w_out, count)
    return (x + out, stash), None

  if outer_names:
    layer = jax.checkpoint(layer, policy=SAVE(*outer_names))
  (x, stash), _ = lax.scan(layer, (X, stash), (weights, COUNTS))
  return jnp.sum((x if capacity is None else ps.seal(x, stash)) ** 2)


def mask(rows, count):
  return jnp.where((jnp.arange(rows.shape[0]) < count)[:, None], rows, 0)
