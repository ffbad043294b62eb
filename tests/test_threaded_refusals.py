"""What `threaded` cannot do is said, with the line of the program: nothing is dropped silently."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from pallas_stash import jaxprs
from tests.helpers.threaded_models import (
  experts,
  groups_with_starts,
  marked,
  mask,
  MODELS,
  plain,
  route,
  scanned,
  TOKENS,
  weights_of,
  X,
)

HIDDEN = ps.save_in_stash("hidden")


def lower(fun, capacity_rows=64):
  return jax.make_jaxpr(ps.threaded(fun, capacity_rows))(X, weights_of())


def of_layer(layer, policy=HIDDEN):
  return scanned(layer)(policy)


def unmarked(x, weights):
  order, sizes = route(x)
  return x.at[order].add(experts(x[order], weights, sizes))


def in_while(x, weights):
  return lax.while_loop(lambda x: x[0, 0] > 9, lambda x: plain(x, weights), x)


@jax.custom_vjp
def with_rule(x, weights):
  return plain(x, weights)


with_rule.defvjp(lambda x, w: (plain(x, w), (x, w)), lambda saved, d: (d, jnp.zeros_like(saved[1])))


@jax.custom_jvp
def with_tangents(x, weights):
  return plain(x, weights)


with_tangents.defjvp(lambda primals, tangents: (plain(*primals), tangents[0]))


def in_scan_of_a_site(x, weights):
  """A loop that names values without marks, in a function that has marks and names too."""
  x, _ = lax.scan(lambda x, _: (unmarked(x, weights), None), x, None, length=2)
  return plain(x, weights)


def three_axes(x, weights):
  order, sizes = route(x)
  marked(sizes, TOKENS)
  hidden = checkpoint_name(mask(x[order], sizes).reshape(2, TOKENS // 2, -1), "hidden")
  return x + jnp.sin(hidden).reshape(x.shape) * hidden.reshape(x.shape)


def integers(x, weights):
  order, sizes = route(x)
  marked(sizes, TOKENS)
  return x * checkpoint_name(mask(x[order], sizes).astype(jnp.int8), "hidden")


def not_needed(x, weights):
  _, sizes = route(x)
  marked(sizes, TOKENS)
  return x + checkpoint_name(mask(x, sizes), "hidden")


def under_vmap(x, weights):
  return jax.vmap(groups_with_starts, (0, None))(x[None], weights)[0]


@pytest.mark.parametrize(
  "layer, message",
  [
    (unmarked, r"'hidden', float32\[24, 8\] \(.*threaded_models.py:\d+.*call mark_rows"),
    (in_while, r"threaded through while \(.*test_threaded_refusals.py:\d+"),
    (with_rule, r"threaded through custom_vjp_call \(.*threaded_models.py:\d+"),
    (with_tangents, r"threaded through custom_jvp_call \(.*threaded_models.py:\d+"),
    (in_scan_of_a_site, r"also does so in scan \(.*test_threaded_refusals.py:\d+"),
    (three_axes, r"float32\[2, 12, 8\].* has 3 axes: reshape to \[24, 8\]"),
    (integers, r"int8\[24, 8\].* has no floating-point dtype"),
    (not_needed, r"needs no value named 'hidden'"),
    (under_vmap, r"mark_rows at .*threaded_models.py:\d+.* is under vmap"),
  ],
  ids=lambda value: getattr(value, "__name__", None),
)
def test_where_a_stash_cannot_be(layer, message):
  with pytest.raises(ValueError, match=message):
    lower(of_layer(layer))


def hidden_in_another_policy():
  save = jax.checkpoint_policies.save_only_these_names("x")
  return jax.checkpoint_policies.save_from_both_policies(save, HIDDEN)


@pytest.mark.parametrize(
  "policy, message",
  [
    (None, r"found no jax.checkpoint whose policy is save_in_stash"),
    (jax.checkpoint_policies.everything_saveable, r"found no jax.checkpoint whose policy is"),
    (ps.save_in_stash("hiden"), r"No value is named 'hiden'.*Named there is: 'hidden'\."),
    (ps.save_in_stash("hidden", "up"), r"No value is named 'up'"),
    (hidden_in_another_policy(), r"save_in_stash\('hidden'.* must be the policy itself"),
    (functools.partial(lambda f, *a, **k: f(*a, **k), HIDDEN), r"must be the policy itself"),
  ],
)
def test_policies_that_stash_nothing(policy, message):
  with pytest.raises(ValueError, match=message):
    lower(of_layer(plain, policy))


def test_a_checkpoint_of_another_policy_around_the_value():
  inner = jax.checkpoint(plain)
  with pytest.raises(
    ValueError, match=r"'hidden', for the stash, is named under a jax.checkpoint of another"
  ):
    lower(of_layer(inner))


def test_a_function_that_differentiates():
  gradient = jax.grad(lambda x, weights: jnp.sum(of_layer(plain)(x, weights)))
  with pytest.raises(ValueError, match=r"must be what is differentiated: jax.grad\(threaded"):
    lower(gradient)


@pytest.mark.parametrize(
  "capacity_rows, message",
  [
    (-1, "capacity_rows=-1 must be at least 0"),
    (1.5, "capacity_rows=1.5 must be a static int"),
    (lambda rows: -rows, r"capacity_rows\(72\)=-72 must be at least 0"),
    (lambda rows: rows / 2, "must be a static int"),
  ],
)
def test_capacities(capacity_rows, message):
  with pytest.raises(ValueError, match=message):
    lower(of_layer(plain), capacity_rows)


def test_arguments_that_are_no_such_things():
  with pytest.raises(ValueError, match="fun=3 must be a function"):
    ps.threaded(3, 64)
  with pytest.raises(ValueError, match="must be RaggedRows"):
    ps.mark_rows(jnp.ones(3, jnp.int32))
  with pytest.raises(ValueError, match="name=3 must be a string"):
    ps.save_in_stash("hidden", 3)
  with pytest.raises(ValueError, match="policy='hidden' must be a function"):
    ps.save_in_stash(policy="hidden")
  with pytest.raises(ValueError, match="must be arrays"):
    ps.threaded(of_layer(plain), 64)(X, "weights")
  with pytest.raises(ValueError, match="hidden='stach' must be one of 'remat', 'device'"):
    ps.policy_by_name({"hidden": "stach"})


def test_a_jax_with_other_parameters(monkeypatch):
  known = jaxprs._PARAMETERS | {"scan": {"jaxpr"}}
  monkeypatch.setattr(jaxprs, "_PARAMETERS", known)
  with pytest.raises(ValueError, match=r"does not know .*length.* of scan in jax \d"):
    lower(of_layer(plain))


def test_no_names_are_no_stash():
  """As a trainer has it whose options put nothing into the stash."""
  fun = of_layer(plain, ps.save_in_stash())
  assert "stash" not in str(lower(fun)).replace("save_in_stash", "").replace("stash_rows", "")


def test_a_model_that_is_never_sealed_is_not_possible():
  """The stash is sealed by `threaded`: gradients of a result alone are right."""
  fun = ps.threaded(MODELS["plain"](HIDDEN), 0)
  gradient = jax.jit(jax.grad(lambda x: fun(x, weights_of())[0, 0]))(X)
  assert not jnp.isnan(gradient).any()
