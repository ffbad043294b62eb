"""What a whole training step keeps for its backward pass: `explain`."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.extend.core as jex

from pallas_stash.arguments import check_arguments, describe, paths_of
from pallas_stash.explanation import aligned, num_bytes
from pallas_stash.origins import origin_of, outermost, PUSHES, pushes_of
from pallas_stash.policies import plain_name
from pallas_stash.residuals import trace_forward

SMALL = 1e-3  # Of all that is kept: less than this part of it is printed in one line.


@dataclasses.dataclass(frozen=True)
class Kept:
  """A value that is kept from the forward pass of a step to its backward pass.

  Attributes:
    name: its `checkpoint_name`; of a stash, those of what is pushed; or None.
    operation: what makes it: a primitive, or which argument it is. "carry" is what a layer of a
      loop is given by the one before.
    loops: lengths of the loops over layers that it is kept of, the outermost first; of a stash, and
      outside of loops, none.
    shape: of one layer, on all devices.
    dtype: of the value.
    kind: "weights", an argument of the function, which is there anyway, or slices of one, a copy if
      a loop stacks them; "stash"; "constant", which is part of the program; or "activation".
    place: "device" or "host".
    worst_case_bytes: of a stash, those of all rows that could be pushed; else its own.
    source: the line of the program that names it, or else that makes it, where that is known.
  """

  name: str | None
  operation: str
  loops: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: Any
  kind: Literal["weights", "activation", "stash", "constant"]
  place: Literal["device", "host"]
  worst_case_bytes: int
  source: str | None

  @property
  def layer_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def num_bytes(self) -> int:
    return math.prod(self.loops) * self.layer_bytes


@dataclasses.dataclass(frozen=True)
class StepExplanation:
  """What a step keeps: printed, a table. All sizes are those of all devices that it runs on.

  Attributes:
    kept: each value once.
    argument_bytes: of all arguments, needed in the backward pass or not.
  """

  kept: tuple[Kept, ...]
  argument_bytes: int

  def of_kind(self, kind: str, place: str | None = None) -> list[Kept]:
    """Returns what is kept of a kind, in a place if one is given."""
    return [k for k in self.kept if k.kind == kind and place in (None, k.place)]

  def __str__(self):
    least = SMALL * sum(k.num_bytes for k in self.kept)
    shown = [k for k in self.kept if k.num_bytes >= least]
    small = [k for k in self.kept if k.num_bytes < least]
    header = "loop", "value", "of a layer", "MB each", "MB", "worst case", "kind", "in", "line"
    table = [header, *map(_cells, shown)]
    lines = aligned(table)
    if small:
      lines.append(f"and {len(small)} small ones, {_megabytes(_total(small))} MB")
    size = lambda *which: f"{_megabytes(_total(self.of_kind(*which)))} MB"
    given, stashes = f"{_megabytes(self.argument_bytes)} MB", self.of_kind("stash")
    lines.append(f"Weights: {size('weights')}, of {given} of arguments.")
    of_host = (
      f", {size('activation', 'host')} on the host" if self.of_kind("activation", "host") else ""
    )
    lines.append(f"Activations: {size('activation', 'device')} on the device{of_host}.")
    if stashes:
      worst = _megabytes(sum(k.worst_case_bytes for k in stashes))
      lines.append(f"Stash: {size('stash')}, for {worst} MB at worst case.")
    return "\n".join(lines)


def explain(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> StepExplanation:
  """Tells what a training step keeps from its forward pass to its backward pass.

      print(explain(loss, params, batch))

  It traces the gradient of the function, of all that it returns and by all its arguments, and runs
  nothing. What the compiler keeps beside that, such as what a layer restores, it does not tell.

  Args:
    fun: what is differentiated: any function of pytrees of arrays, in which there may be stashes,
      `threaded`, scans, `shard_map`, and `jax.checkpoint` with its policies.
    *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in place of arrays.

  Returns:
    A `StepExplanation`. Print it to see a table.

  Raises:
    ValueError: for a `fun` that is no function, or arguments that are no arrays.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function.")
  check_arguments(args, kwargs)
  forward = trace_forward(
    lambda *operands: jax.vjp(lambda a, k: fun(*a, **k), *operands), args, kwargs
  )
  jaxpr, labels = forward.jaxpr, paths_of(args, kwargs)
  scope, kept = outermost(jaxpr), {}
  for leaf in jaxpr.outvars[forward.result.num_leaves :]:
    if not isinstance(leaf, jex.Literal) and leaf not in kept:
      kept[leaf] = _kept(leaf, scope, labels)
  leaves = jax.tree.leaves((args, kwargs))
  return StepExplanation(tuple(kept.values()), sum(map(num_bytes, map(jax.typeof, leaves))))


def _kept(leaf, scope, labels):
  origin, aval = origin_of(leaf, scope), leaf.aval
  name, line, worst_case, kind = plain_name(origin.name), origin.line, None, "activation"
  operation = origin.operation or "constant"
  if origin.variable in scope.jaxpr.invars:
    kind, operation = "weights", labels[scope.jaxpr.invars.index(origin.variable)]
  elif origin.operation is None:
    kind = "constant"
  elif origin.operation in PUSHES:
    pushes = list(pushes_of(leaf, scope))
    rows = [origin_of(push.invars[0], where) for push, where in pushes]
    name = " ".join(sorted({plain_name(pushed.name) for pushed in rows} - {None})) or None
    line = rows[0].line or line
    worst_case = sum(_pushed_bytes(push, where, aval) for push, where in pushes)
    kind = "stash"
  loops = origin.loops
  place = "device" if aval.memory_space == jax.memory.Space.Device else "host"
  kept = Kept(
    name, operation, loops, _shape_of_layer(aval.shape, loops), aval.dtype, kind, place, 0, line
  )
  return dataclasses.replace(kept, worst_case_bytes=worst_case or kept.num_bytes)


def _shape_of_layer(shape, loops):
  if shape[: len(loops)] == loops:
    return tuple(shape[len(loops) :])
  # Of a loop in `shard_map`, which lays devices one behind the other along the first axis.
  return shape[0] // loops[0], *shape[len(loops) :]


def _pushed_bytes(push, scope, aval):
  """Returns the bytes of one residual at worst-case size, of all times that it is pushed."""
  rows, width = push.invars[0].aval.shape[0], aval.shape[1]
  if push.primitive.name != "stash_mlp_forward":
    width = min(width, push.invars[0].aval.shape[1])  # Without what a row of a stash is padded by.
  return scope.total_times() * rows * width * aval.dtype.itemsize


def _cells(kept):
  return (
    " x ".join(map(str, kept.loops)) or "-",
    kept.name or kept.operation,
    f"{kept.dtype}{list(kept.shape)}".replace(" ", ""),
    _megabytes(kept.layer_bytes),
    _megabytes(kept.num_bytes),
    _megabytes(kept.worst_case_bytes) if kept.kind == "stash" else "-",
    kept.kind,
    kept.place,
    (kept.source or "-").rpartition("/")[2],
  )


def _megabytes(count):
  return f"{count / 1e6:,.3f}"


def _total(values):
  return sum(value.num_bytes for value in values)
