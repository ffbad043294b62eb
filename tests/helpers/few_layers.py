"""A model of a few layers, each of which routes so many rows to this device."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps

TOTAL_ROWS, FEATURES = 32, 8
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


def loss(weights, x, counts, capacity=None, fresh=lambda buffer: buffer):
  """Returns the loss, and the statistics of the stash; without a capacity there is none."""
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  if capacity is not None:
    stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((FEATURES,), jnp.float32)])
    stash.buffers = tuple(map(fresh, stash.buffers))
  for layer, layer_weights in enumerate(weights):
    args = x, layer_weights, counts[layer]
    if capacity is None:
      out = experts(*args)
    else:
      out, stash = f(stash, ps.RaggedRows(counts[layer][None], TOTAL_ROWS), *args)
    x = x + out
  if capacity is None:
    return jnp.sum(x**2), None
  return jnp.sum(ps.seal(x, stash) ** 2), jax.tree.map(lambda leaf: leaf[0], stash.stats())


@functools.partial(jax.jit, static_argnames=("capacity", "fresh"))
def gradient(weights, x, counts, **options):
  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x, counts, **options)


def check_gradient(counts, capacity, **options):
  """Compares with the gradient without a stash; returns it, and the statistics."""
  args = weights_of(len(counts)), X, np.array(counts, np.int32)
  (value, _), expected = gradient(*args)
  (actual_value, stats), actual = gradient(*args, capacity=capacity, **options)
  jax.tree.map(assert_close, (actual_value, actual), (value, expected))
  return actual, jax.tree.map(int, stats)
