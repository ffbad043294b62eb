"""Rows as an int: the groups are those of the function's own argument `group_sizes`."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal

ROWS, WIDTH = 24, 4
SIZES = np.array([5, 0, 8], np.int32)
RAGGED = ps.RaggedRows(SIZES, ROWS)
SAVE = jax.checkpoint_policies.save_only_these_names("hidden")


def experts(rows, weights, group_sizes):
  hidden = checkpoint_name(jax.lax.ragged_dot(rows, weights, group_sizes), "hidden")
  return jnp.where((jnp.arange(ROWS) < group_sizes.sum())[:, None], jnp.tanh(hidden), 0)


def arguments():
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
  return rows, rng.normal(size=(3, WIDTH, WIDTH)).astype(np.float32)


F = ps.checkpoint(experts, policy=SAVE)


@functools.partial(jax.jit, static_argnames=("is_int", "by_keyword"))
def gradients(rows, weights, sizes, is_int, by_keyword=False):
  def loss(rows, weights):
    ragged = ROWS if is_int else ps.RaggedRows(sizes, ROWS)
    args, kwargs = ((), {"group_sizes": sizes}) if by_keyword else ((sizes,), {})
    stash = ps.Stash.empty(16, F.residuals(ragged, rows, weights, *args, **kwargs))
    out, stash = F(stash, ragged, rows, weights, *args, **kwargs)
    return jnp.sum(ps.seal(out, stash) ** 2), stash.stats()

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(rows, weights)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_is_that_with_ragged_rows(by_keyword):
  actual = gradients(*arguments(), SIZES, True, by_keyword)
  assert_trees_equal(actual, gradients(*arguments(), SIZES, False))
  (_, stats), (_, d_weights) = actual
  assert int(stats.peak_rows[0]) == 16 and np.any(d_weights)


def test_residuals_and_explain():
  args = *arguments(), SIZES
  assert F.residuals(ROWS, *args) == F.residuals(RAGGED, *args)
  assert str(F.explain(np.int64(ROWS), *args)) == str(F.explain(RAGGED, *args))
  bound = ps.checkpoint(functools.partial(experts, group_sizes=SIZES), policy=SAVE)
  assert bound.residuals(ROWS, *args[:2]) == F.residuals(RAGGED, *args)


def test_check_padding():
  report = ps.check_padding(experts, ROWS, *arguments(), SIZES, policy=SAVE)
  assert report == ps.check_padding(experts, RAGGED, *arguments(), SIZES, policy=SAVE)


@pytest.mark.parametrize(
  "fun, ragged, message",
  [
    (lambda rows, weights, sizes: rows, ROWS, "24 rows .* no parameter named group_sizes"),
    (experts, 24.0, "24.0, must be RaggedRows, or an int"),
    (experts, True, "True, must be RaggedRows, or an int"),
    (experts, 0, "total_rows=0 must be positive"),
  ],
)
def test_errors(fun, ragged, message):
  f = ps.checkpoint(fun)
  for call in (
    f.residuals,
    f.explain,
    functools.partial(f, ps.Stash.empty(8, F.residuals(RAGGED, *arguments(), SIZES))),
  ):
    with pytest.raises(ValueError, match=message):
      call(ragged, *arguments(), SIZES)
