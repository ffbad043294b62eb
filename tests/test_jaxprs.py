"""What is read of jaxprs, with the jax that runs: each names and packs it in its own way."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from pallas_stash import jaxprs
from tests.test_handover_flags import flags_on, RUNS_FLAGS

pytestmark = pytest.mark.both

POLICY = jax.checkpoint_policies.save_only_these_names("sine")
X = jnp.arange(4.0)


def sine(x):
  return checkpoint_name(jnp.sin(x), "sine")


def scan(x):
  """Two constants, a carry of two values, and two that are sliced."""
  scale, shift = x[0], x[1:3]

  def body(carry, xs):
    total, product = carry
    return (total + scale * xs[0], product * xs[1]), (sine(xs[0]) + shift[0], product)

  return lax.scan(body, (x[0], x), (x, x), reverse=True, unroll=2)


def in_shard_map(x):
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
  return jax.shard_map(sine, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


KINDS = {
  "jit": lambda x: jax.jit(sine)(x),
  "checkpoint": lambda x: jax.checkpoint(sine, policy=POLICY, prevent_cse=False)(x),
  "scan": scan,
  "cond": lambda x: lax.cond(x[0] > 0, sine, lambda x: x, x),
  "shard_map": in_shard_map,
}


def calls_of(function):
  equations = jaxprs.opened(jax.make_jaxpr(function)(X))[0].eqns
  return [(e, call) for e in equations if (call := jaxprs.call_of(e))]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call(kind):
  ((equation, call),) = calls_of(KINDS[kind])
  assert call.kind == kind
  assert len(call.jaxprs) == (2 if kind == "cond" else 1)
  names = [jaxprs.names_in(jaxprs.opened(jaxpr)[0]) for jaxpr in call.jaxprs]
  assert {"sine"} in names
  assert "test_jaxprs.py" in jaxprs.line_of(equation)


def test_what_is_read_of_each():
  ((_, call),) = calls_of(KINDS["checkpoint"])
  assert call.params["policy"] is POLICY and call.params["prevent_cse"] is False
  ((equation, call),) = calls_of(scan)
  assert [call.params[name] for name in ("length", "reverse", "unroll")] == [4, True, 2]
  assert jaxprs.scan_counts(equation) == (2, 2)
  ((_, call),) = calls_of(in_shard_map)
  assert set(call.params["newly_manual_axes"]) == {"x"} and call.params["check_vma"]
  assert [*call.params["in_specs"], *call.params["out_specs"]] == [P("x")] * 2


@pytest.mark.skipif(not RUNS_FLAGS, reason="this jax cannot run a stash under it")
def test_the_other_implementation_of_checkpoint():
  with flags_on("jax_remat3"):
    ((_, call),) = calls_of(KINDS["checkpoint"])
    (jaxpr,) = call.jaxprs
  assert call.kind == "checkpoint" and call.params["policy"] is POLICY
  assert jaxprs.names_in(jaxprs.opened(jaxpr)[0]) == {"sine"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_evaluated_as_it_is(kind):
  """Also with a rule for some equation, in the scopes of the program."""
  jaxpr, consts = jaxprs.opened(jax.make_jaxpr(KINDS[kind])(X))
  scopes = []

  def evaluated(x):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, x], strict=True))

    def rule_of(equation):
      if not (call := jaxprs.call_of(equation)):
        return None
      scopes.append(call.kind)
      return lambda *operands: equation.primitive.bind(
        *operands, **equation.primitive.get_bind_params(equation.params)
      )

    jaxprs.evaluate(jaxpr, jaxpr.eqns, values, rule_of)
    return [values[x] for x in jaxpr.outvars]

  actual, expected = jax.jit(evaluated)(X), jax.tree.leaves(jax.jit(KINDS[kind])(X))
  assert scopes == [kind]
  assert [a.tolist() for a in actual] == [e.tolist() for e in expected]
