"""The steps of `bench.chip` that are matmuls which write and read the stash in place."""

import functools

import jax
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps


def grouped(scale):
  """Grouped matmuls that write and read the stash in place, beside those of megablox."""
  width, tiling, differences = scale.model_width, (64, 128, 128), {}
  sizes = jnp.array([50, 5, 71, 30], jnp.int32)
  rng = np.random.default_rng(4)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  # Of four groups and of two; behind the rows there is no room for a tile, nor in front of them.
  for offset, groups, capacity in (0, 4, 160), (1, 2, 80):
    lhs, rhs, d_out = normal(256, width), normal(groups, width, width), normal(256, width)
    first, last = int(sizes[:offset].sum()), int(sizes[: offset + groups].sum())
    is_in_group = ((jnp.arange(256) >= first) & (jnp.arange(256) < last))[:, None]
    options = jnp.float32, tiling, jnp.int32(offset)

    def stashing(lhs, rhs, options=options, capacity=capacity):
      stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((width,), lhs.dtype)])
      how = {"interpret": not scale.is_tpu, "implementation": scale.implementation}
      return ps.seal(*ps.gmm(stash, lhs, rhs, sizes, *options, **how))

    def saving(lhs, rhs, options=options):
      return megablox_gmm(lhs, rhs, sizes, *options, None, False, not scale.is_tpu)

    def run(multiply, lhs, rhs, d_out, is_in_group=is_in_group):
      out, vjp = jax.vjp(multiply, lhs, rhs)
      d_lhs, d_rhs = vjp(jnp.where(is_in_group, d_out, 0))
      return jnp.where(is_in_group, out, 0), jnp.where(is_in_group, d_lhs, 0), d_rhs

    actual, expected = (
      jax.jit(functools.partial(run, multiply))(lhs, rhs, d_out) for multiply in (stashing, saving)
    )
    differences[f"{groups} groups"] = max(map(relative_difference, actual, expected))
  assert max(differences.values()) < 1e-5, differences
  found = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
  return f"largest relative difference {found}"


def mlp(scale):
  """An expert MLP whose gate and up products stay in the stash, beside a chain of megablox."""
  width, tiling, rows = scale.model_width, (64, 128, 128), 156
  sizes = jnp.array([50, 5, 71, 30], jnp.int32)
  rng = np.random.default_rng(5)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  matrix = lambda: normal(len(sizes), width, width) / width**0.5
  is_in_group = jnp.arange(256) < rows
  mask = lambda x: jnp.where(is_in_group.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
  operands = normal(256, width), matrix(), matrix(), matrix(), normal(256)
  d_out = mask(normal(256, width))

  def stashing(x, w_gate, w_up, w_down, row_weights, capacity):
    stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((width,), x.dtype)] * 2)
    options = {"tiling": tiling, "implementation": scale.implementation}
    args = stash, x, w_gate, w_up, w_down, sizes
    return ps.seal(*ps.grouped_mlp(*args, row_weights=row_weights, **options))

  def saving(x, w_gate, w_up, w_down, row_weights):
    project = lambda x, w: megablox_gmm(x, w, sizes, x.dtype, tiling, interpret=not scale.is_tpu)
    gate, up = mask(project(x, w_gate)), mask(project(x, w_up))
    return project(mask(jax.nn.silu(gate) * up * mask(row_weights)[:, None]), w_down)

  @functools.partial(jax.jit, static_argnums=0)
  def run(multiply, operands, d_out):
    out, vjp = jax.vjp(multiply, *operands)
    return mask(out), *vjp(d_out)

  expected, differences = run(saving, operands, d_out), {}
  for capacity in 160, 0:
    actual = run(functools.partial(stashing, capacity=capacity), operands, d_out)
    differences[f"{capacity} rows"] = max(map(relative_difference, actual, expected))
  # The matmuls of a TPU round to bfloat16 what differs in the last place of float32.
  assert max(differences.values()) < (1e-3 if scale.is_tpu else 1e-5), differences
  found = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
  return f"largest relative difference {found}"


def relative_difference(actual, expected):
  largest = float(jnp.max(jnp.abs(expected)))
  difference = float(jnp.max(jnp.abs(actual - expected))) / largest
  return difference if np.isfinite(difference) else np.inf
