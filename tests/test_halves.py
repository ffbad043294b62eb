"""What the early half of a backward pass keeps for the late one: found, not run."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from pallas_stash.elementwise import is_elementwise
from pallas_stash.jaxprs import made_of
from reference import model, moe

pytestmark = pytest.mark.once

ROWS, WIDTH, HIDDEN, GROUPS = 96, 16, 24, 4
SAVE = jax.checkpoint_policies.save_only_these_names
struct = jax.ShapeDtypeStruct
SIZES = struct((GROUPS,), jnp.int32)


def kept_of(fun, *args, late, names):
  """Returns the rows of late gradients, beside those of residuals with these names."""
  of = lambda late: ps.checkpoint(fun, policy=SAVE(*names), late_argnames=late).residuals(
    ps.RaggedRows(SIZES, ROWS), *args
  )
  both, residuals = of(late), of(())
  assert both[: len(residuals)] == residuals
  return sorted((row.shape, str(row.dtype)) for row in both[len(residuals) :])


def gated(rows, weights, sizes, dtype=jnp.float32):
  multiply = functools.partial(lax.ragged_dot, preferred_element_type=jnp.float32)
  hidden = checkpoint_name(multiply(rows, weights["in"], sizes).astype(dtype), "hidden")
  return multiply(jax.nn.silu(hidden), weights["out"], sizes).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_matmuls_are_given_and_cotangents_of_those_they_make(dtype):
  """Of what a matmul makes, as it is rounded."""
  weights = {"in": (GROUPS, WIDTH, HIDDEN), "out": (GROUPS, HIDDEN, WIDTH)}
  weights = {name: struct(shape, dtype) for name, shape in weights.items()}
  args = struct((ROWS, WIDTH), dtype), weights, SIZES
  fun = functools.partial(gated, dtype=jnp.dtype(dtype))
  kept = kept_of(fun, *args, late="weights", names=["hidden"])
  # What is given to the first, the cotangent of what it makes, and that of the result.
  assert kept == [((WIDTH,), dtype), ((WIDTH,), dtype), ((HIDDEN,), dtype)]


def test_they_are_explained():
  weights = {"in": (GROUPS, WIDTH, HIDDEN), "out": (GROUPS, HIDDEN, WIDTH)}
  weights = {name: struct(shape, jnp.float32) for name, shape in weights.items()}
  f = ps.checkpoint(gated, policy=SAVE("hidden"), late_argnames="weights")
  args = struct((ROWS, WIDTH), jnp.float32), weights, SIZES
  explanation = f.explain(ps.RaggedRows(SIZES, ROWS), *args)
  stashed = [r for r in explanation.residuals if r.kind == "stashed"]
  assert [r.shape[1:] for r in stashed] == [
    r.shape for r in f.residuals(ps.RaggedRows(SIZES, ROWS), *args)
  ]
  assert str(explanation).count("early half") == 3


def test_of_the_experts_of_the_reference():
  """Rows are gathered from tokens, and summed up by token: neither is a row of tokens."""
  config = model.Config(
    vocab=64,
    width=WIDTH,
    hidden=HIDDEN,
    num_experts=2 * GROUPS,
    top_k=2,
    layers=1,
    num_heads=2,
    weights_before_down_projection=True,
  )
  args = moe.expert_ffn_shapes(config, ROWS // 2, GROUPS)
  names = "mlpwi_0", "mlpwi_1"
  kept = kept_of(moe.ffn_of(config), *args, late=["experts"], names=names)
  # The weights of choices are made again of what is named, and products with them, too.
  assert kept == [((WIDTH,), "float32"), ((WIDTH,), "float32"), ((HIDDEN,), "float32")]


def test_late_weights_that_nothing_uses():
  weights = {"in": (GROUPS, WIDTH, HIDDEN), "out": (GROUPS, HIDDEN, WIDTH), "bias": (7,)}
  weights = {name: struct(shape, jnp.float32) for name, shape in weights.items()}
  args = struct((ROWS, WIDTH), jnp.float32), weights, SIZES
  assert len(kept_of(gated, *args, late="weights", names=["hidden"])) == 3
  assert kept_of(gated, *args, late="sizes", names=["hidden"]) == []


def test_of_what_is_made_of_nothing():
  """An equation without operands is no cast of anything."""

  def fun(rows, weights, sizes):
    return gated(rows, weights, sizes) * lax.empty((ROWS, WIDTH), jnp.float32)

  weights = {"in": (GROUPS, WIDTH, HIDDEN), "out": (GROUPS, HIDDEN, WIDTH)}
  weights = {name: struct(shape, jnp.float32) for name, shape in weights.items()}
  args = struct((ROWS, WIDTH), jnp.float32), weights, SIZES
  assert len(kept_of(fun, *args, late="weights", names=["hidden"])) == 3


def test_late_arguments_with_as_many_entries_as_rows_are_refused():
  """What their gradients are made of could be taken for rows."""

  def fun(rows, weights, sizes):
    hidden = checkpoint_name(lax.dot(rows, weights), "hidden")
    return jnp.where((jnp.arange(ROWS) < jnp.sum(sizes))[:, None], jnp.sin(hidden), 0)

  args = struct((ROWS, ROWS), jnp.bfloat16), struct((ROWS, 8), jnp.bfloat16), SIZES
  with pytest.raises(ValueError, match=r"bfloat16\[96,8\], must not have as many entries as there"):
    kept_of(fun, *args, late="weights", names=["hidden"])


@pytest.mark.parametrize(
  "function, expected",
  [
    (lambda x: x * 2 + 1, True),
    (lambda x: x * x[:, :1], False),  # The slice.
    (lambda x: jnp.where(x > 0, x, 0), True),
    (lambda x: x[:, 0][:, None] * x, False),
    (lambda x: jax.nn.relu(x), True),
    (lambda x: x @ x, False),
    (lambda x: jnp.cumsum(x, 0), False),
    (lambda x: x[::-1], False),
    (lambda x: x.reshape(8, 2, 4), True),
    (lambda x: x.reshape(4, 16), False),
  ],
)
def test_what_is_elementwise(function, expected):
  jaxpr = jax.make_jaxpr(function)(jnp.ones((8, 8)))
  equations = []

  def collect(jaxpr):
    for equation in jaxpr.eqns:
      inner = equation.params.get("jaxpr")
      collect(inner.jaxpr) if equation.primitive.name == "jit" else equations.append(equation)

  collect(jaxpr.jaxpr)
  assert all(map(is_elementwise, equations)) == expected


def test_what_results_of_loops_and_branches_are_made_of():
  def function(a, b, c, d):
    def turn(carry, x):
      one, two, three = carry
      return (one + x, two * one, three), (x, three)

    (one, two, three), (x, y) = lax.scan(turn, (a, b, c), d)
    chosen = lax.cond(a > 0, lambda b, c: (b, c), lambda b, c: (b + 1, jnp.zeros(())), b, c)
    return one, two, three, x, y, *chosen, jax.jit(lambda a, b: (b, a))(a, c)[0], jnp.ones(())

  jaxpr = jax.make_jaxpr(function)(1.0, 2.0, 3.0, jnp.ones(4)).jaxpr
  found = made_of(jaxpr)
  of_results = ["".join("abcd"[i] for i in sorted(found.get(x, ()))) for x in jaxpr.outvars[:-1]]
  assert of_results == ["ad", "abd", "c", "d", "c", "ab", "ac", "c"]
