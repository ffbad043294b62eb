"""The forward and the backward pass of a function as two functions, for pipeline schedules.

In a pipeline the passes of different microbatches alternate in one program, and the stash flows
forward in time with them: each forward pass adds rows to it, and each backward pass reads and frees
its own. That is the derivative that `seal` starts, too: here the cotangent of the stash that a
function returned is the stash of now, with the count of pushes that the function left behind; and
the cotangent of the stash that it took is the one that flows on.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import tiers
from pallas_stash.arguments import check_type, describe
from pallas_stash.explanation import aligned
from pallas_stash.handover import handed_over
from pallas_stash.jaxprs import is_variable, made_of, without_unused
from pallas_stash.pushed_rows import all_along
from pallas_stash.residuals import Residual, Residuals, trace_forward
from pallas_stash.stash import Stash


class Saved(NamedTuple):
  """What a forward pass leaves to its backward pass beside the rows in the stash.

  Attributes:
    values: what the function keeps and cannot be had from its arguments.
    before, after: int32[shards], the pushes before the pass and behind it, as `Slot.number` counts.
    is_stored: bool[shards], whether every push of the pass was stored, on all devices along
      `axis_name`.
  """

  values: tuple[jax.Array, ...]
  before: jax.Array
  after: jax.Array
  is_stored: jax.Array


def split_passes(
  fun: Callable[..., tuple[Any, Stash]], *, axis_name: Any = None
) -> tuple["ForwardPass", "BackwardPass"]:
  """Splits a function that threads a stash into its forward and its backward pass.

      forward, backward = split_passes(stage)  # stage(stash, *args) -> (out, stash)

      out, stash, saved = forward(stash, *args)
      ...  # Passes of other microbatches, in any order if the stash has pages.
      stash, gradients = backward(stash, saved, d_out, *args)

  A backward pass frees the pages of its rows. Without pages it frees nothing: `reset` the stash
  behind the backward passes of all that is in it.

  For gradients of inputs early and of weights late, as in zero-bubble pipelines, a backward pass is
  also there in two halves, of a stash with pages. What `late` needs `early` leaves in the stash:

      stash, gradients = backward.early(stash, saved, d_out, *args)
      ...  # Passes of other microbatches.
      stash, others = backward.late(stash, saved, d_out, *args)

  Late are the gradients of what functions that `checkpoint` made have as `late_argnames`. Of each
  leaf of `args`, one of the halves gives the gradient, and the other None. If all pushes of the
  forward pass were stored, no matmul that makes rows is in both, but in loops and branches inside
  of such a function; if not, `late` is all of the backward pass again.

  Args:
    fun: `(stash, *args) -> (out, stash)`: functions that `checkpoint` returned, `gmm`,
      `grouped_mlp`, and anything that `jax.vjp` differentiates around them, but not `seal`. It may
      close over constants; what is traced belongs to `args`.
    axis_name: mesh axis or axes of the collectives in `fun`, and of those that its derivative has:
      with `check_vma`, the axes over which an argument does not vary. Their devices must agree on
      whether `late` is all of the backward pass.

  Returns:
    forward: `(stash, *args) -> (out, stash, saved)`. `saved` is a pytree of arrays whose shapes
      follow from those of the arguments, so that a carry can hold those of several microbatches. No
      argument is in it, nor a value that equals one. What is made of weights alone is, once for
      each pass, a cast for example: put that under a `jax.checkpoint`. Print
      `forward.explain(stash, *args)` to see what there is.
    backward: `(stash, saved, d_out, *args) -> (stash, gradients)`, of the arguments that the
      forward pass was given and the stash of now; `gradients` has an entry for each of `args`, of
      dtype `float0` for integers. If the rows of the pass are not in that stash, all that is made
      of them is NaN, and so is all that is read from it later: in a second backward pass of the
      same `saved`, whose pages are free by then, or with another stash. Rows that were not stored
      are recomputed as often as one likes. `late` without `early` before it, and whatever is called
      in place of `late` behind it, finds no rows either.

  Raises:
    ValueError: for a `fun` that is no function; and by the passes, for what is no stash, a `fun`
      that closes over traced values, a `saved` or `d_out` that is not of such arguments, and
      halves of a stash without pages or of an argument of whose gradient a part is late.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function: (stash, *args) -> (out, stash).")

  def run(stash, *args):
    out, after = fun(stash, *args)
    check_type("the second result", after, Stash, "the Stash: (out, stash)")
    # Integers have no cotangents to be given.
    return (out, list(filter(_is_float, jax.tree.leaves(after)))), after

  def vjp(stash, *args):
    (out, _), pull_back, after = jax.vjp(run, stash, *args, has_aux=True)
    return (out, after), pull_back

  return ForwardPass(vjp, axis_name), BackwardPass(vjp)


@dataclasses.dataclass(frozen=True)
class ForwardPass:
  """The forward pass that `split_passes` returns, which tells what is called with what."""

  vjp: Callable[..., Any]
  axis_name: Any

  def __call__(self, stash: Stash, *args: Any) -> tuple[Any, Stash, Saved]:
    found = _find(self.vjp, stash, args)
    (out, after), leaves = found.forward.evaluate((stash, *args))
    before, behind = stash.counters, after.counters
    is_stored = all_along(self.axis_name, behind.not_stored() == before.not_stored())
    saved = found.take("ordinary", leaves), before.pushes, behind.pushes, is_stored
    return out, after, Saved(*saved)

  def explain(self, stash: Stash, *args: Any) -> "PassExplanation":
    """Tells what the pass saves. Print it to see a table.

    Args:
      stash, *args: as of the call, or `jax.ShapeDtypeStruct`s in place of arrays.
    """
    found = _find(self.vjp, stash, args)
    names = ["stash"] * len(jax.tree.leaves(stash)) + _paths(args)
    arguments = made_of(found.forward.jaxpr)
    saved = [
      (residual, tuple(dict.fromkeys(names[index] for index in sorted(arguments[variable]))))
      for residual, variable in zip(found.different, found.variables, strict=True)
      if residual.kind == "ordinary"
    ]
    return PassExplanation(tuple(saved))


@dataclasses.dataclass(frozen=True)
class BackwardPass:
  """The backward pass that `split_passes` returns, which tells what is called with what."""

  vjp: Callable[..., Any]

  def __call__(
    self, stash: Stash, saved: Saved, d_out: Any, *args: Any
  ) -> tuple[Stash, tuple[Any, ...]]:
    return self._run("all", stash, saved, d_out, args)

  def early(
    self, stash: Stash, saved: Saved, d_out: Any, *args: Any
  ) -> tuple[Stash, tuple[Any, ...]]:
    """Runs the first half: returns the stash, and the gradients but those that are late.

    Args are those of the whole pass. Of integers, too, the gradient is None.

    Raises:
      ValueError: as `split_passes` says, for a stash without pages too.
    """
    given = stash, saved, d_out, args
    half, are_late = self._part("early", given), _are_late(self._part("late", given))
    are_early = half.are_made_of((True, False, True, False))
    paths = zip(_paths(args), jax.tree.leaves(args), strict=True)
    paths = [path for path, leaf in paths if _is_float(leaf)]
    for path, is_late, is_early in zip(paths, are_late, are_early, strict=True):
      if is_late and is_early:
        raise ValueError(
          f"{path} has a gradient of which a part is late and a part is not: wherever it is used,"
          " it must be an argument of a function of `checkpoint` that has it in late_argnames."
        )
    return half.evaluate([not is_late for is_late in are_late])

  def late(
    self, stash: Stash, saved: Saved, d_out: Any, *args: Any
  ) -> tuple[Stash, tuple[Any, ...]]:
    """Runs the second half: returns the stash, and the late gradients.

    Args are those of the whole pass, the stash is that of now. `d_out` is read only where some push
    of the forward pass was not stored.

    Raises:
      ValueError: as `split_passes` says, for a stash without pages too.
    """
    given = stash, saved, d_out, args
    half, again = (self._part(part, given) for part in ("late", "again"))
    are_late = _are_late(half)
    run_half, run_again = (lambda part=part: part.evaluate(are_late) for part in (half, again))
    return lax.cond(jnp.all(saved.is_stored), run_half, run_again)

  def _part(self, part, given):
    check_type("stash", given[0], Stash, "the Stash that the passes thread")
    if given[0].page_rows is None:
      raise ValueError(f"stash={given[0]} must have pages for a backward pass in two halves.")
    return _Part(functools.partial(self._run, part), given)

  def _run(self, part, stash, saved, d_out, args):
    """Runs a part of the pass; gradients that do not belong to it are zero."""
    check_type("stash", stash, Stash, "the Stash that the passes thread")
    stash = dataclasses.replace(stash, part=part)
    found = _find(self.vjp, stash, args)
    expected = [(r.shape, r.dtype) for r in found.of_kind("ordinary")]
    if not isinstance(saved, Saved) or [(x.shape, x.dtype) for x in saved.values] != expected:
      shapes = [f"{dtype}{list(shape)}" for shape, dtype in expected]
      given = describe(saved.values) if isinstance(saved, Saved) else describe(saved)
      raise ValueError(
        f"saved={given} must be what the forward pass saves of such arguments: {shapes}."
      )
    stash = tiers.settled(stash)  # Passes read their heads in any order.
    pull_back = found.rebuild((stash, *args), (), saved.values)
    contents = stash.as_cotangent(handed_over(saved.after) + stash.canary)
    d_stash, *gradients = pull_back((d_out, jax.tree.leaves(contents)))
    stash = _after_backward(stash, d_stash, handed_over(saved.before))
    return dataclasses.replace(stash, part="all"), tuple(gradients)


class _Part:
  """A part of a backward pass, traced, of which only some gradients are computed."""

  def __init__(self, run, given):
    """Traces `run(*given)`, which returns the stash and gradients."""

    def run_for_floats(*given):
      stash, gradients = run(*given)
      is_float0 = lambda d: d.dtype == jax.dtypes.float0
      return stash, jax.tree.map(lambda d: None if is_float0(d) else d, gradients)

    closed, out = jax.make_jaxpr(run_for_floats, return_shape=True)(*given)
    self._jaxpr, self._consts = closed.jaxpr, closed.consts
    self._given, self._structure = given, jax.tree.structure(out)
    self._num_gradients = len(jax.tree.leaves(out[1]))

  def are_made_of(self, is_of: Sequence[bool]) -> list[bool]:
    """Returns of each gradient whether it is made of any of what was given, for which `is_of`."""
    pairs = zip(is_of, self._given, strict=True)
    flags = [flag for flag, tree in pairs for _ in jax.tree.leaves(tree)]
    found, outs = made_of(self._jaxpr), self._jaxpr.outvars
    gradients = outs[len(outs) - self._num_gradients :]
    sources = [found.get(x, ()) if is_variable(x) else () for x in gradients]
    return [any(flags[index] for index in of_one) for of_one in sources]

  def evaluate(self, is_wanted: Sequence[bool]) -> Any:
    """Returns the results, None for the gradients that are not wanted."""
    is_wanted = [True] * (len(self._jaxpr.outvars) - self._num_gradients) + list(is_wanted)
    jaxpr, is_used = without_unused(self._jaxpr, is_wanted)
    leaves = zip(jax.tree.leaves(self._given), is_used, strict=True)
    leaves = [leaf for leaf, used in leaves if used]
    outs = iter(jax.core.eval_jaxpr(jaxpr, self._consts, *leaves))
    return jax.tree.unflatten(self._structure, [next(outs) if is_ else None for is_ in is_wanted])


def _are_late(late):
  """Returns of each gradient whether it is of the late half, a `_Part`."""
  # Late is what is made of the stash; what is made of other things alone is zero there.
  return late.are_made_of((True, False, False, False))


@dataclasses.dataclass(frozen=True)
class PassExplanation:
  """What a forward pass saves beside the rows in the stash: printed, a table.

  Attributes:
    saved: of each value, the `Residual` and which arguments it is made of.
  """

  saved: tuple[tuple[Residual, tuple[str, ...]], ...]

  def __str__(self):
    table = [("value", "made by", "made of", "shape", "dtype", "MB", "line")]
    for r, of in self.saved:
      size, line = f"{r.num_bytes / 1e6:,.3f}", (r.source or "-").rpartition("/")[2]
      made_of = ", ".join(of) or "-"
      table.append(
        (r.name or "-", r.operation, made_of, str(list(r.shape)), str(r.dtype), size, line)
      )
    total = sum(r.num_bytes for r, _ in self.saved)
    return "\n".join([*aligned(table), f"Saved for each pass in flight: {total / 1e6:,.3f} MB."])


def _find(vjp, stash, args):
  """Returns the `Residuals` of a pass."""
  check_type("stash", stash, Stash, "the Stash that the passes thread")
  forward = trace_forward(vjp, stash, *args)
  if traced := [const for const in forward.consts if isinstance(const, jax.core.Tracer)]:
    # The other pass may be in another branch or another turn, where they do not exist.
    raise ValueError(
      f"The function closes over traced values, {', '.join(str(jax.typeof(c)) for c in traced)};"
      " they must be passed as arguments."
    )
  # Of the stash there is another one by the time of the backward pass.
  num_transient = len(jax.tree.leaves(stash))
  labels = [""] * num_transient + _paths(args)
  return Residuals(forward, [], lambda name: None, labels, num_transient)


def _paths(args):
  paths = jax.tree_util.tree_leaves_with_path(args)
  return [f"args{jax.tree_util.keystr(path)}" for path, _ in paths]


def _is_float(leaf):
  return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _after_backward(stash, d_stash, expected):
  """Returns the stash with the contents of a cotangent; broken unless its count is as expected."""
  is_of_integer = lambda leaf: leaf.dtype == jax.dtypes.float0
  choose = lambda leaf, d_leaf: leaf if is_of_integer(d_leaf) else d_leaf
  after = jax.tree.map(choose, stash, d_stash)
  canary = jnp.where(after.canary == expected, stash.canary, jnp.nan)
  return dataclasses.replace(after, canary=canary)
