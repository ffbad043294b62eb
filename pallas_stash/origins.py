"""Where a value of a traced program comes from: through loops and calls, up to what makes it."""

from collections.abc import Iterator
import math
from typing import Any, NamedTuple

from pallas_stash.jaxprs import (
  call_of,
  inner_jaxprs,
  is_variable,
  line_of,
  name_given_by,
  opened,
  scan_counts,
)
from pallas_stash.residuals import CALLS, changes_nothing, makers_in

# Primitives that return buffers of a stash with rows, the first operand of which has those rows.
PUSHES = frozenset({"stash_compact", "stash_gmm", "stash_mlp_forward"})


class Scope(NamedTuple):
  """A jaxpr, and from where it is called.

  Attributes:
    jaxpr: it.
    made_by: the equation in it that makes each variable.
    caller: the equation that calls it, None of the outermost.
    parent: the scope of that.
    operands: of that equation, what each of the variables that are given to the jaxpr is.
    carried: those variables of them that are the carry of a scan.
    times: how often it runs, on all devices, for once that its parent does.
  """

  jaxpr: Any
  made_by: dict[Any, Any]
  caller: Any = None
  parent: "Scope | None" = None
  operands: dict[Any, Any] = {}
  carried: frozenset = frozenset()
  times: int = 1

  def total_times(self) -> int:
    return self.times * (self.parent.total_times() if self.parent else 1)


class Origin(NamedTuple):
  """What makes a value.

  Attributes:
    operation: the primitive; None for an argument or a constant of the program, and "carry" for
      what a turn of a loop is given by the one before.
    variable: that it makes; or the argument, or constant.
    equation, scope: that make it, where they do.
    name: the `checkpoint_name` of the value.
    line: that names it, or else that makes it.
    loops: the lengths of the scans that stack it, the outermost first.
  """

  operation: str | None
  variable: Any
  equation: Any
  scope: Scope
  name: str | None
  line: str | None
  loops: tuple[int, ...]


def outermost(jaxpr: Any) -> Scope:
  """Returns the scope of a jaxpr that nothing calls."""
  return Scope(jaxpr, makers_in(jaxpr))


def origin_of(variable: Any, scope: Scope) -> Origin:
  """Follows a value through what changes nothing, into what is called, and out of it again."""
  name = line = equation = None
  loops, operation = (), None
  while is_variable(variable):
    if variable not in scope.made_by:
      if variable in scope.carried:
        operation, line = "carry", line or line_of(scope.caller)
        break
      if variable not in scope.operands:
        break
      variable, scope = scope.operands[variable], scope.parent
      continue
    equation = scope.made_by[variable]
    if (given := name_given_by(equation)) or changes_nothing(equation):
      if given and not name:
        name, line = given, line_of(equation)
      variable = equation.invars[0]
      continue
    inner = _enter(equation, variable, scope)
    if inner is None:
      operation, line = equation.primitive.name, line or line_of(equation)
      break
    variable, scope, stacked = inner
    loops += stacked
  return Origin(operation, variable, equation, scope, name, line, loops)


def pushes_of(variable: Any, scope: Scope) -> Iterator[tuple[Any, Scope]]:
  """Yields each equation that pushes rows into a buffer of a stash, the last first."""
  origin = origin_of(variable, scope)
  while True:
    if origin.operation == "carry":  # Of a loop that pushes: what it began with.
      outer = origin.scope
      origin = origin_of(outer.operands[origin.variable], outer.parent)
    elif origin.operation in PUSHES:
      yield origin.equation, origin.scope
      origin = origin_of(_buffer_before(origin), origin.scope)
    else:
      return


def _buffer_before(push):
  """Returns the operand of a push whose place its result takes: buffers come last among both."""
  outvars = push.equation.outvars
  is_alike = lambda variable: variable.aval.shape == push.variable.aval.shape
  behind = sum(map(is_alike, outvars[outvars.index(push.variable) + 1 :]))
  return list(filter(is_alike, push.equation.invars))[-1 - behind]


def _enter(equation, variable, scope):
  """Returns the variable inside of what an equation calls, its scope, and the loops that stack it.

  None for an equation that calls nothing that is known.
  """
  index = equation.outvars.index(variable)
  if (jaxpr := _body_of(equation)) is not None:
    return jaxpr.outvars[index], _called(jaxpr, equation, equation.invars, scope), ()
  call = call_of(equation)
  if call is None:
    return None
  operands, times, carried, stacked = equation.invars, 1, (), ()
  bodies = [opened(jaxpr)[0] for jaxpr in call.jaxprs]
  jaxpr = bodies[0]
  if call.kind == "cond":
    operands = operands[1:]
    jaxpr = next((body for body in bodies if _has_pushes(body)), jaxpr)
  elif call.kind == "shard_map":
    times = math.prod(call.params["mesh"].shape[axis] for axis in call.params["newly_manual_axes"])
  elif call.kind == "scan":
    times = call.params["length"]
    num_consts, num_carry = scan_counts(equation)
    carried = jaxpr.invars[num_consts : num_consts + num_carry]
    if index >= num_carry:
      stacked = (times,)
  inner = _called(jaxpr, equation, operands, scope)._replace(
    times=times, carried=frozenset(carried)
  )
  return jaxpr.outvars[index], inner, stacked


def _body_of(equation):
  """Returns the jaxpr of a call that gives it all of its operands, None for another equation."""
  where = "call" if equation.primitive.name == "custom_vmap_call" else CALLS.get(equation.primitive)
  return opened(equation.params[where])[0] if where else None


def _called(jaxpr, caller, operands, scope):
  given = dict(zip(jaxpr.invars, operands, strict=True))
  return Scope(jaxpr, makers_in(jaxpr), caller, scope, given)


def _has_pushes(jaxpr):
  is_push = lambda equation: equation.primitive.name in PUSHES
  return any(is_push(e) or any(map(_has_pushes, inner_jaxprs(e))) for e in jaxpr.eqns)
