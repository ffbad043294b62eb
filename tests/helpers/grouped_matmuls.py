"""Grouped matmuls of four ragged groups: stashed, as megablox has them, and their gradients."""

import jax
import jax.numpy as jnp

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, is_any_nan
from tests.helpers.support import ON_TPU

M, K, N, GROUPS = 256, 128, 256, 4
TILING = (128, 128, 128)
SIZES = jnp.array([50, 0, 71, 30], jnp.int32)


def operands(dtype=jnp.float32, groups=GROUPS, transpose_rhs=False):
  keys = jax.random.split(jax.random.key(0), 3)
  lhs = jax.random.normal(keys[0], (M, K)).astype(dtype)
  lhs = lhs.at[int(SIZES.sum()) :].set(jnp.nan)  # Padding.
  rhs = jax.random.normal(keys[1], (groups, N, K) if transpose_rhs else (groups, K, N)).astype(
    dtype
  )
  return lhs, rhs, jax.random.normal(keys[2], (M, N)).astype(dtype)


def rows_in_groups(offset=0, groups=GROUPS):
  first, last = int(SIZES[:offset].sum()), int(SIZES[: offset + groups].sum())
  return (jnp.arange(M) >= first) & (jnp.arange(M) < last)


def differentiate(multiply, operands, live):
  """Returns (out, d_lhs, d_rhs) for a cotangent that is NaN in padding, as no one should care."""
  lhs, rhs, d_out = operands

  def run(lhs, rhs, d_out):
    out, vjp, stash = jax.vjp(multiply, lhs, rhs, has_aux=True)
    return out, *vjp(jnp.where(live[:, None], d_out, 0)), stash

  out, d_lhs, d_rhs, stash = jax.jit(run)(lhs, rhs, d_out)
  return jnp.where(live[:, None], out, 0), d_lhs, d_rhs, stash


def plain(grouped_matmul):
  return lambda lhs, rhs: (grouped_matmul(lhs, rhs), None)


def stashed(capacity=200, dtype=jnp.float32, seals=1, **options):
  def multiply(lhs, rhs):
    stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((K,), dtype)])
    out, stash = ps.gmm(stash, lhs, rhs, SIZES, **options)
    for _ in range(seals):
      out = ps.seal(out, stash)
    return out, stash.stats()

  return multiply


def megablox(transpose_rhs=False, group_offset=None, dtype=jnp.float32):
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  return lambda lhs, rhs: gmm(
    lhs, rhs, SIZES, dtype, TILING, group_offset, None, transpose_rhs, not ON_TPU
  )


def assert_same(actual, expected, live):
  out, d_lhs, d_rhs, _ = actual
  assert_trees_equal(out, expected[0])
  assert_trees_equal(d_lhs[live], expected[1][live])
  assert_trees_equal(d_lhs[~live], jnp.zeros_like(d_lhs[~live]))
  assert_trees_equal(d_rhs, expected[2])
  assert not is_any_nan((d_lhs, d_rhs))
