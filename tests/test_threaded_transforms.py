"""`threaded` under the transformations of jax, its flags, in `debug`, and on explicit meshes."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long, needs_devices
from tests.helpers.few_layers import assert_close
from tests.helpers.threaded_models import groups_with_starts, plain, scanned, weights_of, X
from tests.test_handover_flags import FLAGS, flags_on, RUNS_FLAGS

STASH = ps.save_in_stash("hidden")
SAVED = jax.checkpoint_policies.save_only_these_names("hidden")
ALL = lambda worst_case_rows: worst_case_rows


def loss_of(layer, is_stashed=True, wrap=lambda loss: loss):
  fun = scanned(layer)(STASH if is_stashed else SAVED)
  fun = ps.threaded(fun, ALL) if is_stashed else fun
  return wrap(lambda x, weights: jnp.sum(fun(x, weights) ** 2))


def gradients(*args, **options):
  return jax.jit(jax.grad(loss_of(*args, **options), (0, 1)))(X, weights_of())


@pytest.mark.both
@pytest.mark.skipif(not RUNS_FLAGS, reason="this jax cannot run a stash under them")
@pytest.mark.parametrize("flags", [long(FLAGS[:1]), long(FLAGS[1:]), FLAGS], ids=" and ".join)
def test_gradients_with_the_flags_of_jax(flags):
  with flags_on(*flags):
    actual, expected = gradients(plain), gradients(plain, is_stashed=False)
  assert_trees_equal(actual, expected)


@pytest.mark.both
@pytest.mark.skipif(RUNS_FLAGS, reason="this jax can run a stash under them")
def test_flags_that_a_jax_cannot_run_are_refused():
  with flags_on(FLAGS[0]), pytest.raises(ValueError, match=f"{FLAGS[0]}=True must be off with jax"):
    gradients(plain)


@pytest.mark.long
def test_a_loss_under_checkpoint():
  assert_trees_equal(gradients(plain, wrap=jax.checkpoint), gradients(plain))


def test_each_example_of_vmap_has_a_stash():
  both = jnp.stack([X, 2 * X])
  gradient = jax.grad(loss_of(groups_with_starts))
  actual = jax.jit(jax.vmap(gradient, (0, None)))(both, weights_of())
  saved = jax.jit(jax.grad(loss_of(groups_with_starts, is_stashed=False)))
  assert_close(actual, jnp.stack([saved(x, weights_of()) for x in both]))


def test_in_the_mode_of_debug(capsys):
  with ps.debug():
    assert_close(gradients(plain)[1], gradients(plain)[1])
  assert "pallas_stash" not in capsys.readouterr().out


@needs_devices(2)
@pytest.mark.parametrize("axis_type", [long(AxisType.Auto), AxisType.Explicit], ids=str)
def test_a_shard_map_in_each_layer_of_a_mesh(axis_type):
  mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
  by_row = NamedSharding(mesh, P("x"))

  def loss(policy, wrap, x, weights):
    layer = jax.shard_map(plain, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    step = jax.checkpoint(lambda x, weights: (layer(x, weights), None), policy=policy)
    return jnp.sum(wrap(lambda x, weights: lax.scan(step, x, weights)[0])(x, weights) ** 2)

  with jax.set_mesh(mesh):
    args = jax.device_put(jnp.concatenate([X, X]), by_row), jax.device_put(weights_of(), P())
    run = lambda *options: jax.jit(jax.grad(functools.partial(loss, *options), (0, 1)))(*args)
    actual = run(STASH, functools.partial(ps.threaded, capacity_rows=ALL))
    assert_close(jax.device_get(actual[1]), jax.device_get(run(SAVED, lambda f: f)[1]))
