"""The scheme that the stash is compared with computes the right gradients too."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from bench.fit import fixed_chunks

pytestmark = pytest.mark.once

LAYERS, TOTAL_ROWS, WIDTH, HIDDEN, CHUNK_ROWS = 5, 24, 8, 4, 10
COUNTS = jnp.array([3, 10, 0, 11, 7])  # the fourth does not fit a chunk
SAVE = jax.checkpoint_policies.save_only_these_names
STRUCTS = [jax.ShapeDtypeStruct((width,), jnp.float32) for width in (WIDTH, HIDDEN)]


def experts(x, weights, count):
  """Of its residuals "out" is NaN in padding, and masked; gradients need the zeros of "in"."""
  row = jnp.arange(TOTAL_ROWS)[:, None]
  live = row < count

  def named(rows, name):
    return jnp.where(live, checkpoint_name(jnp.where(live, rows, jnp.nan), name), 0)

  hidden = jnp.tanh(checkpoint_name(jnp.where(live, x + row, 0) @ weights[0], "in"))
  return named(jnp.sin(hidden) @ weights[1], "out") ** 2 + hidden @ weights[1]


def loss(weights, x, capacity_rows=None):
  stash = None
  if capacity_rows is not None:
    stash = fixed_chunks.empty(capacity_rows, CHUNK_ROWS, STRUCTS)
  stashed = fixed_chunks.checkpoint(experts, SAVE("in", "out"), CHUNK_ROWS)

  @functools.partial(jax.checkpoint, policy=SAVE(fixed_chunks.SLOT_NAME))
  def layer(carry, weights_and_count):
    (x, stash), (weights, count) = carry, weights_and_count
    if stash is None:
      out = experts(x, weights, count)
    else:
      out, stash = stashed(stash, (count, jnp.arange(TOTAL_ROWS)), x, weights, count)
    return (x + out.mean(0), stash), None

  (x, stash), _ = lax.scan(layer, (x, stash), (weights, COUNTS))
  return jnp.sum(x if stash is None else fixed_chunks.seal(x, stash))


@pytest.mark.parametrize("capacity_rows", [0, 3, 13, 19, 20, 31])
def test_gradients(capacity_rows):
  rng = np.random.default_rng(0)
  shapes = [(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)]
  weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
  expected = gradient(weights, jnp.ones(WIDTH), None)
  actual = gradient(weights, jnp.ones(WIDTH), capacity_rows)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
  for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # recomputed ones are rounded
