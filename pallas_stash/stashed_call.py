"""A call that pushes residuals of a function in the forward pass: what `checkpoint` is made of."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax

from pallas_stash.batching import batch_alike
from pallas_stash.halves import Halves
from pallas_stash.handover import name_slot, receive, with_rules
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.pushed_rows import push_some, read_rows, store_others
from pallas_stash.ragged import RaggedRows
from pallas_stash.residuals import MarkOf, Residuals, trace_forward
from pallas_stash.stash import Stash
from pallas_stash.storage import as_kind, match_residuals
from pallas_stash.tiers import before_loads, on_device, with_host_rows
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
    is_on_host: Callable[[int], bool] = lambda mark: False,
    is_late: Callable[..., Sequence[bool]] | None = None,
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
      is_on_host: says of a mark whether its rows are for the second of two stashes of the same.
      is_late: gives of operands, for each leaf, whether its gradient may be left for the late half
        of a backward pass; None where none may. There is one mark then, and one stash.
      axis_name, padding, implementation: as for `checkpoint`.
    """
    self._name, self._function, self._policy, self._mark_of = name, function, policy, mark_of
    self._is_on_host, self._is_late = is_on_host, is_late
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
      stashes: where there are several, rows go to the one that is made for their residuals; those
        for host memory come last.
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

  def halves(self, found: Residuals, operands: Any) -> Halves | None:
    """Returns the two halves of the backward pass; None where no gradient may be late.

    Args:
      found: what `find_residuals` gives.
      operands: of the call.
    """
    if self._is_late is None:
      return None
    return Halves(found, jax.tree.structure(operands), self._is_late(*operands))

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
    halves = self.halves(found, operands)
    stashes, slots = list(batch_alike(stashes, (given, operands))), []
    for mark, indices in found.pushes.items():
      home = _home(stashes, found, indices, self._is_on_host(mark))
      values = [rows[index] for index in indices]
      options = halves.kept if halves else (), self._axis_name, self._implementation
      stashes[home], slot = push_some(stashes[home], values, marks[mark], *options)
      slots.append(name_slot(slot))
    marks = [marks[mark] for mark in found.pushes]
    ordinary = found.take("ordinary", leaves)
    if halves:
      marks = name_slot(marks)
      operands, ordinary = halves.name_needed(operands, ordinary)
    saved = slots, marks, operands, ordinary
    pull_back = jax.tree_util.Partial(functools.partial(self._pull_back, found, halves), *saved)
    return (out, tuple(stashes)), pull_back

  def _pull_back(self, found, halves, slots, marks, operands, ordinary, d_out, d_stashes):
    d_stashes, rows, part = list(d_stashes), {}, d_stashes[0].part
    pushes = [*zip(found.pushes.items(), slots, marks, strict=True)]
    if halves and part == "late":
      given = *pushes, operands, ordinary, *d_stashes
      d_stash, d_operands = self._pull_back_late(found, halves, *given)
      return (d_stash,), None, *d_operands
    for (mark, indices), slot, ragged in reversed(pushes):
      home = _home(d_stashes, found, indices, self._is_on_host(mark))
      if part == "late":  # The early half was all of it.
        d_stashes[home], _ = receive(d_stashes[home], slot, ())
        continue
      if halves and part == "again":
        d_stashes[home] = d_stashes[home].set_aside(slot)
      values = self._read(found, halves, indices, d_stashes[home], slot, ragged, operands)
      slot, values = before_loads(d_stashes[home], slot, values)
      rows |= zip(indices, values, strict=True)
      d_stashes[home], d_out = receive(d_stashes[home], slot, d_out)
    if part == "late":
      return tuple(d_stashes), None, *[None] * len(operands)
    rows = [rows[index] for index in range(len(rows))]
    if not halves or part != "early":
      return tuple(d_stashes), None, *found.rebuild(operands, rows, ordinary)(d_out)
    d_operands, kept = halves.early(operands, rows, ordinary, d_out)
    (d_stash,), (((_, indices), slot, ragged),) = d_stashes, pushes
    _, others = _places(d_stash, found, indices, halves)
    d_stash = store_others(d_stash, slot, kept, ragged, others, self._implementation)
    return (d_stash,), None, *d_operands

  def _pull_back_late(self, found, halves, push, operands, ordinary, d_stash):
    """Returns the cotangent of the stash, and those of the operands that are late."""
    (_, indices), slot, ragged = push
    d_stash = d_stash.set_aside(slot)
    own, others = _places(d_stash, found, indices, halves)
    rows = self._restore(own, self._padding, d_stash, slot, ragged)
    kept = self._restore(others, "zero", d_stash, slot._replace(checksum=None), ragged)
    d_stash, kept = receive(d_stash, slot, kept)
    return d_stash, halves.late(operands, rows, ordinary, kept)

  def _read(self, found, halves, indices, d_stash, slot, ragged, operands):
    """Returns the residuals of a push, from the stash, or where they were not stored made again."""
    places, _ = _places(d_stash, found, indices, halves)
    contents = d_stash.as_cotangent(d_stash.canary)  # Without the zeros of its integers.
    given = on_device(contents), slot, ragged, operands

    def restore(contents, slot, ragged, operands):
      del operands
      return self._restore(places, self._padding, contents, slot, ragged)

    def recompute(contents, slot, ragged, operands):
      del contents, slot, ragged
      rows = found.take("stashed", found.forward.evaluate(operands)[1])
      return vary_over(tuple(rows[index] for index in indices), varying_axes(given))

    rows = lax.cond(slot.is_stored()[0], restore, recompute, *given)
    return with_host_rows(contents, slot, ragged, rows, places, self._implementation)

  def _restore(self, places, padding, d_stash, slot, ragged):
    """Returns the rows of a slot in some buffers of a stash, NaN if it does not hold them."""
    is_held = d_stash.allocator.holds(slot)
    ascending = sorted(places)
    options = self._implementation, padding, ascending
    rows = read_rows(d_stash, slot, ragged, is_held, *options)
    return tuple(rows[ascending.index(place)] for place in places)


def _places(stash, found, indices, halves):
  """Returns which residuals of a stash those of a push are, and those of the late half."""
  specs = found.row_specs(indices), halves.kept if halves else ()
  order = match_residuals(stash.residuals, [(s.shape, s.dtype) for some in specs for s in some])
  return order[: len(indices)], order[len(indices) :]


def _home(stashes, found, indices, is_on_host):
  """Returns which of several stashes is made for some residuals. One alone has to be.

  Of two for the same ones the second is that for host memory.
  """
  if len(stashes) == 1:
    return 0
  wanted = as_kind(found.row_specs(indices))  # No gradients are late where there are several.
  homes = [i for i, stash in enumerate(stashes) if as_kind(stash.residuals) == wanted]
  return homes[-1] if is_on_host else homes[0]
