"""The reference MoE layer: by hand-written cases, dense sums and planted NaN."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import model, moe
from tests.helpers.checks import long
from tests.helpers.reference_model import (
  assert_close,
  assert_trees,
  dense_block,
  mesh_of,
  params_of,
  sharded_block,
)

pytestmark = pytest.mark.once


def test_route():
  logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0], [5.0, 1.0, 1.0, 3.0]]))
  config = model.Config(vocab=1, width=4, hidden=1, num_experts=4, top_k=2, layers=1)
  expert_ids, weights = moe.route(logits, jnp.eye(4), config)
  assert expert_ids.dtype == jnp.int32
  np.testing.assert_array_equal(expert_ids, [[1, 2], [0, 3]])
  assert_close(weights, [[4 / 6, 2 / 6], [5 / 8, 3 / 8]])


def test_sort_rows():
  expert_ids = jnp.array([[0, 3], [2, 1], [3, 2]], jnp.int32)
  row_choices, choice_rows, group_sizes = moe.sort_rows(expert_ids, 2, 2)
  np.testing.assert_array_equal(group_sizes, [2, 2])
  np.testing.assert_array_equal(row_choices, [2, 5, 1, 4, 0, 3])
  np.testing.assert_array_equal(choice_rows, [[4, 2], [0, 5], [3, 1]])
  # Fewer experts than choices.
  row_choices, choice_rows, group_sizes = moe.sort_rows(expert_ids, 3, 1)
  np.testing.assert_array_equal(group_sizes, [2])
  np.testing.assert_array_equal(row_choices, [1, 4, 0])
  np.testing.assert_array_equal(choice_rows, [[2, 0], [3, 4], [1, 5]])


BLOCK = model.Config(vocab=1, width=32, hidden=16, num_experts=8, top_k=3, layers=1)


def gradient_of_block(block, config):
  """Returns ((y, state, group_sizes), gradients) of a block."""
  params = jax.tree.map(lambda stacked: stacked[0], params_of(config)["layers"]["moe"])
  x, cotangent = jax.random.normal(jax.random.key(1), (2, 4, 8, 32))

  def run(x, params, state):
    y, state, group_sizes = block(x, params, state, config=config, ffn=None)
    return jnp.vdot(y, cotangent), (y, state, group_sizes.reshape(-1, config.num_experts).sum(0))

  gradient = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(x, params, None)
  return gradient[::-1]


@functools.cache
def gradient_of_dense_block(config):
  return gradient_of_block(dense_block, config)


@pytest.mark.parametrize(
  "mesh_shape, num_experts, is_before",
  [
    ((1, 4), 4, False),  # Fewer experts on a device than choices.
    ((2, 2), 8, True),
    *(long((1, experts), 8, False) for experts in (1, 2)),
    long((4, 1), 4, True),
    # The other order, and the other number of experts.
    *(long(*case) for case in [((1, 4), 4, True), ((2, 2), 8, False), ((1, 1), 8, True)]),
    *(long(*case, False) for case in [((1, 1), 4), ((1, 2), 4), ((1, 4), 8), ((2, 2), 4)]),
    *(long(*case, True) for case in [((1, 4), 8), ((1, 2), 4)]),
  ],
)
def test_moe_block_is_the_dense_sum(mesh_shape, num_experts, is_before):
  config = dataclasses.replace(BLOCK, num_experts=num_experts)
  expected = gradient_of_dense_block(config)
  fsdp_axis = "data" if mesh_shape[0] > 1 else None
  config = dataclasses.replace(
    config, fsdp_axis=fsdp_axis, weights_before_down_projection=is_before
  )
  block = functools.partial(sharded_block, mesh_of(*mesh_shape), True)
  actual = gradient_of_block(block, config)
  assert_trees(assert_close, actual, expected)
  assert actual[0][2].sum() == 4 * 8 * config.top_k


def poison_padding(rows, group_sizes):
  live = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
  return jnp.where(live[:, None], rows, jnp.nan)


@jax.custom_vjp
def poisoned_matmul(lhs, rhs, group_sizes):
  """`ragged_dot` with padding as a kernel may leave it: NaN in the result and in dlhs."""
  return poison_padding(lax.ragged_dot(lhs, rhs, group_sizes), group_sizes)


def _poisoned_forward(lhs, rhs, group_sizes):
  return poisoned_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _poisoned_backward(saved, d_out):
  lhs, rhs, group_sizes = saved
  _, vjp = jax.vjp(lambda lhs, rhs: lax.ragged_dot(lhs, rhs, group_sizes), lhs, rhs)
  d_lhs, d_rhs = vjp(d_out)
  return poison_padding(d_lhs, group_sizes), d_rhs, None


poisoned_matmul.defvjp(_poisoned_forward, _poisoned_backward)


@pytest.mark.parametrize(
  "dtype, is_before",
  [
    (jnp.float32, False),
    (jnp.bfloat16, True),
    *(long(*case) for case in [(jnp.float32, True), (jnp.bfloat16, False)]),
  ],
)
def test_padding_is_never_read(dtype, is_before):
  total_rows = 24
  rng = np.random.default_rng(0)
  tokens, wi_0, wi_1, wo = (
    jnp.asarray(rng.normal(size=shape), dtype)
    for shape in [(10, 32), (3, 32, 16), (3, 32, 16), (3, 16, 32)]
  )
  experts = {"wi_0": wi_0, "wi_1": wi_1, "wo": wo}
  row_choices = rng.permutation(27)[:total_rows]  # Of all tokens but the last.
  choice_rows = rng.integers(0, 30, (10, 3))
  weights = rng.random((10, 3), np.float32)

  def run(grouped_matmul, group_sizes, tokens, row_choices):
    def ffn(tokens, weights, experts):
      args = (tokens, row_choices, choice_rows, weights, group_sizes, experts)
      order = dict(weights_before_down_projection=is_before)
      return moe.expert_ffn(*args, grouped_matmul=grouped_matmul, **order)

    out, vjp = jax.vjp(ffn, tokens, weights, experts)
    return out, vjp(jnp.cos(jnp.arange(320.0)).reshape(10, 32).astype(dtype))

  run = jax.jit(run, static_argnums=0)
  for group_sizes in np.array([[5, 0, 3], [0, 0, 0], [16, 8, 0]], np.int32):
    padding = np.arange(total_rows) >= group_sizes.sum()
    clean = run(lax.ragged_dot, group_sizes, tokens, row_choices)
    poisoned = run(
      poisoned_matmul,
      group_sizes,
      tokens.at[9].set(jnp.nan),  # a token that only padding refers to
      jnp.where(padding, 28, row_choices),
    )
    assert_trees(np.testing.assert_array_equal, poisoned, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
