"""Compiles one grouped matmul for a TPU that this host does not have; prints its cycle estimate.

Run as `python -m bench.kernels.grouped_static JSON`, as `bench.kernels.static` is. Rows are a
prefix of the worst case, in groups of 1024, so that two row tiles of 512 are of one group.
"""

from bench.kernels import static  # First: it sets the environment, before jax is imported.

# isort: split
import contextlib
import importlib
import json
import sys
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from bench.tpu import aot
from pallas_stash.grouped_mlp import silu_and_multiply
from pallas_stash.kernels import gate_up, gate_up_backward, grouped, grouped_call
from pallas_stash.kernels.activation import Beside
from pallas_stash.kernels.megablox import Megablox
from pallas_stash.kernels.visits import Place, Visits

GROUP_ROWS, TILING, DTYPE = 1024, (512, 1024, 1024), jnp.bfloat16
SLOT = 1024  # Stash row where the push starts.
_megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


class _Known:
  """Scalar memory whose contents are a function of the index: the estimator reads it as 0."""

  def __init__(self, value_of):
    self._value_of = value_of

  def __getitem__(self, index):
    return self._value_of(index)


METADATA = _Known(lambda g: g * GROUP_ROWS), _Known(lambda t: t // 2), _Known(lambda t: t)


def visits_of(rows, metadata):
  """Returns `Visits` whose scalars are known, whatever it is given."""
  place = _Known(lambda i: [jnp.int32(value) for value in (0, 0, rows, SLOT)][i])

  class Known(Visits):
    def __new__(cls, *refs):
      del refs
      return tuple.__new__(cls, (*METADATA, place))

    @staticmethod
    def of(*args):
      del args
      return metadata, rows // TILING[0]

  return Known


class KnownPallas:
  """`pl` for megablox, with a `pallas_call` whose scalars are known."""

  def __init__(self, visits):
    self._visits = visits

  def __getattr__(self, name):
    return getattr(pl, name)

  def pallas_call(self, kernel, *, grid_spec, **options):
    first_group = _Known(lambda _: jnp.int32(0))

    def known(spec):
      at = lambda *args: spec.index_map(*args[:3], METADATA, first_group)
      return spec and pl.BlockSpec(spec.block_shape, at)

    spec = pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=tuple(size if isinstance(size, int) else self._visits for size in grid_spec.grid),
      in_specs=list(map(known, grid_spec.in_specs)),
      out_specs=known(grid_spec.out_specs),
      scratch_shapes=grid_spec.scratch_shapes,
    )
    body = lambda metadata, offset, *refs: kernel(METADATA, first_group, *refs)
    return pl.pallas_call(body, grid_spec=spec, **options)


def make(case):
  """Returns a function of (scalars, operands), the shapes of the operands, and which is donated."""
  kernel, k, n, rows = (case[key] for key in ("kernel", "k", "n", "rows"))
  groups, total_rows = rows // GROUP_ROWS, 4 * rows
  struct = lambda *shape: jax.ShapeDtypeStruct(shape, DTYPE)
  lhs, d_out, rhs = struct(total_rows, k), struct(total_rows, n), struct(groups, k, n)
  stash, sizes = struct(total_rows, k), jnp.zeros((groups,), jnp.int32)
  options, place = Megablox(DTYPE, TILING, False, False), Place(*jnp.zeros(3, jnp.int32))
  scalars = sizes, jnp.int32(0), place
  if case["implementation"] == "megablox":
    if kernel == "tgmm":
      tgmm = _megablox.tgmm.__wrapped__
      return lambda lhs, d_out: tgmm(lhs.swapaxes(0, 1), d_out, sizes, DTYPE, TILING), (lhs, d_out)
    turned = {"transpose_rhs": kernel == "gmm_transposed"}
    rhs = struct(groups, n, k) if turned["transpose_rhs"] else rhs
    gmm = _megablox.gmm.__wrapped__
    return lambda lhs, rhs: gmm(lhs, rhs, sizes, DTYPE, TILING, **turned), (lhs, rhs)
  if kernel == "gmm":
    keep = lambda *operands: grouped.gmm_and_keep(*operands, *scalars, options=options)
    return keep, (lhs, rhs, stash)
  if kernel == "tgmm":
    of_rhs = {"k": k, "dtype": DTYPE, "groups_here": groups, "options": options}
    return lambda *operands: grouped.tgmm(*operands, *scalars, **of_rhs), (stash, d_out)
  stashes = [struct(total_rows, n), struct(total_rows, n), *[stash] * kernel.endswith("_x")]
  weights = jax.ShapeDtypeStruct((total_rows,), jnp.float32)
  beside = Beside(weights if kernel.endswith("_weights") else None, ())
  static = {"activation": silu_and_multiply, "options": options}
  if kernel.startswith("gate_up_backward"):
    run = lambda d_out, w_down, beside, stashes: gate_up_backward.backward(
      d_out, w_down, sizes, beside, stashes, place, **static
    )
    return run, (lhs, struct(groups, n, k), beside, stashes)
  run = lambda x, w_gate, w_up, beside, stashes: gate_up.forward(
    x, w_gate, w_up, sizes, beside, stashes, place, **static
  )
  return run, (lhs, rhs, rhs, beside, stashes)


def estimate(case: dict) -> int:
  """Returns the cycles of a case of `bench.kernels.cases.grouped_cases`."""
  rows, groups = case["rows"], case["rows"] // GROUP_ROWS
  visits = 4 * rows // TILING[0] + groups - 1
  integers = lambda size: jax.ShapeDtypeStruct((size,), jnp.int32)
  metadata = Visits(*map(integers, (groups + 1, visits, visits, 4)))
  mesh = aot.mesh(case["chip"])
  function, operands = make(case)
  args = aot.place((metadata, operands), mesh)

  def run(metadata, operands):
    # The scalars are arguments: how XLA computes them is not to be estimated.
    known = visits_of(rows, metadata), KnownPallas(rows // TILING[0])
    given = lambda **_: (metadata[:3], rows // TILING[0])
    patches = [
      (of, "Visits", known[0]) for of in (gate_up, gate_up_backward, grouped, grouped_call)
    ]
    patches += [(_megablox, "pl", known[1]), (_megablox, "make_group_metadata", given)]
    with contextlib.ExitStack() as stack:
      for patch in patches:
        stack.enter_context(mock.patch.object(*patch))
      return function(*operands)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.jit(run).trace(*args).lower().compile()
  return static.estimated_cycles(("stash_", "run"))


if __name__ == "__main__":
  print(json.dumps({"estimated_cycles": estimate(json.loads(sys.argv[1]))}))
