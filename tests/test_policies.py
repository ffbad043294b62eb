"""Policies by name: every placement of a value gives the same gradients."""

import functools
import itertools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, FUSED, long
from tests.helpers.threaded_models import LAYERS, mask, route, TOKENS, weights_of, X

NAMES = "first", "second"


def layer(x, weights):
  """Two values of the same rows."""
  order, sizes = route(x)
  ps.mark_rows(ps.RaggedRows(sizes, TOKENS))
  multiply = lambda rows, name: checkpoint_name(
    mask(lax.ragged_dot(rows, weights, sizes), sizes), name
  )
  first = multiply(x[order], "first")
  second = multiply(jnp.sin(first), "second")
  return x.at[order].add(mask(first * jnp.sin(second), sizes)), None


def gradients(policy, wrap=lambda fun: fun):
  step = jax.checkpoint(layer, policy=policy)
  run = wrap(lambda x, weights: lax.scan(step, x, weights)[0])
  loss = lambda x, weights: jnp.sum(run(x, weights) ** 2)
  return jax.jit(jax.grad(loss, (0, 1)), compiler_options=FUSED)(X, weights_of())


@functools.cache
def expected():
  return gradients(jax.checkpoint_policies.save_only_these_names(*NAMES))


PLACEMENTS = "remat", "device", "offload", "stash"
QUICK = ("stash", "remat"), ("device", "stash"), ("stash", "offload"), ("stash", "stash")
PAIRS = [pair if pair in QUICK else long(*pair) for pair in itertools.product(PLACEMENTS, repeat=2)]


@pytest.mark.parametrize("first, second", PAIRS)
def test_every_placement_gives_the_same_gradients(first, second):
  policy = ps.policy_by_name({"first": first, "second": second})
  stashes = "stash" in (first, second)
  wrap = functools.partial(ps.threaded, capacity_rows=lambda rows: rows) if stashes else lambda f: f
  assert_trees_equal(gradients(policy, wrap), expected())


def test_each_goes_where_it_says():
  """A value beside the stash is kept once, at its full size, where the policy says."""

  def stacked(policy=None, **placements):
    """Returns the types of what is kept of each layer with as many rows as there are tokens."""
    policy = policy or ps.policy_by_name(placements)
    step = jax.checkpoint(layer, policy=policy)
    run = lambda x, weights: lax.scan(step, x, weights)[0]
    if policy.names:
      run = ps.threaded(run, lambda rows: rows)
    backward = jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[1])(X, weights_of())
    kept = (variable.aval for variable in backward.jaxpr.outvars)
    return [str(aval) for aval in kept if aval.shape == (LAYERS, *X.shape)]

  one = len(stacked(first="remat", second="remat"))  # What the layer is given.
  assert len(stacked(first="device", second="remat")) == one + 1
  assert len(stacked(first="stash", second="remat")) == one
  assert len(stacked(first="stash", second="device")) == one + 1
  others = jax.checkpoint_policies.save_any_names_but_these("second")
  assert len(stacked(ps.save_in_stash("first", policy=others))) == one
  offloaded = stacked(first="stash", second="offload")
  assert len(offloaded) == one + 1 and sum("host" in aval for aval in offloaded) == 1


def test_what_is_offloaded_beside_a_stash_goes_there_and_back_once():
  step = jax.checkpoint(layer, policy=ps.policy_by_name({"first": "stash", "second": "offload"}))
  run = ps.threaded(lambda x, weights: lax.scan(step, x, weights)[0], lambda rows: rows)
  gradient = jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(run(*args))))(X, weights_of())
  assert str(gradient).count("device_put[") == 2
