"""A call that pushes residuals of a function in the forward pass: what `checkpoint` is made of."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax

from pallas_stash.batching import batch_alike
from pallas_stash.handover import name_slot, receive, with_rules
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.ragged import RaggedRows
from pallas_stash.residuals import MarkOf, Residuals, trace_forward
from pallas_stash.stash import read_rows, Stash
from pallas_stash.storage import as_kind, match_residuals
from pallas_stash.varying import vary_over, varying_axes


class StashedCall:
  """A function of which some residuals are kept in stashes: one push for each of its marks.

  A mark is the `RaggedRows` of a part of the residuals. Marks are given with the call, or made by
  the function itself; those that are given come first.
  """

  def __init__(
    self,
    name: str,
    function: Callable[..., tuple[Any, tuple[RaggedRows, ...]]],
    *,
    policy: Callable[..., Any] | None = None,
    mark_of: MarkOf = lambda name: 0,
    axis_name: Any = None,
    padding: Padding = "zero",
    implementation: Implementation | None = None,
  ):
    """Makes one.

    Args:
      name: of the function.
      function: from operands, pytrees of arrays, to its result and the marks that it makes.
      policy: a `jax.checkpoint` policy, which decides what its residuals are; None for all.
      mark_of: gives the mark of a residual of a name, or None for one that is not stashed.
      axis_name, padding, implementation: as for `checkpoint`.
    """
    self._name, self._function, self._policy, self._mark_of = name, function, policy, mark_of
    self._axis_name = axis_name
    self._padding, self._implementation = padding, implementation
    saving = function if policy is None else jax.checkpoint(function, policy=policy)

    def vjp(*operands):
      out, vjp, made = jax.vjp(saving, *operands, has_aux=True)
      return (out, made), vjp

    self._vjp = vjp  # By the identity of this is cached what is traced of it.

  def __call__(
    self, stashes: Sequence[Stash], given: tuple[RaggedRows, ...], *operands: Any
  ) -> tuple[Any, tuple[Stash, ...]]:
    """Calls the function; returns its result, and the stashes with rows if it is differentiated.

    Args:
      stashes: where there are several, rows go to the one that is made for their residuals.
      given: marks.
      *operands: of the function.
    """
    stashed = with_rules(self._primal, self._forward, lambda pull_back, d: pull_back(*d))
    return stashed(tuple(stashes), given, *operands)

  def find_residuals(
    self, given: tuple[RaggedRows, ...], *operands: Any, labels: Sequence[str] | None = None
  ) -> Residuals:
    """Returns the residuals of a call; `labels` has a name of each leaf of the operands."""
    forward = trace_forward(self._vjp, *operands)
    _, made = jax.tree.unflatten(forward.result, [None] * forward.result.num_leaves)
    total_rows = [mark.total_rows for mark in (*given, *made)]
    if labels is None:
      labels = [f"operand {i}" for i in range(len(jax.tree.leaves(operands)))]
    return Residuals(forward, total_rows, self._mark_of, labels)

  def _primal(self, stashes, given, *operands):
    out, _ = self._function(*operands)
    return out, batch_alike(stashes, (given, operands))

  def _forward(self, stashes, given, *operands):
    found = self.find_residuals(given, *operands)
    found.require_any(self._name)
    if self._policy is not None:
      found.warn_of_misshapen()
    (out, made), leaves = found.forward.evaluate(operands)
    marks, rows = (*given, *made), found.take("stashed", leaves)
    stashes, slots = list(batch_alike(stashes, (given, operands))), []
    for mark, indices in found.pushes.items():
      home = _home(stashes, found, indices)
      options = {"axis_name": self._axis_name, "implementation": self._implementation}
      values = [rows[index] for index in indices]
      stashes[home], slot = stashes[home].push(values, marks[mark], **options)
      slots.append(name_slot(slot))
    marks = [marks[mark] for mark in found.pushes]
    saved = slots, marks, operands, found.take("ordinary", leaves)
    pull_back = jax.tree_util.Partial(functools.partial(self._pull_back, found), *saved)
    return (out, tuple(stashes)), pull_back

  def _pull_back(self, found, slots, marks, operands, ordinary, d_out, d_stashes):
    d_stashes, rows = list(d_stashes), {}
    pushes = list(zip(found.pushes.values(), slots, marks, strict=True))
    for indices, slot, ragged in reversed(pushes):
      home = _home(d_stashes, found, indices)
      values = self._read(found, indices, d_stashes[home], slot, ragged, operands)
      rows |= zip(indices, values, strict=True)
      d_stashes[home], d_out = receive(d_stashes[home], slot, d_out)
    rows = [rows[index] for index in range(len(rows))]
    return tuple(d_stashes), None, *found.rebuild(operands, rows, ordinary)(d_out)

  def _read(self, found, indices, d_stash, slot, ragged, operands):
    """Returns the residuals of a push, from the stash, or where they were not stored made again."""
    specs = [found.of_kind("stashed")[index] for index in indices]
    order = match_residuals(d_stash.residuals, [(spec.shape[1:], spec.dtype) for spec in specs])
    contents = d_stash.as_cotangent(d_stash.canary)  # Without the zeros of its integers.
    given = contents, slot, ragged, operands

    def restore(contents, slot, ragged, operands):
      del operands
      is_held, options = contents.allocator.holds(slot), (self._implementation, self._padding)
      rows = read_rows(contents, slot, ragged, is_held, *options)
      return tuple(rows[index] for index in order)

    def recompute(contents, slot, ragged, operands):
      del contents, slot, ragged
      rows = found.take("stashed", found.forward.evaluate(operands)[1])
      return vary_over(tuple(rows[index] for index in indices), varying_axes(given))

    return lax.cond(slot.is_stored()[0], restore, recompute, *given)


def _home(stashes, found, indices):
  """Returns which of several stashes is made for some residuals. One alone has to be."""
  if len(stashes) == 1:
    return 0
  wanted = as_kind(found.row_specs(indices))
  return next(i for i, stash in enumerate(stashes) if as_kind(stash.residuals) == wanted)
