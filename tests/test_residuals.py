"""What becomes of each residual, and what a user is told of it."""

import functools
import inspect
import pydoc
import re

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, once

ROWS, WIDTH = 8, 4
SAVE = jax.checkpoint_policies.save_only_these_names
RAGGED = ps.RaggedRows(jnp.array([5], jnp.int32), ROWS)
X = jnp.where(jnp.arange(ROWS)[:, None] < 5, jax.random.normal(jax.random.key(0), (ROWS, WIDTH)), 0)
W = jnp.eye(WIDTH) + 0.5


def gradients_of(fun, *args, policy=None, capacity=16, **kwargs):
  """The value and gradients of the sum of `fun`'s rows with a stash, and of `fun` alone."""
  f = ps.checkpoint(fun, policy=policy)
  total = lambda out: jnp.sum(jnp.where(jnp.arange(ROWS)[:, None] < 5, out, 0))

  def with_stash(*args):
    stash = ps.Stash.empty(capacity, f.residuals(RAGGED, *args, **kwargs))
    return total(ps.seal(*f(stash, RAGGED, *args, **kwargs)))

  floats = [i for i, arg in enumerate(args) if jnp.issubdtype(jnp.result_type(arg), jnp.floating)]
  plain = lambda *args: total(fun(*args, **kwargs))
  value_and_grad = lambda fun: jax.jit(jax.value_and_grad(fun, floats))(*args)
  return value_and_grad(with_stash), value_and_grad(plain)


assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


def explained(fun, *args, policy=None, **kwargs):
  """Returns each residual that `explain` tells of as (name or operation, kind, reason)."""
  explanation = ps.checkpoint(fun, policy=policy).explain(RAGGED, *args, **kwargs)
  return {(r.name or r.operation, r.kind, r.reason) for r in explanation.residuals}


# What is stashed.


def test_kinds_and_reasons():
  scales = jnp.arange(WIDTH, dtype=jnp.float32)

  def fun(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    named = checkpoint_name(x, "input")
    per_row = checkpoint_name(jnp.sum(hidden**2, axis=1), "per_row")
    buckets = checkpoint_name(jnp.sin(hidden).reshape(2, ROWS // 2, WIDTH), "buckets")
    odd = checkpoint_name(jnp.exp(w[:3]), "odd")
    ids = checkpoint_name(jnp.argmax(hidden, axis=1), "ids")
    rows = jnp.exp(buckets).reshape(ROWS, WIDTH) * jnp.sin(named) * scales
    return rows * per_row[:, None] ** 2 * jnp.sum(odd**2) * jnp.take(scales, ids)[:, None]

  names = "hidden", "input", "per_row", "buckets", "odd", "ids"
  assert explained(fun, X, W, policy=SAVE(*names)) >= {
    ("hidden", "stashed", None),
    ("input", "argument", "is named, but an argument"),
    ("args[1]", "argument", "is an argument"),
    ("constant", "constant", "is a constant of the program"),
    ("per_row", "ordinary", "has 1 axis: reshape to [8, 1]"),
    ("buckets", "ordinary", "has 3 axes: reshape to [8, 4]"),
    ("odd", "ordinary", "has not total_rows=8 rows"),
    ("ids", "ordinary", "has no floating-point dtype with NaN, to come back in as a cotangent"),
  }


def test_an_explanation_is_a_table():
  def fun(x, w):
    return jnp.sin(checkpoint_name(x @ w, "hidden"))

  explanation = ps.checkpoint(fun, policy=SAVE("hidden")).explain(RAGGED, X, W)
  first_line = inspect.getsourcelines(fun)[1]
  (hidden,) = [r for r in explanation.residuals if r.kind == "stashed"]
  assert (hidden.shape, hidden.dtype, hidden.num_bytes) == ((ROWS, WIDTH), jnp.float32, 128)
  assert f"test_residuals.py:{first_line + 1}" in hidden.source
  lines = str(explanation).splitlines()
  header = "residual made by shape dtype MB kept as because it line"
  assert lines[0].split() == header.split()
  row = r"^hidden +dot_general +\[8, 4\] +float32 +0\.000 +stashed +- +test_residuals.py:\d+"
  assert re.search(row, str(explanation), re.MULTILINE)
  assert "Kept beside them for every layer: 0.000 MB of ordinary" in lines[-1]
  assert "saves pallas_stash.SLOT_NAME" in lines[-1]


def test_an_explanation_names_what_the_policy_does_not_save():
  def fun(x, w):
    return jnp.sin(checkpoint_name(jnp.exp(checkpoint_name(x @ w, "hidden")), "exponential"))

  explain = lambda *names: str(ps.checkpoint(fun, policy=SAVE(*names)).explain(RAGGED, X, W))
  assert "Named and not kept: 'exponential'." in explain("hidden", "exponentail")
  assert "not kept" not in explain("hidden", "exponential")


def test_bytes_that_a_layer_keeps_without_a_checkpoint_around_it():
  x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2**18, 2048), (2048, 1000)))
  ragged = ps.RaggedRows(jax.ShapeDtypeStruct((8,), jnp.int32), 2**18)
  f = ps.checkpoint(lambda x, w: jnp.sin(x @ w))
  text = str(f.explain(ragged, x, w))
  assert f"Stashed: {2**18 * 1000 * 2 / 1e6:,.3f} MB at worst case" in text
  assert f"and {(2**18 * 2048 + 2048 * 1000) * 2 / 1e6:,.3f} MB of arguments" in text


def test_a_constant_of_that_shape_is_not_stashed():
  """It is part of the program: in a stash every layer would keep a copy."""
  table = jnp.arange(ROWS * WIDTH, dtype=jnp.float32).reshape(ROWS, WIDTH)
  fun = lambda x, w: jnp.sin(x @ w) * table
  assert len(ps.checkpoint(fun).residuals(RAGGED, X, W)) == 1
  jax.tree.map(assert_close, *gradients_of(fun, X, W))


def test_a_value_that_is_needed_twice_is_stashed_once():
  def fun(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    return jnp.sin(hidden) * jnp.exp(checkpoint_name(hidden, "again"))

  policy = SAVE("hidden", "again")
  assert len(ps.checkpoint(fun, policy=policy).residuals(RAGGED, X, W)) <= 2
  jax.tree.map(assert_close, *gradients_of(fun, X, W, policy=policy))


@pytest.mark.parametrize(
  "call", [jax.jit, jax.checkpoint, jax.named_call], ids=["jit", "remat", "named"]
)
def test_names_are_found_in_what_is_called(call):
  if call is jax.checkpoint:
    call = functools.partial(jax.checkpoint, policy=SAVE("hidden"))

  @call
  def inner(x, w):
    return jnp.sin(checkpoint_name(x @ w, "hidden"))

  fun = lambda x, w: inner(x, w) * 2
  assert ("hidden", "stashed", None) in explained(fun, X, W, policy=SAVE("hidden"))
  jax.tree.map(assert_close, *gradients_of(fun, X, W, policy=SAVE("hidden")))


def test_what_the_policy_offloads_stays_an_ordinary_residual():
  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["g"],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
  )

  def fun(x, w):
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "h")), "g"))

  assert {("g", "stashed", None), ("h", "ordinary", "is offloaded by the policy")} <= explained(
    fun, X, W, policy=policy
  )
  jax.tree.map(assert_close, *gradients_of(fun, X, W, policy=policy))


FLOAT8 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"


@pytest.mark.parametrize("dtype", [FLOAT8[0], *map(once, FLOAT8[1:])])
@pytest.mark.parametrize("capacity", [0, 16])
def test_float8_values_with_a_name_come_through(dtype, capacity):
  """Whatever values they have: the largest, the smallest, and those between."""
  dtype = jnp.dtype(dtype)
  bits = np.arange(256, dtype=np.uint8).view(dtype)
  values = bits[np.isfinite(bits.astype(np.float32))].astype(np.float32)
  x = jnp.zeros((ROWS, 256)).at[:5, : len(values)].set(values)

  def fun(x, w):
    quantised = checkpoint_name(x.astype(dtype), "quantised").astype(jnp.float32)
    return jnp.where(jnp.arange(ROWS)[:, None] < 5, quantised, 0) * w

  w = jnp.ones(256)
  stashed, plain = gradients_of(fun, x, w, policy=SAVE("quantised"), capacity=capacity and 32)
  assert_trees_equal(stashed[1][1], plain[1][1])  # Of w: five times each value.
  assert_trees_equal(stashed[0], plain[0])


# What a user is told.


def test_names_that_no_policy_saves_are_in_the_error():
  fun = lambda x, w: jnp.sin(checkpoint_name(jax.jit(lambda x: x @ w)(x), "mlpwi_0"))
  f = ps.checkpoint(fun, policy=SAVE("mlpwi0"))
  with pytest.raises(ValueError, match=r"Names in .*: 'mlpwi_0'; does the policy save them\?"):
    f.residuals(RAGGED, X, W)


def test_a_named_residual_of_another_shape_is_a_warning():
  def fun(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    buckets = checkpoint_name(jnp.sin(hidden).reshape(2, ROWS // 2, WIDTH), "buckets")
    return jnp.exp(buckets).reshape(ROWS, WIDTH)

  policy = SAVE("hidden", "buckets")
  message = r"buckets float32\[2, 4, 4\] is named in the policy, and not stashed: it has 3 axes: "
  with pytest.warns(UserWarning, match=message + r"reshape to \[8, 4\]"):
    gradients_of(fun, X, W, policy=policy)


def experts(x, w, *, scale=1.0):
  """Some experts."""
  return jnp.sin(jnp.sin(x @ w)) * scale


def test_keyword_arguments():
  jax.tree.map(assert_close, *gradients_of(experts, X, W, scale=jnp.float32(2.0)))
  jax.tree.map(assert_close, *gradients_of(experts, X, W, scale=2.0))
  f = ps.checkpoint(experts)
  specs = f.residuals(RAGGED, w=W, x=X)
  loss = lambda w: jnp.sum(ps.seal(*f(ps.Stash.empty(8, specs), RAGGED, w=w, x=X))[:5])
  assert_close(jax.jit(jax.grad(loss))(W), jax.grad(lambda w: jnp.sum(experts(X, w)[:5]))(W))


def test_a_function_may_have_arguments_of_these_names():
  f = ps.checkpoint(lambda x, stash: jnp.sin(x @ stash))
  assert list(inspect.signature(f).parameters) == ["stash_", "ragged", "x", "stash"]
  assert f.residuals(RAGGED, X, stash=W)


def test_signature_and_help():
  f = ps.checkpoint(experts)
  parameters = inspect.signature(f).parameters
  assert list(parameters) == ["stash", "ragged", "x", "w", "scale"]
  assert parameters["scale"].default == 1.0
  assert (f.__name__, f.__wrapped__) == ("experts", experts)
  assert isinstance(f, ps.StashedFunction) and repr(f).startswith("checkpoint(<function experts")
  page = pydoc.render_doc(f, renderer=pydoc.plaintext)
  assert "out, stash = f(stash, ragged, *args, **kwargs)" in page and "explain(" in page
  assert list(inspect.signature(ps.checkpoint(functools.partial(experts, X))).parameters) == [
    *("stash", "ragged", "w", "scale")
  ]


@pytest.mark.parametrize(
  "args, kwargs, message",
  [
    ((X, "silu"), {}, r"The arguments args\[1\]='silu' must be arrays: bind what is static"),
    ((X, W), {"scale": {"a": "b"}}, r"The arguments scale\['a'\]='b' must be arrays"),
    ((X, W, True), {}, r"perhaps of args\[2\]=True: bind what is static before `checkpoint`"),
    ((X, W), {"is_scaled": True}, "perhaps of is_scaled=True: bind what is static"),
  ],
)
def test_static_arguments_are_refused(args, kwargs, message):
  def fun(x, w, is_scaled=False, *, scale=None):
    return jnp.sin(x @ w) * 2 if is_scaled else jnp.sin(x @ w)

  f = ps.checkpoint(fun)
  for use in (
    lambda: f.residuals(RAGGED, *args, **kwargs),
    lambda: f(
      ps.Stash.empty(8, [jax.ShapeDtypeStruct((4,), jnp.float32)]), RAGGED, *args, **kwargs
    ),
  ):
    with pytest.raises(ValueError, match=message):
      use()
