"""What is read of jaxprs and differs between versions of jax: all of it is here."""

from collections.abc import Callable, Sequence
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.extend.core import primitives
from jax.extend.source_info_util import current_name_stack, summarize, user_context
from jax.interpreters import partial_eval

# The parameters of each kind of call, in the jaxes that are known here.
_PARAMETERS = {
  "jit": {
    *("jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars"),
    *("ctx_mesh", "name", "keep_unused", "inline", "compiler_options_kvs"),
  },
  "checkpoint": {"jaxpr", "policy", "prevent_cse", "differentiated"},
  "scan": {
    *("jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry"),
    *("ft_in", "ft_out"),  # Since jax 0.12.
  },
  "cond": {"branches"},
  "shard_map": {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes"},
}
_KINDS = {
  "jit": "jit",
  "checkpoint": "checkpoint",
  "remat2": "checkpoint",
  "RematTraced": "checkpoint",  # Under `jax_remat3`.
  "scan": "scan",
  "cond": "cond",
  "shard_map": "shard_map",
}


class Call(NamedTuple):
  """An equation that calls functions.

  Attributes:
    kind: "jit", "checkpoint", "scan", "cond" or "shard_map".
    jaxprs: of what is called: the branches of "cond", else one.
    params: of the equation, by their names.
  """

  kind: str
  jaxprs: Sequence[Any]
  params: dict[str, Any]


def call_of(equation: Any) -> Call | None:
  """Returns what an equation calls; None for one that is of none of these kinds.

  Raises:
    ValueError: for parameters that no jax known here gives it.
  """
  name, params = _name_and_params(equation)
  kind = _KINDS.get(name)
  if kind is None:
    return None
  if unknown := sorted(params.keys() - _PARAMETERS[kind]):
    raise ValueError(
      f"pallas_stash does not know {', '.join(unknown)} of {name} in jax {jax.__version__}: with"
      " this jax, `threaded` and passes in two halves are not to be had."
    )
  jaxprs = params["branches"] if kind == "cond" else [params["jaxpr"]]
  return Call(kind, jaxprs, params)


def scan_counts(equation: Any) -> tuple[int, int]:
  """Returns how many operands of a scan are constants, and how many are carried."""
  jaxpr, _ = opened(_name_and_params(equation)[1]["jaxpr"])
  # By rank: how the equation says it differs.
  is_sliced = lambda outer, inner: len(outer.aval.shape) > len(inner.aval.shape)
  num_xs = sum(map(is_sliced, equation.invars, jaxpr.invars))
  num_carry = len(equation.outvars) - sum(map(is_sliced, equation.outvars, jaxpr.outvars))
  return len(equation.invars) - num_xs - num_carry, num_carry


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Returns a jaxpr, closed or not, and its constants apart."""
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def inner_jaxprs(equation: Any) -> list[Any]:
  """Returns the jaxprs among the parameters of an equation."""
  params = _name_and_params(equation)[1]
  return [opened(jaxpr)[0] for jaxpr in jex.jaxprs_in_params(params)]


def with_inner_jaxprs(equation: Any, change: Callable[[Any], Any]) -> Any:
  """Returns an equation with the jaxprs among its parameters as `change` returns each of them.

  As it is if all are the same.

  Raises:
    ValueError: for one to change of an equation of another implementation of jax.
  """

  def changed(value):
    if isinstance(value, jex.ClosedJaxpr):
      inner = change(value.jaxpr)
      return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, jex.Jaxpr):
      return change(value)
    if type(value) in (tuple, list):
      items = [changed(item) for item in value]
      return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value

  name, before = _name_and_params(equation)
  params = {key: changed(value) for key, value in before.items()}
  if all(params[key] is value for key, value in before.items()):
    return equation
  if before is not equation.params:
    raise ValueError(
      f"{name} calls what is to be changed, and cannot be made again with jax {jax.__version__}:"
      " turn jax_remat3 and jax_custom_vjp3 off."
    )
  return equation.replace(params=params)


def name_given_by(equation: Any) -> str | None:
  """Returns the name if the equation is a `checkpoint_name`, of any of its two implementations."""
  name, params = _name_and_params(equation)
  is_name = equation.primitive == primitives.name_p or name == "CheckpointName"
  return params["name"] if is_name else None


def names_in(jaxpr: Any) -> set[str]:
  """Returns the `checkpoint_name`s in a jaxpr and in those that it calls."""
  names = {name_given_by(equation) for equation in jaxpr.eqns} - {None}
  inner = itertools.chain.from_iterable(map(inner_jaxprs, jaxpr.eqns))
  return names.union(*map(names_in, inner))


def line_of(equation: Any) -> str:
  """Returns the line of the program that an equation is of."""
  return summarize(equation.source_info)


def is_variable(operand: Any) -> bool:
  """Returns whether an operand of an equation, or a result of a jaxpr, is no literal."""
  return not isinstance(operand, jex.Literal)


def made_of(jaxpr: Any) -> dict[Any, frozenset[int]]:
  """Returns of each variable of a jaxpr of which of its arguments it is made, by their numbers.

  It looks into what is called: one result of a loop need not be made of all that the loop is given.
  """
  found = {variable: frozenset([index]) for index, variable in enumerate(jaxpr.invars)}
  for equation in jaxpr.eqns:
    operands = [
      found.get(x, frozenset()) if is_variable(x) else frozenset() for x in equation.invars
    ]
    found.update(zip(equation.outvars, _results_made_of(equation, operands), strict=True))
  return found


def _results_made_of(equation, operands):
  """Returns of each result of an equation the union of the sets of operands that it is made of."""
  call = call_of(equation)
  if call is None or call.kind == "shard_map":
    return [frozenset().union(*operands)] * len(equation.outvars)
  bodies, always = [opened(jaxpr)[0] for jaxpr in call.jaxprs], frozenset()
  if call.kind == "cond":
    always, *operands = operands
  sources = [_sources_of_results(body) for body in bodies]
  results = [always] * len(equation.outvars)
  first = num_carry = 0
  if call.kind == "scan":
    first, num_carry = scan_counts(equation)
  while True:
    before = results
    for of_body in sources:
      pairs = zip(results, of_body, strict=True)
      results = [known.union(*(operands[i] for i in indices)) for known, indices in pairs]
    carried = map(frozenset.union, operands[first : first + num_carry], results)
    operands[first : first + num_carry] = carried  # To the next turn.
    if results == before:
      return results


def _sources_of_results(jaxpr):
  """Returns the numbers of the arguments that each result of a jaxpr is made of."""
  found = made_of(jaxpr)
  return [found.get(x, ()) if is_variable(x) else () for x in jaxpr.outvars]


def without_unused(jaxpr: Any, is_used: Sequence[bool]) -> tuple[Any, list[bool]]:
  """Drops what only results are made of that are not used.

  Args:
    jaxpr: any.
    is_used: of each of its results.

  Returns:
    The jaxpr from the arguments that are left to the results that are used, and of each argument
    whether it is left.
  """
  return partial_eval.dce_jaxpr(jaxpr, list(is_used))


def variables_read(equations: Sequence[Any]) -> list[Any]:
  """Returns the variables that equations read and do not make, each once."""
  made = {variable for equation in equations for variable in equation.outvars}
  read = (x for equation in equations for x in equation.invars if is_variable(x))
  return [variable for variable in dict.fromkeys(read) if variable not in made]


def variables_made(equations: Sequence[Any]) -> list[Any]:
  """Returns the variables that equations make."""
  made = (variable for equation in equations for variable in equation.outvars)
  return [variable for variable in made if type(variable).__name__ != "DropVar"]


def evaluate(
  jaxpr: Any,
  equations: Sequence[Any],
  values: dict[Any, Any],
  rule_of: Callable[[Any], Callable[..., Sequence[Any]] | None],
) -> None:
  """Evaluates equations of a jaxpr, some of them by rules.

  Args:
    jaxpr: that they are of.
    equations: some of its equations, in their order.
    values: of the variables that they read; those that they make are added.
    rule_of: gives a function of the operands of an equation by which to evaluate it, or None.
  """
  with_rules = [(rule_of(equation), equation) for equation in equations]
  for has_rule, stretch in itertools.groupby(with_rules, lambda pair: pair[0] is not None):
    rules, equations = zip(*stretch, strict=True)
    if not has_rule:
      values.update(_evaluate_plainly(jaxpr, equations, values))
      continue
    for rule, equation in zip(rules, equations, strict=True):
      operands = [values[x] if is_variable(x) else x.val for x in equation.invars]
      name_stack = current_name_stack() + equation.source_info.name_stack
      traceback = equation.source_info.traceback
      with user_context(traceback, name_stack=name_stack), equation.ctx.manager:
        values.update(zip(equation.outvars, rule(*operands), strict=True))


def _evaluate_plainly(jaxpr, equations, values):
  read, made = variables_read(equations), variables_made(equations)
  change = {"constvars": [], "invars": read, "outvars": made, "eqns": list(equations)}
  part = jaxpr.replace(**change, debug_info=jaxpr.debug_info.with_unknown_names())
  outs = jax.core.eval_jaxpr(part, (), *(values[variable] for variable in read))
  return dict(zip(made, outs, strict=True))


def _name_and_params(equation):
  inner = equation.params.get("_prim")  # Of later jaxes, for what has types of its own.
  if inner is None:
    return equation.primitive.name, equation.params
  return type(inner).__name__, inner.params
