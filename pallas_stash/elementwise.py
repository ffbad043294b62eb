"""Whether a function that kernels are to apply, a part of an array at a time, is elementwise."""

from collections.abc import Callable
import itertools
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.source_info_util import summarize
import jax.numpy as jnp

from pallas_stash.arguments import describe

# They may keep the shape of an array, and are not elementwise all the same.
_ACROSS = (
  *("all_", "axis_index", "cum", "dynamic_", "gather", "iota", "pmax", "pmin", "ppermute", "psum"),
  *("random", "reduce_window", "rev", "rng", "scatter", "select_and", "sort"),
)
_PRODUCTS = "conv_general", "dot_general", "ragged_dot"  # Of square matrices, for example.
_SHAPE = 8, 128


def check_elementwise(name: str, function: Callable[..., Any], arguments: int) -> None:
  """Raises a ValueError unless a function of so many float32 arrays is elementwise.

  It must not close over arrays, and return one array of floats.
  """
  if not callable(function):
    raise ValueError(f"{name}={describe(function)} must be a function.")
  array = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
  try:
    traced, out = jax.make_jaxpr(function, return_shape=True)(*[array] * arguments)
  except TypeError as error:
    raise ValueError(f"{name} must be a function of {arguments} arrays: {error}") from error
  if traced.consts:
    found = ", ".join(map(describe, traced.consts))
    raise ValueError(
      f"{name} closes over arrays, {found}: they must be Python numbers, or arguments."
    )
  is_array = isinstance(out, jax.ShapeDtypeStruct) and out.shape == _SHAPE
  if not is_array or not jnp.issubdtype(out.dtype, jnp.floating):
    raise ValueError(f"{name} must return one array of floats, not {describe(out)}.")
  for equation in _equations_of(traced.jaxpr):
    shapes = {variable.aval.shape for variable in equation.outvars}
    if not shapes <= {(), _SHAPE} or equation.primitive.name.startswith(_ACROSS):
      raise ValueError(
        f"{name} must be elementwise, without {equation.primitive}"
        f" ({summarize(equation.source_info)}): it is given parts of the rows."
      )


def is_elementwise(equation: Any) -> bool:
  """Returns whether an equation makes each row of the same row of what it is given, and cheaply.

  So it is where all arrays have one shape, where one is repeated, and where a row is reshaped.
  """
  inner = list(jex.jaxprs_in_params(equation.params))
  name = equation.primitive.name
  if inner:
    opens = name.startswith(("custom_jvp", "jit", "pjit"))
    return opens and all(map(is_elementwise, itertools.chain(*(jaxpr.eqns for jaxpr in inner))))
  if name == "broadcast_in_dim":
    return True
  if name in ("reshape", "squeeze"):
    return equation.invars[0].aval.shape[:1] == equation.outvars[0].aval.shape[:1]
  shape = equation.outvars[0].aval.shape
  # An axis of one is repeated, too.
  is_along = lambda own: len(own) == len(shape) and all(map(lambda n, m: n in (1, m), own, shape))
  shapes = {x.aval.shape for x in (*equation.invars, *equation.outvars)} - {()}
  return all(map(is_along, shapes)) and not name.startswith((*_ACROSS, *_PRODUCTS))


def _equations_of(jaxpr):
  """Yields the equations of a jaxpr that call no other, and of those that the rest call."""
  for equation in jaxpr.eqns:
    inner = list(jex.jaxprs_in_params(equation.params))
    if not inner:
      yield equation
    for called in inner:
      yield from _equations_of(called)
