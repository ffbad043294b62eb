"""A backward pass in two halves: the gradients that others wait for, and those of weights.

What the gradient of a weight of a grouped matmul is made of is rows: those that the matmul was
given, and the cotangents of those that it made. The early half makes them on its way, and keeps
them; the late half makes the gradients of weights of them. What is elementwise it does again,
rather than to keep what comes of it beside what it is made of; nothing else.
"""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_stash.elementwise import is_elementwise
from pallas_stash.handover import name_slot
from pallas_stash.jaxprs import call_of, evaluate, is_variable, opened
from pallas_stash.residuals import is_row_shaped, makers_in, Residuals, row_spec

_OPENED = "jit", "checkpoint"  # What is in them can belong to different halves.


class Halves:
  """The two halves of the backward pass of a function.

  Attributes:
    kept: the shape and dtype of one row of each value that the early half keeps for the late one.
  """

  def __init__(self, found: Residuals, structure: Any, is_late: Sequence[bool]):
    """Finds them.

    Args:
      found: the residuals of the function.
      structure: of its operands.
      is_late: of each leaf of the operands, whether its gradient can wait.

    Raises:
      ValueError: if a late gradient needs a cotangent that has no row for each of the ragged rows,
        or if it could be taken for such rows itself.
    """
    self._structure = structure
    operands, residuals, d_outs = _given(found)
    closed = jax.make_jaxpr(_inlined(_pull_back(found, structure)))(operands, *residuals, d_outs)
    self._jaxpr, self._consts = closed.jaxpr, closed.consts
    self._has_gradient = [_has_gradient(operand) for operand in operands]
    pairs = zip(self._has_gradient, is_late, strict=True)
    self._is_late = [late for has_gradient, late in pairs if has_gradient]

    late, total_rows = self._outs(True), found.total_rows[0]
    for operand, is_one in zip(operands, is_late, strict=True):
      if is_one and operand.shape[:1] == (total_rows,):
        # What its gradient is made of could not be told from rows, of which padding is dropped.
        raise ValueError(
          f"An argument of late_argnames, {operand.str_short()}, must not have as many entries as"
          f" there are rows, {total_rows}: leave it out."
        )
    # One value a row takes less at worst-case size than in a row of the stash, of 128 at least.
    is_wide = lambda variable: math.prod(variable.aval.shape[1:]) > 1
    is_row = lambda variable: is_row_shaped(variable.aval, total_rows) and is_wide(variable)
    is_kept = lambda variable: is_row(variable) and variable not in late
    self._kept, self._late, wanted = _cut(self._jaxpr, set(filter(is_variable, late)), is_kept)
    variables = iter(self._jaxpr.invars)
    of_operands, _, of_ordinary, of_d_outs = (
      [next(variables) for _ in some] for some in (operands, *residuals, d_outs)
    )
    self._kept += [x for x in of_operands + of_d_outs if x in wanted and is_row(x)]
    for variable in of_d_outs:
      if variable in wanted and not is_row(variable):
        raise ValueError(
          f"A gradient of late_argnames needs the cotangent {variable.aval.str_short()} of a"
          f" result, which must be of rows, [{total_rows}, n] with n > 1, to be kept for later."
        )
    self.kept = [row_spec(variable.aval) for variable in self._kept]

    # What is of worst-case size is rather made again. Weights are there for good: to name them
    # would be to copy them.
    is_large = lambda x: x.aval.shape[:1] == (total_rows,) and is_wide(x)
    is_named = lambda x: x in wanted and not is_large(x)
    pairs = zip(of_operands, is_late, strict=True)
    self._is_named = [is_named(x) and not late for x, late in pairs]
    self._is_ordinary_named = [is_named(x) for x in of_ordinary]

  def name_needed(self, operands: Any, ordinary: Any) -> tuple[Any, Any]:
    """Names what the late half needs, but rows and weights, so that it is not made again for it."""
    leaves = zip(jax.tree.leaves(operands), self._is_named, strict=True)
    leaves = [name_slot(leaf) if is_named else leaf for leaf, is_named in leaves]
    pairs = zip(ordinary, self._is_ordinary_named, strict=True)
    ordinary = tuple(name_slot(leaf) if is_named else leaf for leaf, is_named in pairs)
    return jax.tree.unflatten(self._structure, leaves), ordinary

  def early(self, operands: Any, rows: Any, ordinary: Any, d_out: Any) -> tuple[Any, list[Any]]:
    """Returns the cotangents of operands, None for those that are late, and what `late` needs."""
    leaves = [
      *jax.tree.leaves((operands, rows, ordinary)),
      *filter(_has_gradient, jax.tree.leaves(d_out)),
    ]
    values = self._values(self._jaxpr.invars, leaves)
    outs = self._outs(False)
    equations, _ = _needed(self._jaxpr, {*filter(is_variable, outs), *self._kept})
    evaluate(self._jaxpr, equations, values, lambda equation: None)
    return self._cotangents(values, False), [values[variable] for variable in self._kept]

  def late(self, operands: Any, rows: Any, ordinary: Any, kept: Sequence[jax.Array]) -> Any:
    """Returns the cotangents of operands, None for those that are not late."""
    leaves = jax.tree.leaves((operands, rows, ordinary))
    given = zip(self._jaxpr.invars, leaves, strict=False)
    read = _read_by(self._late)
    given = [(v, leaf) for v, leaf in given if v in read and v not in self._kept]
    given += zip(self._kept, kept, strict=True)
    values = self._values(*zip(*given, strict=True))
    evaluate(self._jaxpr, self._late, values, lambda equation: None)
    return self._cotangents(values, True)

  def _values(self, variables, leaves):
    # As under `jax.checkpoint`: what is made again is not to be what was made before.
    values = dict(zip(variables, lax.optimization_barrier(list(leaves)), strict=True))
    return values | dict(zip(self._jaxpr.constvars, self._consts, strict=True))

  def _outs(self, is_late):
    pairs = zip(self._jaxpr.outvars, self._is_late, strict=True)
    return [variable for variable, late in pairs if late == is_late]

  def _cotangents(self, values, is_late):
    outs = iter(zip(self._jaxpr.outvars, self._is_late, strict=True))

    def cotangent(has_gradient):
      variable, late = next(outs) if has_gradient else (None, None)
      if variable is None or late != is_late:
        return None
      return values[variable] if is_variable(variable) else jnp.asarray(variable.val)

    return jax.tree.unflatten(self._structure, map(cotangent, self._has_gradient))


def _given(found):
  """Returns the shapes of operands, of residuals (in the stash, and others), and of cotangents."""
  jaxpr, num_outs = found.forward.jaxpr, found.forward.result.num_leaves
  outs, _ = jax.tree.unflatten(
    found.forward.result, [variable.aval for variable in jaxpr.outvars[:num_outs]]
  )
  of_kind = lambda kind: [
    variable.aval
    for residual, variable in zip(found.different, found.variables, strict=True)
    if residual.kind == kind
  ]
  operands = [variable.aval for variable in jaxpr.invars]
  d_outs = [aval for aval in jax.tree.leaves(outs) if _has_gradient(aval)]
  return operands, (of_kind("stashed"), of_kind("ordinary")), d_outs


def _pull_back(found, structure):
  """Returns `(operands, rows, ordinary, d_outs) -> gradients`, all of them lists of leaves."""
  num_outs = found.forward.result.num_leaves
  avals = [variable.aval for variable in found.forward.jaxpr.outvars[:num_outs]]
  outs, _ = jax.tree.unflatten(found.forward.result, avals)
  zeros = lambda aval: np.zeros(aval.shape, jax.dtypes.float0)

  def pull_back(operands, rows, ordinary, d_outs):
    d_outs = iter(d_outs)
    d_out = jax.tree.map(lambda a: next(d_outs) if _has_gradient(a) else zeros(a), outs)
    arguments = jax.tree.unflatten(structure, operands)
    d_operands = jax.tree.leaves(found.rebuild(arguments, rows, ordinary)(d_out))
    return [d for d in d_operands if _has_gradient(d)]

  return pull_back


def _has_gradient(leaf):
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _read_by(equations):
  return {x for equation in equations for x in equation.invars if is_variable(x)}


def _cut(jaxpr, wanted, is_row):
  """Returns the rows to keep, the equations that make of them what is wanted, and all they read."""
  made_by, kept = makers_in(jaxpr), []

  def is_cheap(equation):
    if not is_elementwise(equation):
      return False
    # Of what a matmul makes is kept what it is rounded to: half as many bytes.
    if equation.primitive.name != "convert_element_type":
      return True
    (operand,), (out,) = equation.invars, equation.outvars
    is_rounded = out.aval.dtype.itemsize < operand.aval.dtype.itemsize
    return not (is_rounded and operand in made_by and not is_elementwise(made_by[operand]))

  def is_kept(equation, variables):
    if is_cheap(equation) or not all(map(is_row, variables)):
      return False
    kept.extend(variables)
    return True

  equations, wanted = _needed(jaxpr, wanted, is_kept)
  return kept, equations, wanted


def _needed(jaxpr, wanted, is_given=lambda equation, variables: False):
  """Returns the equations that variables need, in order, and all that these read.

  Those of which the variables that are needed are given are not needed.
  """
  equations = []
  for equation in reversed(jaxpr.eqns):
    variables = [variable for variable in equation.outvars if variable in wanted]
    if variables and not is_given(equation, variables):
      equations.append(equation)
      wanted = wanted.union(filter(is_variable, equation.invars))
  return equations[::-1], wanted


def _inlined(function):
  """Returns the function with all that it calls in place."""

  def rule_of(equation):
    call = call_of(equation)
    if call is None or call.kind not in _OPENED:
      return None
    return lambda *operands: run(*opened(call.jaxprs[0]), operands)

  def run(jaxpr, consts, operands):
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    evaluate(jaxpr, jaxpr.eqns, values, rule_of)
    return [values[x] if is_variable(x) else x.val for x in jaxpr.outvars]

  def evaluate_inlined(*given):
    closed = jax.make_jaxpr(function)(*given)
    return run(closed.jaxpr, closed.consts, jax.tree.leaves(given))

  return evaluate_inlined
