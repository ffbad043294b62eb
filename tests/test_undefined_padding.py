"""`checkpoint(..., padding="undefined")`: rows come back as ever, and what it is safe for."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long
from tests.helpers.support import IMPLEMENTATIONS

ROWS, WIDTH, HIDDEN, GROUPS = 64, 8, 16, 4
SIZES = jnp.array([9, 0, 20, 3], jnp.int32)
RAGGED = ps.RaggedRows(SIZES, ROWS)
IN_GROUPS = np.arange(ROWS) < 32
POLICY = jax.checkpoint_policies.save_only_these_names("hidden")
CAPACITIES = {"ample": ROWS, "none": 0}


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


ROWS_IN, ROW_WEIGHTS = normal(0, ROWS, WIDTH), normal(1, ROWS)
WEIGHTS = {"up": normal(2, GROUPS, WIDTH, HIDDEN), "down": normal(3, GROUPS, HIDDEN, WIDTH)}


def mask(rows):
  return jnp.where(IN_GROUPS.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def experts(rows, weights):
  project = lambda rows, name: mask(lax.ragged_dot(mask(rows), weights[name], SIZES))
  hidden = checkpoint_name(project(rows, "up"), "hidden")
  return project(jax.nn.silu(hidden), "down")


def weighted(rows, row_weights, weights, select):
  project = lambda rows, name: mask(lax.ragged_dot(mask(rows), weights[name], SIZES))
  hidden = select(checkpoint_name(project(rows, "up"), "hidden"))
  return project(jax.nn.silu(hidden) * row_weights[:, None], "down")


def gradients(padding, implementation, capacity):
  f = ps.checkpoint(experts, policy=POLICY, padding=padding, implementation=implementation)

  @jax.jit
  def run(rows, weights):
    def loss(*args):
      out, stash = f(ps.Stash.empty(capacity, f.residuals(RAGGED, *args)), RAGGED, *args)
      return jnp.sum(jnp.sin(ps.seal(out, stash))), stash.stats().overflowed_pushes

    return jax.grad(loss, (0, 1), has_aux=True)(rows, weights)

  return run(ROWS_IN, WEIGHTS)


@pytest.mark.parametrize("capacity", CAPACITIES.values(), ids=CAPACITIES)
@pytest.mark.parametrize(
  "implementation", [i if i != "mosaic_interpret" else long(i) for i in IMPLEMENTATIONS]
)
def test_gradients_are_those_of_zero_padding(implementation, capacity):
  of_zero, of_undefined = (gradients(p, implementation, capacity) for p in ("zero", "undefined"))
  assert_trees_equal(of_undefined, of_zero)
  assert (of_zero[1] == 0) == (capacity > 0)


def test_padding_is_nan_in_debug():
  """What the backward pass reads there: rows come back, and all else is NaN."""
  square = lambda rows: jnp.square(checkpoint_name(2 * rows, "hidden"))
  for padding in "zero", "undefined":
    f = ps.checkpoint(square, policy=POLICY, padding=padding)

    def loss(rows, f=f):
      stash = ps.Stash.empty(ROWS, f.residuals(RAGGED, rows))
      return jnp.sum(ps.seal(*f(stash, RAGGED, rows)))

    with ps.debug():
      gradient = jax.jit(jax.grad(loss))(ROWS_IN)
    np.testing.assert_array_equal(gradient[IN_GROUPS], (8 * ROWS_IN)[IN_GROUPS])
    of_padding = gradient[~IN_GROUPS]
    assert jnp.isnan(of_padding).all() if padding == "undefined" else (of_padding == 0).all()


@pytest.mark.once
@pytest.mark.skipif(
  "mosaic_interpret" not in IMPLEMENTATIONS, reason="a chip's memory holds anything"
)
def test_padding_is_not_written():
  """Interpreted, memory that was never written is NaN."""
  rows = normal(4, 16 * ROWS, 128)
  ragged = ps.RaggedRows(SIZES, rows.shape[0])
  square = lambda rows: jnp.square(checkpoint_name(2 * rows, "hidden"))
  options = {"policy": POLICY, "implementation": "mosaic_interpret"}
  f = ps.checkpoint(square, padding="undefined", **options)

  def loss(rows):
    stash = ps.Stash.empty(ROWS, f.residuals(ragged, rows))
    return jnp.sum(ps.seal(*f(stash, ragged, rows)))

  gradient = jax.jit(jax.grad(loss))(rows)
  np.testing.assert_array_equal(gradient[:32], 8 * rows[:32])
  assert jnp.isnan(gradient[ROWS:]).all()


check = functools.partial(ps.check_padding, policy=POLICY, padding="undefined")


def test_what_selects_rows_backward_is_safe():
  assert not check(experts, RAGGED, ROWS_IN, WEIGHTS).depends
  select = functools.partial(weighted, select=mask)
  assert not check(select, RAGGED, ROWS_IN, ROW_WEIGHTS, WEIGHTS).depends


def test_what_multiplies_padding_by_zero_is_not():
  """The gradient of a row's weight, where the row was gathered and is no padding to its token."""
  product = functools.partial(weighted, select=lambda rows: rows)
  args = RAGGED, ROWS_IN, ROW_WEIGHTS, WEIGHTS
  assert not ps.check_padding(product, *args, policy=POLICY).depends
  report = check(product, *args)
  assert (report.intermediate, report.result) == ("hidden", "the gradient of argument[1]")
  assert str(report).startswith("the gradient of argument[1] changes with NaN, as it comes back")


def test_what_asks_for_the_sign_is_not():
  """NaN has none: only a number shows it."""

  def fun(rows, w):
    hidden = checkpoint_name(mask(rows) @ w, "hidden")
    return jnp.sum(jnp.sqrt(1 + jnp.max(jnp.where(hidden > 0, hidden, 0), axis=0)))

  args = RAGGED, ROWS_IN, WEIGHTS["up"][0]
  assert not ps.check_padding(fun, *args, policy=POLICY).depends
  assert check(fun, *args).cause.startswith("a large number")


def test_unknown_padding_is_refused():
  for call in (
    lambda: ps.checkpoint(experts, padding="any"),
    lambda: ps.check_padding(experts, RAGGED, ROWS_IN, WEIGHTS, padding="any"),
  ):
    with pytest.raises(ValueError, match="padding='any' must be one of"):
      call()
