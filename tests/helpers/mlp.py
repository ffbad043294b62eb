"""Expert MLPs of four ragged groups: stashed, of plain matmuls, and their gradients."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from pallas_stash.grouped_mlp import silu_and_multiply
from pallas_stash.kernels.activation import wide
from tests.helpers.checks import assert_trees_equal

M, WIDTH, HIDDEN, OUT, GROUPS = 256, 128, 256, 384, 4
TILING = (64, 128, 128)
SIZES = jnp.array([50, 0, 71, 30], jnp.int32)
ROWS = 151
LIVE = jnp.arange(M) < ROWS


def biased(gate, up, gate_bias, up_bias):
  return silu_and_multiply(gate + gate_bias, up + up_bias)


def operands(dtype=jnp.float32):
  """Returns (x, w_gate, w_up, w_down, row_weights, gate_bias, up_bias), and the gradient of out."""
  keys = iter(jax.random.split(jax.random.key(0), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  x = jnp.where(LIVE[:, None], normal(M, WIDTH), jnp.nan)
  matrices = (
    normal(GROUPS, WIDTH, HIDDEN),
    normal(GROUPS, WIDTH, HIDDEN),
    normal(GROUPS, HIDDEN, OUT),
  )
  of_rows = x, *(matrix / 12 for matrix in matrices)
  beside = jnp.where(LIVE, normal(M), jnp.nan), normal(GROUPS, HIDDEN), normal(GROUPS, HIDDEN)
  d_out = jnp.where(LIVE[:, None], normal(M, OUT), 0)
  return (*(array.astype(dtype) for array in of_rows), *beside), d_out.astype(dtype)


def specs(dtype=jnp.float32, keep_x=False):
  gate, x = jax.ShapeDtypeStruct((HIDDEN,), dtype), jax.ShapeDtypeStruct((WIDTH,), dtype)
  return [*[x] * keep_x, gate, gate]


def stashed(
  capacity=ROWS + 1, *, is_weighted=True, is_biased=True, keep_x=False, seals=1, **options
):
  """Returns a function of the operands; what is not asked for of them has no influence."""

  def run(x, w_gate, w_up, w_down, row_weights, *biases):
    stash = ps.Stash.empty(capacity, specs(x.dtype, keep_x))
    beside = {"row_weights": row_weights} if is_weighted else {}
    if is_biased:
      beside |= {"activation": biased, "group_rows": biases}
    how = {"tiling": TILING, "keep_x": keep_x} | beside | options
    out, stash = ps.grouped_mlp(stash, x, w_gate, w_up, w_down, SIZES, **how)
    for _ in range(seals):
      out = ps.seal(out, stash)
    return out, stash.stats()

  return run


def plain(grouped_matmul, is_weighted=True, is_biased=True):
  """Returns the same of plain operations, each product rounded, the activation in float32."""

  def run(x, w_gate, w_up, w_down, row_weights, *biases):
    group = jnp.minimum(
      jnp.searchsorted(jnp.cumsum(SIZES), jnp.arange(M), side="right"), GROUPS - 1
    )
    in_groups = lambda rows: jnp.where(LIVE[:, None], rows, 0)
    gate, up = (
      in_groups(grouped_matmul(x, weights)).astype(x.dtype).astype(wide(x.dtype))
      for weights in (w_gate, w_up)
    )
    of_groups = [bias[group] for bias in biases]
    hidden = biased(gate, up, *of_groups) if is_biased else silu_and_multiply(gate, up)
    hidden = hidden * in_groups(row_weights[:, None]) if is_weighted else hidden
    hidden = in_groups(hidden).astype(x.dtype)
    return grouped_matmul(hidden, w_down).astype(x.dtype), None

  return run


def ragged_dot(lhs, rhs):
  """With nothing of padding in the gradient of `rhs`."""
  lhs = jnp.where(LIVE[:, None], lhs, 0)
  return lax.ragged_dot(lhs, rhs, SIZES, preferred_element_type=wide(lhs.dtype))


def differentiate(function, operands, d_out):
  """Returns the result, its padding zero, the gradients of all operands, and the statistics."""

  @jax.jit
  def run(operands, d_out):
    out, vjp, stats = jax.vjp(function, *operands, has_aux=True)
    return jnp.where(LIVE[:, None], out, 0), vjp(d_out), stats

  return run(operands, d_out)


def assert_padding_is_zero(gradients):
  of_x, _, _, _, of_weights, *_ = gradients
  for gradient in of_x[~LIVE], of_weights[~LIVE]:
    assert_trees_equal(gradient, jnp.zeros_like(gradient))


def assert_close(actual, expected, dtype):
  """To the last places of a sum whose terms are added up in another order."""
  tolerance = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}[jnp.dtype(dtype).name]
  for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    scale = np.nanmax(np.abs(other), initial=1e-3)
    np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=tolerance)
