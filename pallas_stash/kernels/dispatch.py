"""Which implementation runs, and that a kernel is traced once for a shape.

A kernel takes a third of a second to trace, and a model may have many residuals of one shape. So
each implementation is jitted, and jax keeps its traces; and where the platform is to choose,
compact and expand are primitives, of which nothing is traced before a program is lowered, and then
for its platforms only.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from pallas_stash import costs, dtypes
from pallas_stash.arguments import FIRST_ORDER_ONLY
from pallas_stash.kernels import mosaic_tpu, xla
from pallas_stash.kernels.tiling import choose_tiling, LANES, round_up
from pallas_stash.ragged import CopyRuns
from pallas_stash.varying import vary_alike

COMPACT, EXPAND = "compact", "expand"

_STATIC = {COMPACT: ("page_rows",), EXPAND: ("total_rows", "width")}
_OPTIONS = "tiling", "interpret", "checks_bounds"
_MOSAIC = {
  COMPACT: jax.jit(mosaic_tpu.compact, static_argnames=(*_STATIC[COMPACT], *_OPTIONS)),
  EXPAND: jax.jit(mosaic_tpu.expand, static_argnames=(*_STATIC[EXPAND], *_OPTIONS)),
}
_XLA = {
  COMPACT: jax.jit(xla.compact, static_argnames=_STATIC[COMPACT]),
  EXPAND: jax.jit(xla.expand, static_argnames=_STATIC[EXPAND]),
}


def run(
  name: str,
  implementation: str | None,
  operands: tuple[Any, ...],
  *,
  interpret: Any,
  checks_bounds: bool,
  **static: int | None,
) -> jax.Array:
  """Returns the result of compact or expand.

  Args:
    name: `COMPACT` or `EXPAND`.
    implementation: the name of one, or None for that of the platform that it is lowered for.
    operands: what the implementations take, in their order.
    interpret: `pltpu.InterpretParams`, for "mosaic_interpret".
    checks_bounds: whether a kernel on a TPU checks that its DMAs lie inside the buffers.
    **static: the shape of the new buffer of expand, or the pages of compact, as they take it.
  """
  as_array = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
  operands = vary_alike(*jax.tree.map(as_array, operands))
  if implementation is None:
    leaves = jax.tree.leaves(operands)
    return PRIMITIVES[name].bind(*leaves, checks_bounds=checks_bounds, **static)
  if implementation == "xla":
    one = functools.partial(_XLA[name], **static)
  else:
    options = {"checks_bounds": checks_bounds} | static
    if implementation == "mosaic_interpret":
      options["interpret"] = interpret
    one = functools.partial(_run_mosaic, name, **options)
  # Scalars that steer DMAs cannot be batched, so `vmap` runs one example after the other.
  return jax.custom_batching.sequential_vmap(one)(*operands)


def _run_mosaic(name, *operands, **options):
  stash = operands[1 if name == COMPACT else 0]
  if "interpret" not in options:
    dtypes.check_is_moved_on_tpu(stash.dtype)
  # Given, and so part of what a trace is kept by.
  page_rows = options.get("page_rows")
  tiling = choose_tiling(round_up(stash.shape[1], LANES), stash.dtype.itemsize, page_rows)
  return _MOSAIC[name](*operands, tiling=tiling, **options)


# Of the primitives, whose operands are leaves: those of `CopyRuns` stand behind the first arrays,
# and `fill` of expand is the last, or is not there.


_WITH_FILL = 6  # Leaves of expand.


def _grouped(name, leaves):
  """Returns the operands of the implementations from the leaves of them all."""
  arrays = 2 if name == COMPACT else 1
  return *leaves[:arrays], CopyRuns(*leaves[arrays : arrays + 3]), *leaves[arrays + 3 :]


def _lower_to_xla(name, *leaves, checks_bounds, **static):
  del checks_bounds
  return _XLA[name](*_grouped(name, leaves), **static)


def _lower_for_tpu(name, *leaves, **params):
  dtype = leaves[0].dtype
  dtypes.check_is_moved_on_tpu(dtype)
  # Of other dtypes the kernel would have to copy the whole stash into one that Mosaic takes.
  if not dtypes.is_of_mosaic(dtype):
    return _lower_to_xla(name, *leaves, **params)
  return _run_mosaic(name, *_grouped(name, leaves), **params)


def _result(name, *leaves, checks_bounds, **static):
  """Returns the abstract value of the result."""
  del checks_bounds
  if name == COMPACT:
    return leaves[1].update(weak_type=False)
  return leaves[0].update(shape=(static["total_rows"], static["width"]), weak_type=False)


@functools.cache
def _compiled_alone(primitive, params):
  return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _run_eagerly(primitive, *leaves, **params):
  # Where `jax.disable_jit` is on, it would come back here.
  with jax.disable_jit(False):
    return _compiled_alone(primitive, tuple(params.items()))(*leaves)


def _run_one_by_one(primitive, leaves, axes, **params):
  """Runs the examples of `vmap` one after the other: scalars that steer DMAs cannot be batched."""
  is_batched = [axis is not None for axis in axes]
  batched = [
    jnp.moveaxis(x, axis, 0) for x, axis in zip(leaves, axes, strict=True) if axis is not None
  ]

  def run_one(of_example):
    of_example = iter(of_example)
    operands = [next(of_example) if b else x for x, b in zip(leaves, is_batched, strict=True)]
    return primitive.bind(*operands, **params)

  results = lax.map(run_one, batched)
  return results, [0] * len(results) if primitive.multiple_results else 0


def _refuse_tangents(primals, tangents, **params):
  del primals, tangents, params
  raise NotImplementedError(FIRST_ORDER_ONLY)


def make_primitive(
  name: str,
  result: Callable[..., Any],
  by_xla: Callable[..., Any],
  on_tpu: Callable[..., Any],
  multiple_results: bool = False,
  declares_cost: bool = False,
) -> Primitive:
  """Returns a primitive of which nothing is traced before it is lowered, and then for a platform.

  It has no derivative, and `vmap` runs one example after the other.

  Args:
    name: of the primitive.
    result: from the abstract values of the operands to that of the result.
    by_xla, on_tpu: what it is lowered to, functions of the operands and the static parameters.
    multiple_results: whether those give several results, or the only one of a sequence.
    declares_cost: whether on a TPU its kernels do, which then may be that of the rows expected.
  """
  primitive = Primitive(name)
  primitive.multiple_results = multiple_results
  if declares_cost:
    costs.lowered_later(primitive)
  primitive.def_abstract_eval(lambda *leaves, expected=None, **params: result(*leaves, **params))
  primitive.def_impl(functools.partial(_run_eagerly, primitive))
  ad.primitive_jvps[primitive] = _refuse_tangents
  batching.primitive_batchers[primitive] = functools.partial(_run_one_by_one, primitive)
  for function, platform in (by_xla, None), (on_tpu, "tpu"):
    rule = mlir.lower_fun(_with_costs(function), multiple_results=multiple_results)
    mlir.register_lowering(primitive, rule, platform=platform)
  return primitive


def _with_costs(function):
  def call(*leaves, expected=None, **params):
    return costs.expecting(functools.partial(function, **params), expected)(*leaves)

  return call


PRIMITIVES = {
  name: make_primitive(
    f"stash_{name}",
    *(functools.partial(function, name) for function in (_result, _lower_to_xla, _lower_for_tpu)),
  )
  for name in (COMPACT, EXPAND)
}


def leaves_undefined(equation: Any) -> bool:
  """Returns whether an equation of a traced program is an expand that may leave rows undefined."""
  return equation.primitive is PRIMITIVES[EXPAND] and len(equation.invars) == _WITH_FILL
