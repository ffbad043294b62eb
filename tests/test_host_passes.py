"""Rows in host memory, and passes and policies: `split_passes`, `threaded`."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import tiers
from tests.helpers import few_passes
from tests.helpers.checks import assert_trees_equal, FUSED, long, once
from tests.helpers.threaded_models import mask, route, TOKENS, weights_of, X

SAVE = jax.checkpoint_policies.save_only_these_names
ALL = lambda worst_case_rows: worst_case_rows


@pytest.mark.parametrize(
  "schedule",
  [
    *map(long, (few_passes.LAST_IN_FIRST_OUT, "F0 F1 B0 F2 B1 B2", "F0 B0 B0", "F0 F1 B0")),
    once("F0 F1 B0 F2 B2 B1"),
  ],
)
def test_passes_find_their_heads_wherever_they_are(schedule):
  """A backward pass brings heads to the stage of which another had its own there."""
  stash = ps.Stash.empty(8, few_passes.SPECS, host_capacity_rows=600, staging_rows=16)
  stash, gradients = few_passes.run(schedule, stash)
  assert int(stash.stats().overflowed_pushes[0]) == 0
  for one, actual in gradients.items():
    assert_trees_equal(actual, few_passes.expected(int(one[1])))


def test_passes_of_several_shards_are_refused():
  stash = ps.Stash.empty(8, few_passes.SPECS, 2, host_capacity_rows=64, staging_rows=8)
  with pytest.raises(ValueError, match="has 2 shards here and must have 1"):
    tiers.settled(stash)


def experts(rows, weights, sizes):
  gate = checkpoint_name(mask(lax.ragged_dot(rows, weights, sizes), sizes), "gate")
  up = checkpoint_name(mask(lax.ragged_dot(rows, 2 * weights, sizes), sizes), "up")
  return mask(jnp.sin(gate) * jnp.cos(up), sizes)


def layer(x, weights):
  order, sizes = route(x)
  ps.mark_rows(ps.RaggedRows(sizes, TOKENS))
  return x.at[order].add(experts(x[order], weights, sizes))


def model(policy):
  def run(x, weights):
    body = jax.checkpoint(layer, policy=policy)
    return lax.scan(lambda x, w: (body(x, w), None), x, weights)[0]

  return run


def results(fun):
  def loss(x, weights):
    out = fun(x, weights)
    out, stats = out if isinstance(out, tuple) else (out, ())
    return jnp.sum(out**2), stats

  differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
  return jax.jit(differentiate, compiler_options=FUSED)(X, weights_of())


POLICIES = {
  "all on the host": ({"gate": "stash_host", "up": "stash_host"}, {}),
  "one here and one there": ({"gate": "stash", "up": "stash_host"}, {}),
  "both, with a stage": ({"gate": "stash", "up": "stash"}, {"staging_rows": 8}),
  "one here and one with a stage": ({"gate": "stash", "up": "stash_host"}, {"staging_rows": 8}),
}


@pytest.mark.parametrize("name", [list(POLICIES)[-1], *map(long, list(POLICIES)[:-1])])
def test_threaded(name):
  placements, options = POLICIES[name]
  policy = ps.policy_by_name(placements)
  stashed = ps.threaded(model(policy), ALL, host_capacity_rows=ALL, has_stats=True, **options)
  (value, stats), gradients = results(stashed)
  (expected_value, _), expected = results(model(SAVE("gate", "up")))
  close = lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6)
  jax.tree.map(close, (value, gradients), (expected_value, expected))
  on_host = sorted(set(placements.values()))
  assert len(stats) == len(on_host)
  by_tier = [(int(s.peak_rows[0]) > 0, isinstance(s, ps.TierStats)) for s in stats]
  assert (
    set(by_tier)
    == {
      "all on the host": {(False, True)},
      "one here and one there": {(True, False), (False, True)},
      "both, with a stage": {(by_tier[0][0], True)},
      "one here and one with a stage": {(True, False), (False, True)},
    }[name]
  )
  assert all(int(s.overflowed_pushes[0]) == 0 for s in stats)


def test_what_threaded_refuses():
  policy = ps.save_in_stash("gate", on_host=["up"])
  fun = ps.threaded(model(policy), ALL)
  with pytest.raises(ValueError, match="host_capacity_rows=0 must be above 0: a policy names"):
    jax.eval_shape(fun, X, weights_of())
  with pytest.raises(ValueError, match="staging_rows=-1 must be at least 0"):
    ps.threaded(model(policy), ALL, staging_rows=-1)
  with pytest.raises(ValueError, match="staging_rows=8 must be 0 without host memory"):
    jax.eval_shape(
      ps.threaded(model(ps.save_in_stash("gate", "up")), ALL, staging_rows=8), X, weights_of()
    )
  with pytest.raises(ValueError, match="must have none of the other names, as 'gate'"):
    ps.save_in_stash("gate", on_host=["gate"])
  with pytest.raises(ValueError, match="on_host='up' must be a sequence of names"):
    ps.save_in_stash("gate", on_host="up")
  with pytest.raises(ValueError, match="'stash_host'"):
    ps.policy_by_name({"gate": "host"})
  assert repr(policy) == "save_in_stash('gate', on_host=['up'], policy=None)"


def test_a_step_is_explained():
  stashed = ps.threaded(
    model(ps.save_in_stash(on_host=["gate", "up"])), ALL, host_capacity_rows=ALL, staging_rows=8
  )
  text = str(ps.explain(lambda *args: jnp.sum(stashed(*args)), X, weights_of()))
  assert "gate" in text and "stash" in text
