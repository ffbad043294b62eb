"""What kernels tell XLA of their cost, where fewer rows come than there is room for."""

from collections.abc import Callable
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax

from pallas_stash.arguments import check_arguments, describe, positive_int
from pallas_stash.jaxprs import opened, with_inner_jaxprs

# Primitives that make their kernels when they are lowered. Of those, a parameter "expected" is what
# `expecting` is given.
_LOWERED_LATER = set()


class Expected(NamedTuple):
  """How many rows a buffer holds at most, and how many come.

  Attributes:
    rows: that are expected.
    total_rows: of a buffer at its worst-case size.
  """

  rows: int
  total_rows: int

  def scale(self, amount: int) -> int:
    """Returns the part of an amount of all rows that is that of the rows expected."""
    return amount * self.rows // self.total_rows


def with_expected_rows(
  fun: Callable[..., Any], expected_rows: int, total_rows: int
) -> Callable[..., Any]:
  """Makes `fun` with grouped matmuls that declare the cost of the rows expected.

      step = jax.jit(ps.with_expected_rows(step, expected_rows, total_rows))

  XLA schedules by what a Pallas kernel declares, and a grouped matmul of a worst-case buffer
  declares the cost of every row there is room for: megablox does, and the kernels of `gmm` and
  `grouped_mlp`. So XLA takes copies to the host, and collectives, to be over long before they are,
  and waits for them. Here the cost estimates, FLOPs and bytes, of all Pallas kernels that are given
  or make an array `[total_rows, ...]` are those of `expected_rows` of them. Nothing else of the
  program changes, and no result.

  What is differentiated later loses it: call it with the whole step, gradients and all.

  Args:
    fun: any function of pytrees of arrays, to such pytrees.
    expected_rows: that come, of a layer on a device, such as `sizing.expected_rows`.
    total_rows: of the buffer that they come in, such as `sizing.worst_case_rows`.

  Returns:
    A function with the arguments and results of `fun`.

  Raises:
    ValueError: for numbers that are not positive, or more rows than there is room for; where it is
      called, if no kernel of `fun` that declares a cost has an array of so many rows, or one is
      inside of what jax_remat3 or jax_custom_vjp3 made.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function.")
  total_rows = positive_int("total_rows", total_rows)
  expected = Expected(positive_int("expected_rows", expected_rows), total_rows)
  if expected.rows > total_rows:
    raise ValueError(f"{expected_rows=} must be at most {total_rows=}.")

  @functools.wraps(fun)
  def call(*args, **kwargs):
    check_arguments(args, kwargs)
    return _run(fun, expected, args, kwargs, must_have_kernels=True)

  return call


def lowered_later(primitive: Any) -> None:
  """Says of a primitive that it makes its kernels by `expecting`, when it is lowered."""
  _LOWERED_LATER.add(primitive)


def expecting(function: Callable[..., Any], expected: Expected | None) -> Callable[..., Any]:
  """Returns a function of arrays with kernels that declare the cost of the rows expected."""
  if expected is None:
    return function
  # For another platform than a TPU there may be no kernels.
  return lambda *leaves: _run(function, expected, leaves, {}, must_have_kernels=False)


def _run(fun, expected, args, kwargs, must_have_kernels):
  closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
  jaxpr, consts = opened(closed)
  declared = _declare(jaxpr, expected, {})
  if must_have_kernels and declared is jaxpr:
    raise ValueError(
      f"total_rows={expected.total_rows} must be the rows of an array of a Pallas kernel that"
      " declares its cost: there is none in the function."
    )
  outs = jax.core.eval_jaxpr(declared, consts, *jax.tree.leaves((args, kwargs)))
  return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _declare(jaxpr, expected, known):
  """Returns a jaxpr with the cost of the rows expected; as it is where no kernel has them.

  Args:
    jaxpr: not closed.
    expected: `Expected`.
    known: by its identity, each jaxpr that was seen, and what became of it: what several calls
      share they share afterwards, too.
  """
  if id(jaxpr) not in known:
    equations = [_declare_equation(equation, expected, known) for equation in jaxpr.eqns]
    is_same = all(map(operator.is_, equations, jaxpr.eqns))
    known[id(jaxpr)] = jaxpr, jaxpr if is_same else jaxpr.replace(eqns=equations)
  return known[id(jaxpr)][1]


def _declare_equation(equation, expected, known):
  params = equation.params
  if equation.primitive.name != "pallas_call" and equation.primitive not in _LOWERED_LATER:
    return with_inner_jaxprs(equation, lambda jaxpr: _declare(jaxpr, expected, known))
  shapes = (getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars))
  if not any(shape[:1] == (expected.total_rows,) for shape in shapes):
    return equation
  if equation.primitive in _LOWERED_LATER:
    return equation.replace(params=params | {"expected": expected})
  cost = params["cost_estimate"]
  if cost is None:
    return equation
  names = "flops", "transcendentals", "bytes_accessed"
  scaled = {name: expected.scale(getattr(cost, name)) for name in names}
  return equation.replace(params=params | {"cost_estimate": dataclasses.replace(cost, **scaled)})
