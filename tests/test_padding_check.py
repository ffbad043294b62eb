"""`check_padding`: the classical mistakes are found where they are made, and right code passes."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from reference import moe
from tests.helpers.checks import long, once

ROWS, WIDTH, HIDDEN, GROUPS, TOKENS = 64, 8, 16, 4, 24
SAVE = jax.checkpoint_policies.save_only_these_names
SIZES = jnp.array([9, 0, 20, 3], jnp.int32)
RAGGED = ps.RaggedRows(SIZES, ROWS)
LIVE = (jnp.arange(ROWS) < 32)[:, None]


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


X, W, WO = (
  normal(0, ROWS, WIDTH),
  normal(1, GROUPS, WIDTH, HIDDEN),
  normal(2, GROUPS, HIDDEN, WIDTH),
)
TOKEN_ROWS, ROW_TOKENS = normal(3, TOKENS, WIDTH), jnp.arange(ROWS) % TOKENS


def mask(rows):
  return jnp.where(LIVE, rows, 0)


def project(rows, w, name="mlpwi_0"):
  return checkpoint_name(lax.ragged_dot(rows, w, SIZES), name)


def depends(fun, *args, ragged=RAGGED, **options):
  report = ps.check_padding(fun, ragged, *args, **options)
  assert report.depends, str(report)
  return report


def assert_independent(fun, *args, ragged=RAGGED, **options):
  report = ps.check_padding(fun, ragged, *args, **options)
  assert report == ps.PaddingReport(False), str(report)


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
  assert "test_padding_check.py" in report.source
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


# What is right.


def masked_mean(rows, w):
  return mask(project(mask(rows), w)).sum(0) / SIZES.sum()


def segment_sum(rows, w):
  group = jnp.searchsorted(jnp.cumsum(SIZES), jnp.arange(ROWS), side="right")
  hidden = mask(project(mask(rows), w))
  return jax.ops.segment_sum(jnp.where(LIVE, hidden, 0), group, num_segments=GROUPS)


def mlp(rows, w):
  normed = (rows - rows.mean(1, keepdims=True)) * lax.rsqrt(rows.var(1, keepdims=True) + 1e-6)
  return mask(jax.nn.gelu(normed @ w[0])).sum(0)


def gap_to_the_largest(rows, w):
  return mask(jnp.log1p(rows.max(1, keepdims=True) - rows) @ w[0])


def positive_rows(rows, w):
  return mask((rows * jnp.sqrt(jnp.exp(TOKEN_ROWS)[ROW_TOKENS])) @ w[0])


def zero_padding_is_relied_on(rows, w):
  hidden = jnp.tanh(mask(rows) @ w[0])
  return (hidden @ w[1].T).sum(0), hidden.max() - hidden.min()


def masked_softmax(rows, w):
  return jax.nn.softmax(jnp.where(LIVE, project(mask(rows), w), -jnp.inf), axis=0)


def rows_out(rows, w):
  return jnp.sin(rows @ w[0])  # What its caller makes of padding is the caller's business.


RIGHT = [
  *(masked_mean, segment_sum, mlp, gap_to_the_largest, positive_rows),
  *(zero_padding_is_relied_on, masked_softmax, rows_out),
]


@pytest.mark.parametrize("fun", [masked_mean, *map(once, RIGHT[1:])])
def test_right_code(fun):
  assert_independent(fun, X, W)


@pytest.mark.once
def test_arguments_of_any_kind():
  def fun(tree, count, flags, key):
    rows = mask(project(mask(tree["rows"]), tree["w"]))
    rows = jnp.where(flags[:, None], jnp.sin(rows), rows)
    noise = jax.random.normal(key, rows.shape)
    return {
      "rows": mask(rows + noise),
      "count": count + 1,
      "none": None,
      "any": flags.any(),
      "key": key,
    }

  tree = {"rows": X, "w": W, "none": None}
  args = jnp.int32(3), jnp.arange(ROWS) % 3 == 0, jax.random.key(3)
  assert_independent(fun, tree, *args)
  noisy = lambda tree, *args: (
    fun(tree, *args) | {"sum": jax.random.normal(args[2], (ROWS, 2)).sum()}
  )
  assert depends(noisy, tree, *args).result == "result['sum']"


def megablox(lhs, rhs, sizes):
  # A kernel: interpreted, what it leaves in padding is NaN or zero.
  return megablox_gmm(lhs, rhs, sizes, lhs.dtype, (8, 8, 8), None, None, False, True)


@pytest.mark.parametrize("grouped_matmul", [once(lax.ragged_dot), long(megablox)])
def test_the_reference_layer(grouped_matmul):
  """Half of its rows are other devices' choices, which hold real tokens."""
  experts, top_k = 2 * GROUPS, 2
  x = normal(5, ROWS // top_k, WIDTH)
  weights, expert_ids = lax.top_k(jax.nn.softmax(x @ normal(6, WIDTH, experts)), top_k)
  row_choices, choice_rows, sizes = moe.sort_rows(expert_ids, 0, GROUPS)
  ragged = ps.RaggedRows(sizes, ROWS)
  assert 8 < ragged.num_rows() < ROWS - 8
  matrices = {"wi_0": W, "wi_1": W / 2, "wo": WO}
  args = x, row_choices, choice_rows, weights, sizes, matrices
  fun = functools.partial(moe.expert_ffn, grouped_matmul=grouped_matmul)
  policy = SAVE("mlpwi_0", "mlpwi_1", "mlpwo")
  assert_independent(fun, *args, ragged=ragged, policy=policy)
  if grouped_matmul is lax.ragged_dot:
    assert_independent(jax.checkpoint(fun, policy=policy), *args, ragged=ragged)


def test_groups_with_gaps():
  ragged = ps.RaggedRows(jnp.array([9, 20]), ROWS, jnp.array([40, 3]))
  live = np.asarray(ragged.is_in_group())[:, None]
  assert_independent(lambda x, w: jnp.where(live, x @ w, 0).sum(0), X, W[0], ragged=ragged)
  depends(lambda x, w: jnp.where(LIVE, x @ w, 0).sum(0), X, W[0], ragged=ragged)


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: jax.jit(lambda x: ps.check_padding(masked_mean, RAGGED, x, W))(X), "outside of"),
    (lambda: ps.check_padding(masked_mean, RAGGED, jax.eval_shape(jnp.sin, X), W), "with arrays"),
    (lambda: ps.check_padding(masked_mean, SIZES, X, W), "must be RaggedRows"),
    (lambda: ps.check_padding(mask, ps.RaggedRows(jnp.array([65]), ROWS), X), "do not overlap"),
    (lambda: ps.check_padding(mask, ps.RaggedRows(jnp.array([64]), ROWS), X), "must have padding"),
    (lambda: ps.check_padding(lambda x: x.argmax(), RAGGED, X), "floating-point dtype"),
    (lambda: ps.check_padding(lambda n: n * 1.0, RAGGED, SIZES), "floating-point dtype"),
    (lambda: ps.check_padding(lambda x: 2 * x, RAGGED, X), "No residual has"),
  ],
)
def test_where_nothing_can_be_told(call, message):
  with pytest.raises(ValueError, match=message):
    call()
