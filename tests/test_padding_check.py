"""`check_padding` finds the classical mistakes where they are made."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from tests.helpers.checks import once
from tests.helpers.padding import (
  assert_independent,
  depends,
  LIVE,
  mask,
  normal,
  project,
  ROW_TOKENS,
  ROWS,
  SAVE,
  SIZES,
  TOKEN_ROWS,
  W,
  WIDTH,
  WO,
  X,
)


@jax.custom_vjp
def matmul_with_unmasked_backward(rows, w):
  return mask(project(mask(rows), w))


def _unmasked_backward(saved, d_out):
  rows, w = saved
  hidden = project(rows, w, "mlpwi_0_again")
  return mask(d_out @ w[0].T), w * jnp.sum(hidden * d_out[:1])


matmul_with_unmasked_backward.defvjp(
  lambda rows, w: (matmul_with_unmasked_backward(rows, w), (mask(rows), w)), _unmasked_backward
)


MISTAKES = {
  "sum of unmasked rows": (lambda h: h.sum(0), "result"),
  "mean over the worst case": (lambda h: jnp.tanh(h).mean(0), "result"),
  "mask by multiplication": (lambda h: (h * LIVE).sum(0), "result"),
  "max over rows": (lambda h: h.max(0), "result"),
  "argmax over rows": (lambda h: (mask(h).sum(0), h.argmax(0)), "result[1]"),
  "softmax over rows": (lambda h: mask(jax.nn.softmax(h, axis=0)), "result"),
  "layer norm across rows": (lambda h: mask(h - h.mean(0)) / jnp.std(h, 0), "result"),
  "auxiliary result": (lambda h: {"y": mask(h), "aux": jnp.isnan(h).any()}, "result['aux']"),
}


# One with every jax, that only zero times NaN shows.
@pytest.mark.parametrize(
  "mistake", [m if m == "mask by multiplication" else once(m) for m in MISTAKES]
)
def test_mistakes_behind_a_grouped_matmul(mistake):
  combine, result = MISTAKES[mistake]
  report = depends(lambda rows, w: combine(project(mask(rows), w)), X, W)
  assert (report.intermediate, report.result) == ("mlpwi_0", result)
  assert "padding.py" in report.source
  assert f"{result} changes with" in str(report) and "padding of mlpwi_0" in str(report)


def test_a_mask_that_backward_forgot():
  report = depends(matmul_with_unmasked_backward, X, W)
  assert report.intermediate == "mlpwi_0_again"
  assert report.result == "the gradient of argument[1]"


def test_nan_in_padding_times_zero():
  """The cotangent is zero in padding; what the matmul returned there may be NaN."""

  def fun(rows, w, wo):
    hidden = project(mask(rows), w)
    return mask(jnp.tanh(hidden) @ wo[0])

  report = depends(fun, X, W, WO)
  assert (report.intermediate, report.cause) == ("mlpwi_0", "NaN")
  assert report.result == "the gradient of argument[2]"
  # The cotangent meets what was recomputed.
  assert depends(jax.checkpoint(fun), X, W, WO).intermediate == "mlpwi_0"
  # An ordinary matmul of finite rows is finite: zero times that is zero.
  finite = lambda rows, w, wo: mask(jnp.tanh(rows @ w[0]) @ wo[0])
  assert_independent(finite, X, W, WO)
  report = depends(finite, jnp.where(LIVE, X, jnp.nan), W, WO)
  assert report.intermediate == "argument[0], float32[64, 8]"


def test_rows_that_were_read_from_a_stash():
  """Their padding is zero, whatever is done with it; or undefined, and then NaN."""

  def fun(rows, padding):
    rows = ps.dynamic_slice(rows, (3, 0), (ROWS, WIDTH), group_sizes=SIZES, padding=padding)
    return jnp.sum(jnp.sin(rows) * 0)

  stash_rows = normal(4, ROWS + 1, WIDTH)
  assert_independent(functools.partial(fun, padding="zero"), stash_rows)
  report = depends(functools.partial(fun, padding="undefined"), stash_rows)
  assert (report.intermediate, report.cause) == (f"stash_expand -> float32[{ROWS}, {WIDTH}]", "NaN")


@pytest.mark.parametrize(
  "get_rows", [lambda t: t[ROW_TOKENS], lambda t: jnp.resize(t, (ROWS, WIDTH))]
)
def test_rows_of_real_tokens_in_padding(get_rows):
  """Padding of what is gathered holds real tokens, of any number: here it counts them."""
  product = lambda tokens, w: checkpoint_name(get_rows(tokens) @ w[0], "product")
  report = depends(lambda *args: jnp.tanh(product(*args)).mean(0), TOKEN_ROWS, W)
  assert report.result == "result" and "float32[64, 8]" in report.intermediate
  report = depends(
    lambda t, w: checkpoint_name(2 * get_rows(t), "rows").sum(0) @ w[0], TOKEN_ROWS, W
  )
  assert report.intermediate == "rows"


def test_tokens_that_have_as_many_rows_by_coincidence():
  """What has `total_rows` rows and is not ragged comes back from the stash without its end."""

  def fun(tokens, w):
    hidden = checkpoint_name(jnp.tanh(tokens.reshape(ROWS, WIDTH)), "token_states")
    return mask(hidden[ROW_TOKENS]), (hidden @ w[0]).sum()

  report = depends(fun, normal(4, ROWS // 2, 2 * WIDTH), W, policy=SAVE("token_states"))
  assert (report.intermediate, report.result) == ("token_states", "result[1]")


@pytest.mark.once
def test_a_residual_that_is_filled_with_one():
  """Right as it stands, and with poison; not with the zero that comes back from a stash."""

  def fun(rows, w):
    hidden = jnp.where(LIVE, 1 + jnp.tanh(project(mask(rows), w)) / 4, 1)
    return jnp.prod(checkpoint_name(hidden, "factors"), axis=0)

  assert_independent(fun, X, W, policy=SAVE("mlpwi_0"))
  report = depends(fun, X, W, policy=SAVE("mlpwi_0", "factors"))
  assert report.intermediate == "factors" and "test_padding_check.py" in report.source
  assert report.result == "the gradient of argument[0]" and report.cause.startswith("zero")


@pytest.mark.once
def test_several_intermediates_together():
  """Neither alone: the lesser of two maxima counts."""

  def fun(rows, w):
    first, second = project(mask(rows), w, "first"), project(mask(rows), w, "second")
    largest = lambda rows: jnp.where(jnp.isnan(rows), 1e9, rows).max(0)
    return jnp.minimum(largest(first), largest(second))

  report = depends(fun, X, W)
  assert report.intermediate is report.source is None and "several" in str(report)
