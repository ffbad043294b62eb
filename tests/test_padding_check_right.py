"""`check_padding` passes code that is right, and says what it cannot tell."""

import functools

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from reference import moe
from tests.helpers.checks import long, once
from tests.helpers.padding import (
  assert_independent,
  depends,
  GROUPS,
  LIVE,
  mask,
  normal,
  project,
  RAGGED,
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
