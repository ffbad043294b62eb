"""Runs a traced program with other contents in the padding of its row-shaped intermediates."""

import dataclasses

import jax
import jax.extend.core as jex
from jax.extend.core import primitives
from jax.extend.source_info_util import summarize
import jax.numpy as jnp

from pallas_stash.kernels.dispatch import leaves_undefined
from pallas_stash.residuals import CALLS, is_row_shaped

# `only` of `run_poisoned`, where it is no number of an intermediate.
ALL, NONE = -1, -2

# What these leave in padding may be uninitialised memory, NaN included.
_UNDEFINED = {"ragged_dot_general", "pallas_call", "ffi_call", "empty", "empty2"}

# What these leave in padding may be rows from elsewhere, though an operand has rows already.
_MOVING = {"gather", "scatter", "scatter-add", "dynamic_update_slice", "concatenate", "sort"}


@dataclasses.dataclass(eq=False)  # Two that look alike are two.
class Intermediate:
  """A row-shaped value whose padding may be poisoned.

  Attributes:
    description: what makes it, its dtype and shape.
    source: the line of the program that makes it; None for an argument.
    name: the first `checkpoint_name` that it is given, elementwise operations in between; or None.
  """

  description: str
  source: str | None = None
  name: str | None = None


def run_poisoned(jaxpr, args, labels, is_padding, only, is_finite):
  """Evaluates a `ClosedJaxpr`, with poison in padding.

  Poisoned are: every row-shaped argument; every row-shaped result of an operation that may leave
  padding undefined; and every row-shaped value where it first gets its rows, that is where an
  operation makes it of operands without rows, or moves rows about: there padding holds whatever
  came along. From there on poison spreads by itself, until the program deselects it. So what the
  program zeroed, and the padding of a matmul of that, stay zero, and code that relies on it is
  right. Padding that a program fills with one constant is not poisoned: that is its own mask.

  Args:
    jaxpr: what to run. `jit`, `jax.checkpoint` and functions with custom derivatives are entered.
    args: its arguments, a list of arrays.
    labels: a description of each argument.
    is_padding: bool[total_rows].
    only: int32[], which of the intermediates to poison, by number; or `ALL`, or `NONE`.
    is_finite: bool[], whether poison is finite, larger than what the rows hold, everywhere. Else it
      is NaN in what may be undefined. It is always finite where padding holds data: what is finite
      there may be multiplied by zero.

  Returns:
    The results, and a list that is static: the `Intermediate`s that may be poisoned, in the order
    of the program.
  """
  run = _Run(is_padding, only, is_finite)
  args = [
    run.poison(arg, Intermediate(label)) if run.has_rows(arg) else (arg, ())
    for arg, label in zip(args, labels, strict=True)
  ]
  results = run.evaluate(jaxpr.jaxpr, jaxpr.consts, args)
  values = [value for value, _ in results]
  return values, run.intermediates


class _Run:
  """One evaluation. A value is kept with the intermediates that it is made of, elementwise."""

  def __init__(self, is_padding, only, is_finite):
    self.is_padding = is_padding
    self.only = only
    self.is_finite = is_finite
    self.intermediates = []

  def has_rows(self, value):
    return isinstance(value, jax.Array) and is_row_shaped(value, self.is_padding.shape[0])

  def is_of_rows(self, value):
    """Returns whether it has rows, or one number a row."""
    is_vector = isinstance(value, jax.Array) and value.shape == self.is_padding.shape
    return self.has_rows(value) or (is_vector and jnp.issubdtype(value.dtype, jnp.floating))

  def poison(self, value, intermediate, may_be_undefined=False):
    """Returns the value with poison in its padding, and the intermediate as what it is made of."""
    number = len(self.intermediates)
    self.intermediates.append(intermediate)
    is_padding = self.is_padding.reshape(-1, *[1] * (value.ndim - 1))
    magnitude = jnp.abs(value.astype(jnp.float32))
    largest = jnp.max(jnp.where(is_padding | ~jnp.isfinite(magnitude), 0, magnitude))
    wave = jnp.cos(jnp.arange(value.size, dtype=jnp.float32) + number).reshape(value.shape)
    # What has no negative rows, as a variance, may rely on that.
    wave = jnp.where(jnp.any(~is_padding & (value < 0)), wave, jnp.abs(wave))
    limit = float(jnp.finfo(value.dtype).max) / 2
    poison = jnp.clip(4 * (1 + largest) * wave, -limit, limit).astype(value.dtype)
    is_poisoned = (self.only == ALL) | (self.only == number)
    if may_be_undefined:
      nan = jnp.full((), jnp.nan, value.dtype)
      poison = jnp.where(self.is_finite, poison, nan)
    else:
      padding = jnp.where(is_padding, value, value[jnp.argmax(self.is_padding)].ravel()[0])
      is_poisoned &= jnp.any(padding != padding.ravel()[0])
    return jnp.where(is_padding & is_poisoned, poison, value), (intermediate,)

  def evaluate(self, jaxpr, consts, args):
    """Returns the results, each a value and the intermediates that it is made of."""
    known = dict(zip(jaxpr.invars, args, strict=True))
    known.update((var, (const, ())) for var, const in zip(jaxpr.constvars, consts, strict=True))
    read = lambda atom: (atom.val, ()) if isinstance(atom, jex.Literal) else known[atom]
    for equation in jaxpr.eqns:
      results = self.apply(equation, [read(atom) for atom in equation.invars])
      known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def apply(self, equation, operands):
    primitive, values = equation.primitive, [value for value, _ in operands]
    if primitive in CALLS:
      inner = equation.params[CALLS[primitive]]
      is_closed = isinstance(inner, jex.ClosedJaxpr)
      return self.evaluate(
        inner.jaxpr if is_closed else inner, getattr(inner, "consts", ()), operands
      )
    results = _evaluate_alone(equation, values)
    may_be_undefined = _may_be_undefined(equation)
    gets_rows = not any(map(self.is_of_rows, values)) or primitive.name in _MOVING
    made_of = tuple(dict.fromkeys(i for _, parts in operands for i in parts))
    if primitive == primitives.dot_general_p:
      made_of = ()
    if primitive == primitives.name_p:
      for intermediate in made_of:
        intermediate.name = intermediate.name or equation.params["name"]

    def finish(result):
      if not self.has_rows(result):
        return result, ()
      if not (may_be_undefined or gets_rows):
        return result, made_of
      return self.poison(result, _describe(equation, result), may_be_undefined)

    return list(map(finish, results))


def _evaluate_alone(equation, operands):
  """Returns the results of one equation, as a program of its own."""
  pairs = zip(equation.invars, operands, strict=True)
  variables = {atom: value for atom, value in pairs if not isinstance(atom, jex.Literal)}
  names = jex.DebugInfo("check_padding", equation.primitive.name, None, None)
  program = jex.Jaxpr((), list(variables), equation.outvars, [equation], equation.effects, names)
  return jax.core.eval_jaxpr(program, (), *variables.values())


def _describe(equation, result):
  description = f"{equation.primitive.name} -> {result.dtype}{list(result.shape)}"
  return Intermediate(description, summarize(equation.source_info))


def _may_be_undefined(equation):
  if equation.primitive.name in _UNDEFINED or leaves_undefined(equation):
    return True
  inner = jex.jaxprs_in_params(equation.params)
  return any(_may_be_undefined(e) for jaxpr in inner for e in jaxpr.eqns)
