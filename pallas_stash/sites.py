"""Sites: where in the jaxpr of a function rows are pushed, and what part of it that takes."""

from collections.abc import Iterator
import functools
import itertools
from typing import Any, NamedTuple

from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from pallas_stash.arguments import describe
from pallas_stash.jaxprs import (
  Call,
  call_of,
  evaluate,
  inner_jaxprs,
  is_variable,
  line_of,
  name_given_by,
  opened,
  variables_made,
  variables_read,
)
from pallas_stash.policies import (
  mark_number,
  MarkName,
  name_in_mark,
  policy_of_site,
  read_mark,
  save_in_stash,
)
from pallas_stash.ragged import RaggedRows
from pallas_stash.residuals import why_not_stashed
from pallas_stash.stashed_call import StashedCall

# These need no residuals. A site ends before a sum over devices that only these are behind: devices
# that add up what it gives need not agree on what it recomputes.
_LINEAR = frozenset(
  {
    *("add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "name"),
    *("neg", "pad", "psum", "psum_invariant", "pvary", "reduce_scatter", "reduce_sum", "reshape"),
    *("sharding_constraint", "slice", "squeeze", "sub", "transpose", "unreduced_psum"),
  }
)

# What only changes how a value is seen.
_SAME_ROWS = frozenset({"convert_element_type", "copy", "name", "reduce_precision", "reshape"})

# They name axes, and devices along them exchange nothing.
_ALONE = frozenset({"axis_index", "pcast", "pvary"})


class _Event(NamedTuple):
  """A mark or a value for the stash: in which equation of the function, and what it says."""

  index: int
  mark: MarkName | None
  name: str | None
  equation: Any


def policy_in(call: Call | None, policy: save_in_stash | None) -> save_in_stash | None:
  """Returns the policy that decides inside of a call, if it is one with a stash.

  Raises:
    ValueError: for a `save_in_stash` that is hidden in another policy.
  """
  if call is None or call.kind != "checkpoint":
    return policy
  policy = call.params["policy"]
  if isinstance(policy, save_in_stash):
    return policy
  cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
  cells += [*getattr(policy, "args", ()), *getattr(policy, "keywords", {}).values()]
  for value in cells:
    for part in value if isinstance(value, tuple | list) else [value]:
      if isinstance(part, save_in_stash):
        raise ValueError(
          f"{part} is a part of the policy {describe(policy)}, and must be the policy itself:"
          " save_in_stash(*names, policy=others)."
        )
  return None


def has_stashed(equation: Any, policy: save_in_stash | None) -> bool:
  """Returns whether values for the stash are named in what an equation calls."""
  policy = policy_in(call_of(equation), policy)
  return any(
    (policy is not None and name_given_by(inner) in policy.names) or has_stashed(inner, policy)
    for jaxpr in inner_jaxprs(equation)
    for inner in jaxpr.eqns
  )


def find_site(jaxpr: Any, policy: save_in_stash | None) -> "Site | None":
  """Returns the site that a function is, None if it is none itself.

  It is the innermost function that marks rows and names values for the stash, by itself or in those
  under `jax.jit` that it calls.

  Args:
    jaxpr: of the function.
    policy: of the `jax.checkpoint` around it.

  Raises:
    ValueError: for values that no mark is for, and whatever else cannot be stashed as it says.
  """
  if policy is None or not any(event.name for event in _own_events(jaxpr, policy)):
    return None
  return Site(jaxpr, policy)


def _own_events(jaxpr, policy):
  """Returns the events in a function, but those in called functions that are sites themselves."""
  events = []
  for _, group in itertools.groupby(_events(jaxpr, policy), lambda event: event.index):
    group = list(group)
    is_direct = group[0].equation is jaxpr.eqns[group[0].index]
    is_whole = any(event.name for event in group) and any(event.mark for event in group)
    if is_direct or not is_whole:
      events += group
  return events


def _events(jaxpr: Any, policy: save_in_stash, index: int | None = None) -> Iterator[_Event]:
  """Returns the events in a function and those that it calls by `jax.jit`, in their order."""
  for own_index, equation in enumerate(jaxpr.eqns):
    at = own_index if index is None else index
    name, call = name_given_by(equation), call_of(equation)
    if mark := read_mark(name):
      yield _Event(at, mark, None, equation)
    elif name in policy.names:
      yield _Event(at, None, name, equation)
    elif call and call.kind == "jit":
      yield from _events(opened(call.jaxprs[0])[0], policy, at)


class Site:
  """A function whose rows are pushed, and in it the part that is called with the stash.

  Attributes:
    invars, outvars: the variables that this part reads, and those that it makes and others read.
    before, after: the equations that are evaluated before and after it.
    call: the part itself, of values of `invars`, to those of `outvars`.
    names: of the values for the stash.
  """

  def __init__(self, jaxpr: Any, policy: save_in_stash):
    self._jaxpr, self._policy = jaxpr, policy
    events = list(_events(jaxpr, policy))
    _refuse_inner_sites(jaxpr, policy)
    marks = [event for event in events if event.mark and not event.mark.is_starts]
    self._num_marks = len(marks)
    self._tags = list(_tags(events, marks, policy.host_names))
    self.names = {event.name for event in events if event.name}
    start, end = _extent(jaxpr, events)
    self._equations = jaxpr.eqns[start:end]
    self.before, self.after = jaxpr.eqns[:start], jaxpr.eqns[end:]
    self.invars = variables_read(self._equations)
    read = {*variables_read(self.after), *filter(is_variable, jaxpr.outvars)}
    self.outvars = [v for v in variables_made(self._equations) if v in read]
    axes = sorted(_collective_axes(self._equations))
    self.call = StashedCall(
      f"the function at {line_of(events[0].equation)}",
      self.run,
      policy=policy_of_site(policy),
      mark_of=mark_number,
      is_on_host=self.is_on_host,
      axis_name=tuple(axes) or None,
    )

  def is_on_host(self, mark: int) -> bool:
    """Returns whether the rows of a mark are for host memory: of each there is another for that."""
    return mark >= self._num_marks

  def run(self, *operands):
    """Evaluates the part; returns the values of `outvars`, and the marks."""
    values, marks, tags = dict(zip(self.invars, operands, strict=True)), [], iter(self._tags)

    def rule_of(equation):
      name, call = name_given_by(equation), call_of(equation)
      if mark := read_mark(name):
        return functools.partial(note, mark)
      if name in self._policy.names:
        return lambda value: [checkpoint_name(value, next(tags))]
      if call and call.kind == "jit" and _has_events(call, self._policy):
        return functools.partial(run, *opened(call.jaxprs[0]))
      return None

    def note(mark, value):
      if mark.is_starts:
        value, sizes = marks.pop().group_sizes, value
        marks.append(RaggedRows(value, mark.total_rows, sizes))
      else:
        marks.append(RaggedRows(value, mark.total_rows))
      return [value]

    def run(jaxpr, consts, *operands):
      inner = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
      evaluate(jaxpr, jaxpr.eqns, inner, rule_of)
      return [inner[x] if is_variable(x) else x.val for x in jaxpr.outvars]

    evaluate(self._jaxpr, self._equations, values, rule_of)
    marks = tuple(marks) * (2 if self._policy.host_names else 1)
    return [values[variable] for variable in self.outvars], marks


def _has_events(call, policy):
  return any(True for _ in _events(opened(call.jaxprs[0])[0], policy))


def _refuse_inner_sites(jaxpr, policy):
  for equation in jaxpr.eqns:
    call = call_of(equation)
    if call and call.kind == "jit":
      _refuse_inner_sites(opened(call.jaxprs[0])[0], policy)
    elif has_stashed(equation, policy):
      raise ValueError(
        f"A function that names values for the stash itself also does so in {equation.primitive}"
        f" ({line_of(equation)}): the rows of both cannot be marked in one function. Put what names"
        " values beside it into a function of its own, under jax.jit."
      )


def _tags(events, marks, host_names):
  """Returns the name of each value for the stash with the number of its mark, as `Site.run` has."""
  for event in marks:
    if len(event.equation.outvars[0].aval.shape) != 1:
      raise ValueError(
        f"mark_rows at {line_of(event.equation)} is under vmap: rows of several examples cannot be"
        " in one stash. Call `threaded` inside of vmap, or do without it there."
      )
  num_seen = 0
  for event in events:
    if event.mark:
      num_seen += not event.mark.is_starts
      continue
    aval, line = event.equation.outvars[0].aval, line_of(event.equation)
    what = f"{event.name!r}, {aval.dtype}{list(aval.shape)} ({line}), is for the stash"
    if not marks:
      raise ValueError(
        f"{what}, and no function around it, up to jax.checkpoint or a loop or shard_map in it,"
        " says which rows hold something: call mark_rows(RaggedRows(...)) where it is made."
      )
    fitting = [i for i, e in enumerate(marks) if not why_not_stashed(aval, e.mark.total_rows)]
    if not fitting:
      reason = why_not_stashed(aval, marks[max(num_seen - 1, 0)].mark.total_rows)
      raise ValueError(f"{what}, and cannot be: it {reason}.")
    before = [mark for mark in fitting if mark < num_seen]
    mark = before[-1] if before else fitting[0]
    yield name_in_mark(event.name, mark + len(marks) * (event.name in host_names))


def _extent(jaxpr, events):
  """Returns the first equation that is called with the stash, and the first one behind.

  With the exchange of tokens around it a `shard_map` would be right as well, but add up cotangents
  of devices in another order than saving does.
  """
  start = marked = min(event.index for event in events if event.mark)
  made_in = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
  # What is named was made after its rows are marked: if not, it starts where its rows are made.
  waiting = [event.index for event in events if event.name]
  seen = set()
  while waiting:
    index = waiting.pop()
    equation = jaxpr.eqns[index]
    is_view = equation.primitive.name in _SAME_ROWS or name_given_by(equation) is not None
    if index in seen or (index >= marked and not is_view):
      continue
    seen.add(index)
    rows = {v.aval.shape[:1] for v in equation.outvars if _is_rows(v.aval)}
    for x in filter(is_variable, equation.invars):
      if x in made_in and _is_rows(x.aval) and x.aval.shape[:1] in rows:
        waiting.append(made_in[x])
    start = min(start, index)
  last, end = max(event.index for event in events), len(jaxpr.eqns)
  for index in range(end - 1, last, -1):
    if jaxpr.eqns[index].primitive.name not in _LINEAR:
      break
    if _collective_axes([jaxpr.eqns[index]]):
      end = index
  return start, end


def _is_rows(aval):
  return len(aval.shape) > 1 and jnp.issubdtype(aval.dtype, jnp.inexact)


def _collective_axes(equations):
  """Returns the mesh axes along which devices exchange something in equations."""
  axes = set()
  for equation in equations:
    params, call = equation.params, call_of(equation)
    if equation.primitive.name not in _ALONE:
      for names in (params.get("axes", ()), params.get("axis_name", ())):
        names = names if isinstance(names, tuple | list) else (names,)
        axes |= {name for name in names if isinstance(name, str)}
    inner = set().union(*(_collective_axes(jaxpr.eqns) for jaxpr in inner_jaxprs(equation)))
    if call and call.kind == "shard_map":
      inner -= set(call.params["newly_manual_axes"])
    axes |= inner
  return axes
