"""What autodiff keeps of a function for its backward pass, and which of it goes into a stash."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, Literal, NamedTuple
import warnings

import jax
import jax.extend.core as jex
from jax.extend.core import primitives
import jax.numpy as jnp

from pallas_stash import dtypes
from pallas_stash.jaxprs import line_of, name_given_by, names_in

# Where the jaxpr of what is called is among the parameters of a call.
CALLS = {
  primitives.jit_p: "jaxpr",
  primitives.remat_p: "jaxpr",
  primitives.closed_call_p: "call_jaxpr",
  primitives.custom_jvp_call_p: "call_jaxpr",
  primitives.custom_vjp_call_p: "call_jaxpr",
}


class Forward(NamedTuple):
  """A forward pass that was traced: all that a function does before its cotangents are known.

  Attributes:
    jaxpr: from the leaves of the arguments to those of the result, and behind them those of the
      function of cotangents that `jax.vjp` returns: the residuals.
    consts: what the jaxpr closes over.
    result: the structure of the result.
    backward: the structure of the function of cotangents.
  """

  jaxpr: Any
  consts: Sequence[Any]
  result: Any
  backward: Any

  def evaluate(self, arguments: Any) -> tuple[Any, list[jax.Array]]:
    """Returns the result and the residuals at some arguments, a pytree."""
    outs = jax.core.eval_jaxpr(self.jaxpr, self.consts, *jax.tree.leaves(arguments))
    count = self.result.num_leaves
    return jax.tree.unflatten(self.result, outs[:count]), outs[count:]


def trace_forward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Forward:
  """Traces `function(*args, **kwargs)`, a pair of a result and a function of cotangents.

  It is traced once for arguments of the same shapes, like any function under `jax.jit`.
  """
  closed, (result, backward) = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
  structures = map(jax.tree.structure, (result, backward))
  equations = [_keep_small_floats(equation) for equation in closed.jaxpr.eqns]
  return Forward(closed.jaxpr.replace(eqns=equations), closed.consts, *structures)


def _keep_small_floats(equation):
  """Returns an equation that rounds no float8 value to its own dtype.

  `jax.checkpoint` pins so what it saves under a name, and `lax.reduce_precision` takes every dtype
  for one with infinities: of most float8 types it makes the largest values NaN, and the smallest 0.
  """
  if not _rounds_to_itself(equation) or equation.outvars[0].aval.dtype.itemsize > 1:
    return equation
  return equation.replace(primitive=primitives.copy_p, params={})


def _rounds_to_itself(equation):
  if equation.primitive != primitives.reduce_precision_p:
    return False
  own, params = jnp.finfo(equation.outvars[0].aval.dtype), equation.params
  return (params["exponent_bits"], params["mantissa_bits"]) == (own.nexp, own.nmant)


_OFFLOADED = "is offloaded by the policy"
_OF_OTHER_DTYPE = "has no floating-point dtype with NaN, to come back in as a cotangent"

_NOT_FOR_THE_STASH = "is saved by the policy beside the stash"

_AS_THE_POLICY_SAYS = _OFFLOADED, _OF_OTHER_DTYPE, _NOT_FOR_THE_STASH

Kind = Literal["stashed", "argument", "constant", "ordinary"]

# Gives the mark of a residual with a name, or with None: which of several `RaggedRows` says where
# its rows are. None for a residual that is not for the stash.
MarkOf = Callable[[str | None], int | None]


@dataclasses.dataclass(frozen=True)
class Residual:
  """A value that the backward pass of a function needs.

  Attributes:
    name: its `checkpoint_name`, or None.
    operation: what makes it: a primitive, or which argument it is.
    source: the line of the program that names it, or else that makes it, where that is known.
    shape, dtype: of the value, at worst-case size.
    kind: "stashed"; "argument", which whoever calls the function has; "constant", which is part of
      the program; or "ordinary", kept as it is.
    reason: why it is not stashed, and what would make it so; None where it is.
  """

  name: str | None
  operation: str
  source: str | None
  shape: tuple[int, ...]
  dtype: Any
  kind: Kind
  reason: str | None

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def __str__(self):
    return f"{self.name or self.operation} {self.dtype}{list(self.shape)}"


class Residuals:
  """Which values the backward pass of a function needs, and what becomes of each.

  Attributes:
    forward: the forward pass.
    total_rows: of each mark.
    different: each `Residual` once, though several leaves of the function of cotangents may be it.
    variables: of the jaxpr, that of each.
    pushes: for each mark that residuals have, which of those that are stashed have it.
  """

  def __init__(
    self,
    forward: Forward,
    total_rows: Sequence[int],
    mark_of: MarkOf,
    labels: Sequence[str],
    num_transient: int = 0,
  ):
    """Finds them.

    Args:
      forward, total_rows, mark_of: as above.
      labels: a name of each leaf of the arguments.
      num_transient: how many of them, the first, the backward pass is not given: they are kept.
    """
    self.forward, self.total_rows = forward, total_rows
    self.different, self.variables, self.pushes = [], [], {}
    self._sources = []  # Of each leaf of the function of cotangents: a kind, and which of it.
    self._literals = []
    jaxpr = forward.jaxpr
    made_by, sources, stored = makers_in(jaxpr), {}, []

    def source_of(variable):
      origin = _origin_of(variable, made_by)
      operation = origin.operation or "constant"
      is_offloaded = variable.aval.memory_space != jax.memory.Space.Device
      if origin.variable in jaxpr.invars[num_transient:] and not is_offloaded:
        source = "argument", jaxpr.invars.index(origin.variable)
        operation = labels[source[1]]
        reason = "is named, but an argument" if origin.name else "is an argument"
      elif origin.variable in jaxpr.constvars and not is_offloaded:
        source = "constant", jaxpr.constvars.index(origin.variable)
        reason = "is a constant of the program"
      else:
        mark = mark_of(origin.name)
        reason = _NOT_FOR_THE_STASH
        if mark is not None:
          reason = why_not_stashed(variable.aval, total_rows[mark])
        kind = "ordinary" if reason else "stashed"
        source = kind, stored.count(kind)
        stored.append(kind)
        if not reason:
          self.pushes.setdefault(mark, []).append(source[1])
      description = tuple(variable.aval.shape), variable.aval.dtype, source[0], reason
      self.different.append(Residual(origin.name, operation, origin.line, *description))
      self.variables.append(variable)
      return source

    for leaf in jaxpr.outvars[forward.result.num_leaves :]:
      if isinstance(leaf, jex.Literal):
        self._sources.append(("literal", len(self._literals)))
        self._literals.append(leaf.val)
        continue
      if leaf not in sources:
        sources[leaf] = source_of(leaf)
      self._sources.append(sources[leaf])

  def of_kind(self, kind: Kind) -> list[Residual]:
    return [residual for residual in self.different if residual.kind == kind]

  def require_any(self, function_name: str) -> None:
    """Raises a ValueError, that says what was found instead, if there is none to stash."""
    if self.of_kind("stashed"):
      return
    names = ", ".join(map(repr, self.names())) or "none"
    raise ValueError(
      f"No residual has ragged.total_rows={self.total_rows[0]} rows, at least two axes and a"
      " floating-point dtype. Residuals beside the arguments:"
      f" {', '.join(map(str, self.of_kind('ordinary'))) or 'none'}. Names in {function_name}:"
      f" {names}; does the policy save them?"
    )

  def names(self) -> list[str]:
    """Returns the `checkpoint_name`s in the function, whether the policy saves them or not."""
    return sorted(names_in(self.forward.jaxpr))

  def row_specs(self, indices: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of one row of some of those that are stashed."""
    pairs = zip(self.different, self.variables, strict=True)
    avals = [variable.aval for residual, variable in pairs if residual.kind == "stashed"]
    return [row_spec(avals[index]) for index in indices]

  def warn_of_misshapen(self) -> None:
    """Warns of each residual that has a name and is not stashed for its shape."""
    for residual in self.of_kind("ordinary"):
      if residual.name and residual.reason not in _AS_THE_POLICY_SAYS:
        warnings.warn(
          f"{residual} is named in the policy, and not stashed: it {residual.reason}. It is kept at"
          f" its full size for every layer ({residual.source}).",
          stacklevel=2,
        )

  def take(self, kind: Kind, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns those of a kind, in the order of `of_kind`, of all that `Forward.evaluate` gives."""
    taken = dict(zip(self._sources, leaves, strict=True))
    return tuple(taken[kind, number] for number in range(len(self.of_kind(kind))))

  def rebuild(self, arguments: Any, stashed: Sequence[jax.Array], ordinary: Sequence[jax.Array]):
    """Returns the function of cotangents, from the arguments and what `take` gave of each kind."""
    found = {
      "argument": jax.tree.leaves(arguments),
      "constant": self.forward.consts,
      "literal": self._literals,
      "stashed": stashed,
      "ordinary": ordinary,
    }
    leaves = [found[source][number] for source, number in self._sources]
    return jax.tree.unflatten(self.forward.backward, leaves)


def row_spec(aval: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of one row of a value."""
  options = {"manual_axis_type": aval.manual_axis_type}
  return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, **options)


def is_row_shaped(leaf: Any, total_rows: int) -> bool:
  """Returns whether a value can be stashed: of floats, with one row for each ragged row."""
  return dtypes.is_of_stash(leaf.dtype) and leaf.ndim >= 2 and leaf.shape[0] == total_rows


def why_not_stashed(aval: Any, total_rows: int) -> str | None:
  """Returns why a value that is neither argument nor constant is not stashed; None if it is."""
  shape = list(aval.shape)
  if not dtypes.is_of_stash(aval.dtype):
    return _OF_OTHER_DTYPE
  if aval.memory_space != jax.memory.Space.Device:
    return _OFFLOADED
  if is_row_shaped(aval, total_rows):
    return None
  for axes in range(1, len(shape) + 1):
    if math.prod(shape[:axes]) == total_rows:
      wanted = [total_rows, *(shape[axes:] or [1])]
      return f"has {'1 axis' if len(shape) == 1 else f'{len(shape)} axes'}: reshape to {wanted}"
  return f"has not total_rows={total_rows} rows" if shape else "is a scalar"


class _Origin(NamedTuple):
  """The variable that a value equals, what makes that (None for an input), and the value's name.

  `line` is that which gives the name, or else that which makes it.
  """

  variable: Any
  operation: str | None
  name: str | None
  line: str | None


def makers_in(jaxpr: Any) -> dict[Any, Any]:
  """Returns the equation of a jaxpr that makes each variable."""
  return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _origin_of(variable, made_by):
  """Follows a value through what changes nothing, and into what is called.

  What it finds equals the value: it does not go into loops or branches, as `origins` does to tell.
  """
  name = line = None
  while not isinstance(variable, jex.Literal) and variable in made_by:
    equation = made_by[variable]
    made_at = line_of(equation)
    if equation.primitive in CALLS:
      inner = equation.params[CALLS[equation.primitive]]
      inner = getattr(inner, "jaxpr", inner)
      origin = _origin_of(inner.outvars[equation.outvars.index(variable)], makers_in(inner))
      name, line = name or origin.name, line or origin.line or made_at
      if origin.variable not in inner.invars:
        return _Origin(variable, origin.operation or equation.primitive.name, name, line)
      variable = equation.invars[inner.invars.index(origin.variable)]
    elif (given := name_given_by(equation)) or changes_nothing(equation):
      if given and not name:
        name, line = given, made_at
      variable = equation.invars[0]
    else:
      return _Origin(variable, equation.primitive.name, name, line or made_at)
  return _Origin(variable, None, name, line)


def changes_nothing(equation: Any) -> bool:
  """Returns whether the result of an equation is its operand."""
  is_copy = equation.primitive.name in ("copy", "device_put") and len(equation.invars) == 1
  return is_copy or _rounds_to_itself(equation)
