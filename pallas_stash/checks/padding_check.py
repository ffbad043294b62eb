"""`check_padding`: does a function depend on what its padding rows hold?"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_stash.arguments import as_array
from pallas_stash.checkpoint import as_ragged, checkpoint
from pallas_stash.checks.misplaced_rows import data_outside, has_rows
from pallas_stash.checks.poison import ALL, NONE, run_poisoned
from pallas_stash.kernels import Padding
from pallas_stash.ragged import RaggedRows


@dataclasses.dataclass(frozen=True)
class PaddingReport:
  """Whether a function depends on what its padding rows hold, and where that starts.

  Attributes:
    depends: whether any result changed.
    intermediate: the first in the program whose padding alone changes a result: its
      `checkpoint_name`, or what makes it. None if none does, or only several together do.
    source: the line of the program that makes it, where that is known.
    result: the first result that changed.
    cause: what was done to the padding.
    outside: the results whose rows outside of the groups differ from row to row. Right if nothing
      reads them; else the layout needs `group_starts` that `RaggedRows` was not given, and
      gradients are wrong. It says nothing of `depends`, and has no part in comparisons.
  """

  depends: bool
  intermediate: str | None = None
  source: str | None = None
  result: str | None = None
  cause: str | None = None
  outside: tuple[str, ...] = dataclasses.field(default=(), compare=False)

  def __str__(self):
    return " ".join([self._about_padding(), *map(_about_outside, self.outside)])

  def _about_padding(self):
    if not self.depends:
      return "No result depends on what padding holds."
    where = self.intermediate or "several intermediates together"
    line = f" ({self.source})" if self.source else ""
    return f"{self.result} changes with {self.cause} in the padding of {where}{line}."


def check_padding(
  fun: Callable[..., Any],
  ragged: RaggedRows | int,
  *args: Any,
  policy: Callable[..., bool] | None = None,
  padding: Padding = "zero",
) -> PaddingReport:
  """Tells whether a function depends on what its padding rows hold, so is not for a stash.

  Runs `fun` and its gradients at `args`, to be given as `checkpoint(fun, policy=policy)` is to be
  called, and again with other contents in padding:

  - Poison in row-shaped intermediates, forward and backward: large numbers where padding holds
    data, such as the rows of an argument or of a gather, and NaN, too, in what grouped matmuls and
    kernels return, whose padding is undefined. Elementwise operations and matmuls hand it on, and
    `jnp.where` ends it. What the program itself made zero, or any one constant, is left alone: code
    may rely on that.
  - Zero in each residual that `checkpoint` would stash, which is what comes back from a stash; with
    `padding="undefined"`, large numbers and NaN.

  Compared bit for bit are the results of `fun` and the gradients of all floating-point arguments:
  those that have `ragged.total_rows` rows in the rows in groups, others as a whole; with
  `padding="undefined"` all gradients as a whole, since the gradient of a gather adds up those of
  all rows, padding too. The cotangents are random, and zero in padding. Results that hold data
  there are named: see `PaddingReport`.

  What it says is about these arguments: it sees no branch of the program that they do not take.
  Whatever has `total_rows` rows, a floating-point dtype and two or more axes is taken for ragged
  rows: choose sizes at which nothing else has. Arguments' padding of other dtypes stays as given;
  give an argument with NaN in padding to learn whether that matters. Loops, conditionals and
  `shard_map` are run as they are, with poison in what goes in and what comes out.

  Args:
    fun: as for `checkpoint`.
    ragged: where the rows are, as for `checkpoint`'s function. There must be some padding.
    *args: arrays, no `jax.ShapeDtypeStruct`s: the function is run.
    policy: as for `checkpoint`. It decides which residuals would be stashed.
    padding: as for `checkpoint`: what comes back from the stash in padding.

  Raises:
    ValueError: for an unknown `padding`, for traced arguments, and where nothing can be told:
      groups that are not valid, no padding, nothing to differentiate, or nothing to stash.
  """
  stashed = checkpoint(fun, policy=policy, padding=padding)
  ragged = as_ragged(ragged, fun, args, {})
  leaves = jax.tree.leaves((ragged, args))
  if any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in leaves):
    raise ValueError("check_padding runs the function: call it with arrays, outside of `jax.jit`.")
  args = jax.tree_util.tree_map_with_path(
    lambda path, leaf: as_array(f"argument{jax.tree_util.keystr(path)}", leaf), args
  )
  if not ragged.is_valid():
    raise ValueError(f"{ragged} must have groups inside the buffer that do not overlap.")
  is_padding = ~np.asarray(ragged.is_in_group())
  if not is_padding.any():
    raise ValueError(f"{ragged} must have padding: without, nothing can be told.")
  residuals = stashed.find_residuals(ragged, args, {})
  check = _Check(fun, residuals, args, is_padding)
  report = check.of_intermediates() or check.of_residuals(padding) or PaddingReport(False)
  return dataclasses.replace(report, outside=check.results_outside())


def _about_outside(result):
  return (
    f"{result} holds data outside of the groups: nothing may read it, unless RaggedRows lacks the"
    " `group_starts` that make it rows in groups."
  )


class _Check:
  """A function at its arguments, and what it gives there: `plain`, named by `labels`."""

  def __init__(self, fun, residuals, args, is_padding):
    self.residuals, self.args, self.is_padding = residuals, args, is_padding
    out = jax.eval_shape(fun, *args)
    self.cotangents = self._make_cotangents(out)
    outputs, gradients = _paths_of(out, _is_number), _paths_of(args, _is_inexact)
    if not gradients or not _paths_of(out, _is_inexact):
      raise ValueError("The function must have arguments and results of a floating-point dtype.")
    self.labels = [f"result{path}" for path in outputs]
    self.labels += [f"the gradient of argument{path}" for path in gradients]

    leaves, treedef = jax.tree.flatten(args)

    def results(*leaves):
      args = jax.tree.unflatten(treedef, leaves)
      out, vjp = jax.vjp(fun, *args)
      out = map(jnp.asarray, jax.tree.leaves(out))  # They may be Python numbers.
      return [leaf for leaf in out if _is_number(leaf)] + self._gradients(vjp)

    jaxpr = jax.make_jaxpr(results)(*leaves)
    arguments = [
      f"argument{path}, {leaf.dtype}{list(leaf.shape)}"
      for path, leaf in zip(_paths_of(args), leaves, strict=True)
    ]
    self.intermediates = []

    @jax.jit
    def run(leaves, only, is_finite):
      values, self.intermediates = run_poisoned(
        jaxpr, leaves, arguments, jnp.asarray(is_padding), only, is_finite
      )
      return values

    self.run = lambda only, is_finite: run(leaves, only, is_finite)
    self.plain = jax.device_get(self.run(NONE, True))

  def of_intermediates(self):
    """Returns a report if poison in padding of intermediates changes a result; or None."""

    def changed(only, is_finite):
      return self._first_difference(self.labels, self.plain, self.run(only, is_finite))

    # Finite first: it says more about what goes wrong.
    kinds = ((True, "large numbers"), (False, "NaN"))
    found = [(changed(ALL, is_finite), cause) for is_finite, cause in kinds]
    if not any(result for result, _ in found):
      return None
    for number, intermediate in enumerate(self.intermediates):
      for is_finite, cause in kinds:
        if result := changed(number, is_finite):
          name = intermediate.name or intermediate.description
          return PaddingReport(True, name, intermediate.source, result, cause)
    result, cause = next(pair for pair in found if pair[0])
    return PaddingReport(True, None, None, result, cause)

  def of_residuals(self, padding):
    """Returns a report if padding as it comes back from a stash changes a gradient; or None."""

    residuals = self.residuals
    residuals.require_any("the function")

    @jax.jit
    def forward(args):
      _, leaves = residuals.forward.evaluate((args, {}))
      return residuals.take("stashed", leaves), residuals.take("ordinary", leaves)

    @jax.jit
    def backward(rows, ordinary, args):
      return self._gradients(residuals.rebuild((args, {}), rows, ordinary))

    rows, ordinary = forward(self.args)
    labels = self.labels[-len(_paths_of(self.args, _is_inexact)) :]
    plain = backward(rows, ordinary, self.args)

    def changed(fill, is_filled):
      filled = [fill(row) if is_filled(index) else row for index, row in enumerate(rows)]
      gradients = backward(filled, ordinary, self.args)
      return self._first_difference(labels, plain, gradients, padding == "undefined")

    for what, fill in self._contents(padding):
      cause = f"{what}, as it comes back from a stash,"
      result = changed(fill, lambda index: True)
      if not result:
        continue
      for number, residual in enumerate(residuals.of_kind("stashed")):
        if one := changed(fill, lambda index, number=number: index == number):
          return PaddingReport(True, residual.name or str(residual), residual.source, one, cause)
      return PaddingReport(True, None, None, result, cause)
    return None

  def _contents(self, padding):
    """Returns what may come back in padding: names, and functions that put it into rows."""
    if padding == "zero":
      return [("zero", self._zero)]
    largest = lambda rows: float(jnp.finfo(rows.dtype).max) / 2
    return [
      ("a large number", lambda rows: self._fill(largest(rows), rows)),
      ("NaN", lambda rows: self._fill(jnp.nan, rows)),
    ]

  def results_outside(self):
    """Returns the labels of the results that hold data outside of the groups."""
    is_data = lambda x: (
      has_rows(x, self.residuals.total_rows[0]) and data_outside(jnp.asarray(x), ~self.is_padding)
    )
    pairs = zip(self.labels, self.plain, strict=True)
    return tuple(label for label, x in pairs if label.startswith("result") and is_data(x))

  def _make_cotangents(self, out):
    rng = np.random.default_rng(0)

    def make(leaf):
      if not _is_inexact(leaf):
        return np.zeros(leaf.shape, jax.dtypes.float0)
      cotangent = jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
      return self._zero(cotangent) if self._has_rows(leaf) else cotangent

    return jax.tree.map(make, out)

  def _gradients(self, vjp):
    gradients = jax.tree.leaves(vjp(self.cotangents))
    are_inexact = map(_is_inexact, jax.tree.leaves(self.args))
    return [g for g, is_inexact in zip(gradients, are_inexact, strict=True) if is_inexact]

  def _has_rows(self, leaf):
    return leaf.shape[:1] == self.is_padding.shape

  def _zero(self, rows):
    return self._fill(0, rows)

  def _fill(self, number, rows):
    is_padding = self.is_padding.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_padding, jnp.asarray(number, rows.dtype), rows)

  def _first_difference(self, labels, expected, actual, is_whole=False):
    is_part = lambda x: self._has_rows(x) and not is_whole
    for label, *pair in zip(labels, expected, jax.device_get(actual), strict=True):
      first, second = (x[~self.is_padding] if is_part(x) else x for x in map(np.asarray, pair))
      # NaN differs from itself: numpy has no other answer for small dtypes.
      is_same = (first == second) | ((first != first) & (second != second))
      if not is_same.all():
        return label
    return None


def _paths_of(tree, is_wanted=lambda leaf: True):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [jax.tree_util.keystr(path) for path, leaf in leaves if is_wanted(leaf)]


def _is_inexact(leaf):
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_number(leaf):
  return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
