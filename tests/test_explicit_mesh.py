"""A mesh whose axes are explicit, as those of `jax.make_mesh` are: sharding is part of a type."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import needs_devices

ROWS, WIDTH = 8, 4
RAGGED = ps.RaggedRows(jnp.array([ROWS], jnp.int32), ROWS)
X, W = jnp.ones((ROWS, WIDTH)), jnp.eye(WIDTH)
SPECS = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * 2


def experts(x, w):
  return jnp.sin(jnp.sin(x @ w))


f = ps.checkpoint(experts)


def explicit_mesh(devices):
  return jax.set_mesh(jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Explicit,)))


@pytest.mark.parametrize("capacity", [0, ROWS])
def test_with_nothing_sharded(capacity):
  def loss(w):
    stash = ps.Stash.empty(capacity, f.residuals(RAGGED, X, w))
    return jnp.sum(ps.seal(*f(stash, RAGGED, X, w)))

  expected = jax.jit(jax.grad(loss))(W)
  with explicit_mesh(1):
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(W), expected)
    written = ps.dynamic_update_slice(jnp.zeros((16, 4)), X, (3, 0), group_sizes=jnp.array([5]))
    rows = ps.dynamic_slice(written, (3, 0), (ROWS, WIDTH), group_sizes=jnp.array([5]))
  np.testing.assert_array_equal(rows, np.where(np.arange(ROWS)[:, None] < 5, 1, 0) * X)


@needs_devices(2)
def test_a_stash_made_outside_of_shard_map_is_resharded():
  def loss(w, x):
    stash = jax.reshard(ps.Stash.empty(ROWS, SPECS, num_shards=2), P("x"))
    layer = jax.shard_map(
      lambda stash, x, w: f(stash, RAGGED, x, w),
      in_specs=(P("x"), P("x"), P()),
      out_specs=P("x"),
    )
    return jnp.sum(ps.seal(*layer(stash, jax.reshard(x, P("x")), w)))

  x = jnp.concatenate([X, 2 * X])
  with explicit_mesh(2):
    actual = jax.jit(jax.grad(loss))(W, x)
  expected = jax.jit(jax.grad(lambda w: jnp.sum(experts(x, w))))(W)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@needs_devices(2)
@pytest.mark.parametrize("what", ["rows", "stash"])
def test_what_is_sharded_outside_of_shard_map_is_refused(what):
  with explicit_mesh(2):
    rows, stash = X, ps.Stash.empty(ROWS, SPECS[:1])
    if what == "rows":
      rows = jax.reshard(rows, P("x"))
    else:
      stash.buffers = jax.reshard(stash.buffers, P("x"))
    with pytest.raises(ValueError, match="must not be sharded here.*inside `jax.shard_map`"):
      stash.push([rows], RAGGED)
