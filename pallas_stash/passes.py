"""The forward and the backward pass of a function as two functions, for pipeline schedules.

In a pipeline the passes of different microbatches alternate in one program, and the stash flows
forward in time with them: each forward pass adds rows to it, and each backward pass reads and frees
its own. That is the derivative that `seal` starts, too: here the cotangent of the stash that a
function returned is the stash of now, with the count of pushes that the function left behind; and
the cotangent of the stash that it took is the one that flows on.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from pallas_stash.arguments import check_type, describe
from pallas_stash.explanation import aligned
from pallas_stash.handover import handed_over
from pallas_stash.residuals import Residual, Residuals, trace_forward
from pallas_stash.stash import Stash


class Saved(NamedTuple):
  """What a forward pass leaves to its backward pass beside the rows in the stash.

  Attributes:
    values: what the function keeps and cannot be had from its arguments.
    before, after: int32[shards], the pushes before the pass and behind it, as `Slot.number` counts.
  """

  values: tuple[jax.Array, ...]
  before: jax.Array
  after: jax.Array


def split_passes(fun: Callable[..., tuple[Any, Stash]]) -> tuple["ForwardPass", "BackwardPass"]:
  """Splits a function that threads a stash into its forward and its backward pass.

      forward, backward = split_passes(stage)  # stage(stash, *args) -> (out, stash)

      out, stash, saved = forward(stash, *args)
      ...  # Passes of other microbatches, in any order if the stash has pages.
      stash, gradients = backward(stash, saved, d_out, *args)

  A backward pass frees the pages of its rows. Without pages it frees nothing: `reset` the stash
  behind the backward passes of all that is in it.

  Only those results of a backward pass are computed that are used. For gradients of the input early
  and of the weights late, call it twice, each time with the stash of then, and go on with the stash
  of the second call alone; gradients with respect to rows are computed in both.

  Args:
    fun: `(stash, *args) -> (out, stash)`: functions that `checkpoint` returned, `gmm`,
      `grouped_mlp`, and anything that `jax.vjp` differentiates around them, but not `seal`. It may
      close over constants; what is traced belongs to `args`.

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
      are recomputed as often as one likes.

  Raises:
    ValueError: for a `fun` that is no function; and by the passes, for what is no stash, a `fun`
      that closes over traced values, and a `saved` or `d_out` that is not of such arguments.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function: (stash, *args) -> (out, stash).")

  def vjp(stash, *args):
    (out, after), pull_back = jax.vjp(fun, stash, *args)
    check_type("the second result", after, Stash, "the Stash: (out, stash)")
    return (out, after), pull_back

  return ForwardPass(vjp), BackwardPass(vjp)


@dataclasses.dataclass(frozen=True)
class ForwardPass:
  """The forward pass that `split_passes` returns, which tells what is called with what."""

  vjp: Callable[..., Any]

  def __call__(self, stash: Stash, *args: Any) -> tuple[Any, Stash, Saved]:
    found = _find(self.vjp, stash, args)
    (out, after), leaves = found.forward.evaluate((stash, *args))
    saved = Saved(found.take("ordinary", leaves), stash.counters.pushes, after.counters.pushes)
    return out, after, saved

  def explain(self, stash: Stash, *args: Any) -> "PassExplanation":
    """Tells what the pass saves. Print it to see a table.

    Args:
      stash, *args: as of the call, or `jax.ShapeDtypeStruct`s in place of arrays.
    """
    found = _find(self.vjp, stash, args)
    jaxpr, count = found.forward.jaxpr, len(jax.tree.leaves(stash))
    made_of = {variable: {index - count} for index, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
      used = [made_of.get(x, set()) for x in equation.invars if not isinstance(x, jex.Literal)]
      made_of |= dict.fromkeys(equation.outvars, set().union(*used))
    names = _paths(args)
    name = lambda index: names[index] if index >= 0 else "stash"
    saved = [
      (residual, tuple(dict.fromkeys(map(name, sorted(made_of[variable])))))
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
    found = _find(self.vjp, stash, args)
    expected = [(r.shape, r.dtype) for r in found.of_kind("ordinary")]
    if not isinstance(saved, Saved) or [(x.shape, x.dtype) for x in saved.values] != expected:
      shapes = [f"{dtype}{list(shape)}" for shape, dtype in expected]
      given = describe(saved.values) if isinstance(saved, Saved) else describe(saved)
      raise ValueError(
        f"saved={given} must be what the forward pass saves of such arguments: {shapes}."
      )
    pull_back = found.rebuild((stash, *args), (), saved.values)
    contents = stash.as_cotangent(handed_over(saved.after) + stash.canary)
    d_stash, *gradients = pull_back((d_out, _with_zeros(contents, stash)))
    return _after_backward(stash, d_stash, handed_over(saved.before)), tuple(gradients)


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


def _with_zeros(contents, stash):
  """Returns the cotangent of a stash with the zeros of its integers, as `jax.vjp` wants it."""
  zeros = lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0)
  given = dict(jax.tree_util.tree_leaves_with_path(contents))
  choose = lambda path, leaf: given[path] if path in given else zeros(leaf)
  return jax.tree_util.tree_map_with_path(choose, stash)


def _after_backward(stash, d_stash, expected):
  """Returns the stash with the contents of a cotangent; broken unless its count is as expected."""
  is_of_integer = lambda leaf: leaf.dtype == jax.dtypes.float0
  choose = lambda leaf, d_leaf: leaf if is_of_integer(d_leaf) else d_leaf
  after = jax.tree.map(choose, stash, d_stash)
  canary = jnp.where(after.canary == expected, stash.canary, jnp.nan)
  return dataclasses.replace(after, canary=canary)
