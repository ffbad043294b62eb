"""A model of a few layers, each of which routes so many rows to this device."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from tests.helpers.stashes import with_rows_taken

TOTAL_ROWS, FEATURES = 32, 8
CAPACITY = 128  # Of four layers at worst.
SAVE = jax.checkpoint_policies.save_only_these_names
X = jax.random.normal(jax.random.key(0), (TOTAL_ROWS, FEATURES))


def assert_close(actual, expected):
  """XLA fuses, and so rounds, differently around a value that is stored; sums may cancel."""
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(expected).max()))


def weights_of(layers):
  return jax.random.normal(jax.random.key(1), (layers, FEATURES, FEATURES)) / 3


def mask(rows, count):
  return jnp.where(jnp.arange(TOTAL_ROWS)[:, None] < count, rows, 0)


def experts(rows, weights, count):
  hidden = checkpoint_name(mask(rows @ weights, count), "residual")
  return mask(jnp.sin(hidden) * hidden, count)


def loss(weights, x, counts, room=None, fresh=lambda buffer: buffer):
  """Returns the loss, and the statistics of the stash; without room there is none.

  Args:
    weights: float32[layers, FEATURES, FEATURES].
    x: float32[TOTAL_ROWS, FEATURES].
    counts: int32[layers], the rows of each layer.
    room: int32[], rows of the stash that are not taken before the first layer. So one program does
      for every capacity.
    fresh: what becomes of each buffer of the empty stash.
  """
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  stash = None
  if room is not None:
    stash = ps.Stash.empty(CAPACITY, [jax.ShapeDtypeStruct((FEATURES,), jnp.float32)])
    taken = CAPACITY - room
    stash.buffers = tuple(map(fresh, stash.buffers))
    stash = with_rows_taken(stash, taken)

  def layer(carry, xs):
    x, stash = carry
    layer_weights, count = xs
    args = x, layer_weights, count
    if stash is None:
      return (x + experts(*args), None), None
    out, stash = f(stash, ps.RaggedRows(count[None], TOTAL_ROWS), *args)
    return (x + out, stash), None

  (x, stash), _ = jax.lax.scan(layer, (x, stash), (weights, counts))
  if stash is None:
    return jnp.sum(x**2), None
  stats = jax.tree.map(lambda leaf: leaf[0], stash.stats())
  stats = stats._replace(rows_in_use=stats.rows_in_use - taken, peak_rows=stats.peak_rows - taken)
  return jnp.sum(ps.seal(x, stash) ** 2), stats


@functools.partial(jax.jit, static_argnames="fresh")
def gradient(weights, x, counts, **options):
  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x, counts, **options)


def check_gradient(counts, room, **options):
  """Compares with the gradient without a stash; returns it, and the statistics."""
  args = weights_of(len(counts)), X, np.array(counts, np.int32)
  (value, _), expected = gradient(*args)
  (actual_value, stats), actual = gradient(*args, room=room, **options)
  jax.tree.map(assert_close, (actual_value, actual), (value, expected))
  return actual, jax.tree.map(int, stats)
