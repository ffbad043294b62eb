"""A function is traced once, for its residuals and for all passes."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps

ROWS, WIDTH = 8, 4
SAVE = jax.checkpoint_policies.save_only_these_names
RAGGED = ps.RaggedRows(jnp.array([5], jnp.int32), ROWS)
X = jnp.where(jnp.arange(ROWS)[:, None] < 5, jax.random.normal(jax.random.key(0), (ROWS, WIDTH)), 0)
W = jnp.eye(WIDTH) + 0.5
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


def counted(fun):
  def count(*args):
    count.traces += 1
    return fun(*args)

  count.traces = 0
  return count


@pytest.mark.parametrize("policy", [None, SAVE("hidden")], ids=["all", "names"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_function_is_traced_once(policy, layers):
  """For its residuals, forward, backward, to be recomputed, and for all layers of its shapes."""
  fun = counted(lambda x, w: jnp.sin(checkpoint_name(x @ w, "hidden")))
  f = ps.checkpoint(fun, policy=policy)

  def loss(w):
    x, stash = X, ps.Stash.empty(8, f.residuals(RAGGED, X, w))
    for _ in range(layers):
      x, stash = f(stash, RAGGED, x, w)
    return jnp.sum(ps.seal(x, stash))

  jax.jit(jax.grad(loss)).lower(W)
  assert fun.traces == 1


def test_a_function_is_traced_once_in_a_scan_in_shard_map():
  fun = counted(lambda x, w: jnp.sin(checkpoint_name(x @ w, "hidden")))
  f = ps.checkpoint(fun, policy=SAVE("hidden"))
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

  def loss(x, weights):
    stash = ps.Stash.empty(16, f.residuals(RAGGED, x, weights[0]))
    layer = lambda carry, w: (f(carry[1], RAGGED, carry[0], w), None)
    layer = jax.checkpoint(layer, policy=SAVE(ps.SLOT_NAME))
    return lax.psum(jnp.sum(ps.seal(*lax.scan(layer, (x, stash), weights)[0])), "x")

  spec = jax.sharding.PartitionSpec
  run = jax.shard_map(loss, mesh=mesh, in_specs=(spec("x"), spec()), out_specs=spec())
  jax.jit(jax.grad(run, argnums=1)).lower(X, jnp.stack([W, W]))
  assert fun.traces <= 2  # With weights that vary over devices, and with their shapes alone.


@pytest.mark.parametrize("policy", [None, SAVE("hidden")], ids=["all", "names"])
def test_python_state_is_read_once(policy):
  """What is recomputed is what ran: the same keys, not the next ones."""
  calls = iter(range(100))

  def fun(x, w):
    key = jax.random.key(next(calls))
    hidden = checkpoint_name(x @ w, "hidden")
    return jnp.sin(hidden) * jax.random.bernoulli(key, 0.5, hidden.shape)

  f = ps.checkpoint(fun, policy=policy)
  specs = f.residuals(RAGGED, X, W)

  def gradient(capacity):
    loss = lambda w: jnp.sum(ps.seal(*f(ps.Stash.empty(capacity, specs), RAGGED, X, w)))
    return jax.jit(jax.value_and_grad(loss))(W)

  jax.tree.map(assert_close, gradient(0), gradient(16))
