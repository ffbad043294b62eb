"""The integration of MaxText, on a model with its seams; `make maxtext` has MaxText itself."""

import dataclasses
import types

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from pallas_stash.integrations import maxtext
from pallas_stash.threaded import threaded
from tests.helpers import maxtext_model
from tests.helpers.checks import assert_trees_equal, FUSED, long, needs_devices
from tests.helpers.maxtext_model import Config, NAMES

X = jax.random.normal(jax.random.key(0), (16, Config.width))


@pytest.fixture
def changed(monkeypatch):
  change(monkeypatch)


def change(monkeypatch):
  """Changes the model as MaxText is, until the end of the test."""
  for owner, name in (
    (maxtext_model, "jax"),
    (maxtext_model.NNXDecoder, "_apply_layers_sequentially"),
    (maxtext_model.NNXDecoder, "get_remat_policy"),
    (maxtext_model.RoutedMoE, "permute"),
  ):
    monkeypatch.setattr(owner, name, getattr(owner, name))
  maxtext._change_layers(maxtext_model, maxtext_model)


def trace(config, has_remainder=False, **attributes):
  """Returns the loss and its gradients, traced: a function of the parameters and `X`."""
  decoder = decoder_of(config, has_remainder)
  for name, value in attributes.items():
    setattr(decoder, name, value)
  graph, params, rest = nnx.split(decoder, nnx.Param, ...)
  loss = lambda params, x: jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) ** 2)
  return jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, X)


def gradients(config):
  """Returns the loss and its gradients."""
  _, params, _ = nnx.split(decoder_of(config), nnx.Param, ...)
  value, (d_params, d_x) = trace(config).lower().compile(FUSED)(params, X)
  return value, nnx.to_pure_dict(d_params), d_x


def decoder_of(config, has_remainder=False):
  mesh = Mesh(np.array(jax.devices()[:2]), ("expert",))
  return maxtext_model.NNXDecoder(config, mesh, nnx.Rngs(0), has_remainder)


def all_in(place, config, **changes):
  return dataclasses.replace(config, **dict.fromkeys(NAMES, place), **changes)


@needs_devices(2)
@pytest.mark.parametrize(
  "config, capacity",
  [
    long(Config(use_ragged_sort=True), 0.6),
    long(Config(use_ragged_sort=True, buffer=24), 2.0),
    long(Config(chunks=2), 0.6),
  ],
  ids=["ragged sort", "buffer", "plain sort, chunks"],
)
def test_gradients_are_those_of_saving(changed, config, capacity):
  expected = gradients(all_in("device", config))
  assert_trees_equal(gradients(all_in("stash", config, stash_capacity=capacity)), expected)


@needs_devices(2)
@pytest.mark.parametrize("config", [Config(), Config(use_ragged_sort=True, buffer=24)])
def test_capacity_is_a_multiple_of_the_rows_of_balanced_routing(changed, monkeypatch, config):
  """Of 16 tokens with two experts each, every device has 16 rows in each of three layers."""
  capacities = []

  def noting(fun, capacity_rows):
    return threaded(fun, lambda worst: capacities.append(capacity_rows(worst)) or capacities[-1])

  monkeypatch.setattr(maxtext, "threaded", noting)
  trace(all_in("stash", config, stash_capacity=0.75))
  assert capacities == [36]


def test_no_more_than_the_worst_case():
  layers = maxtext._Layers(1.5)
  layers.buffer = 4.0
  assert layers.capacity_rows(4000) == 1500
  layers.buffer = 1.25
  assert layers.capacity_rows(1250) == 1250


@needs_devices(2)
def test_layers_that_it_does_not_reach_are_refused(changed):
  with pytest.raises(ValueError, match="moe_mlpw.*=stash does not reach a layer"):
    trace(all_in("stash", Config()), has_remainder=True)


@needs_devices(2)
def test_all_to_all_is_refused(changed):
  with pytest.raises(ValueError, match="needs use_ring_of_experts=True where 2 devices"):
    trace(all_in("stash", Config(use_ring_of_experts=False)))


@needs_devices(2)
def test_only_what_is_stashed_is_threaded(changed, monkeypatch):
  """And no step that MaxText computes again, with a policy that it sets on the decoder."""
  monkeypatch.setattr(maxtext, "threaded", lambda *args: pytest.fail("is threaded"))
  trace(all_in("device", Config()), has_remainder=True)
  trace(all_in("stash", Config()), remat_policy_override="full")


@pytest.mark.parametrize(
  "here, first, is_global, expected",
  [
    (None, 0, False, [[0, 1, 2], []]),
    (None, 2, True, [[3, 4, 5, 6], [7]]),
    ([2, 1], 2, True, [[0, 1], [2]]),
  ],
  ids=["first", "where they lie among all", "in a buffer of their own"],
)
def test_rows_here(here, first, is_global, expected):
  sizes, here = jnp.array([3, 0, 4, 1]), here and jnp.array(here)
  ragged = maxtext._rows_here(12, sizes, here, first, 2, is_global)
  starts = ragged.group_starts
  starts = np.cumsum(ragged.group_sizes) - ragged.group_sizes if starts is None else starts
  groups = zip(starts.tolist(), ragged.group_sizes.tolist(), strict=True)
  assert [list(range(start, start + size)) for start, size in groups] == expected


NEEDED = {key: needed for key, (needed, _) in maxtext._NEEDED.items()}


def configuration(**changes):
  return types.SimpleNamespace(**NEEDED | {"moe_mlpwo": "stash", "stash_capacity": 1.1} | changes)


def test_what_is_needed():
  maxtext.check(configuration())
  maxtext.check(configuration(moe_mlpwo="device", scan_layers=False))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"remat_policy": "full"}, "^moe_mlpwo=stash needs remat_policy=custom, not full: "),
    ({"scan_layers": False}, "^moe_mlpwo=stash needs scan_layers=True, not False: "),
    ({"using_pipeline_parallelism": True}, "^moe_mlpwo=stash needs using_pipeline_parallelism=Fal"),
    ({"mtp_num_layers": 1}, "^moe_mlpwo=stash needs mtp_num_layers=0, not 1: "),
  ],
)
def test_configurations_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    maxtext.check(configuration(**changes))


@pytest.mark.parametrize("key", NEEDED)
def test_each_key_that_is_needed_is_looked_at(key):
  with pytest.raises(ValueError, match=f"^moe_mlpwo=stash needs {key}="):
    maxtext.check(configuration(**{key: "something else"}))
