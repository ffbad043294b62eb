"""`checkpoint`: `jax.checkpoint` whose saved values live in a stash."""

from collections.abc import Callable, Hashable, Mapping, Sequence
import functools
import inspect
import numbers
from typing import Any

import jax

from pallas_stash import kernels
from pallas_stash.arguments import as_list, check_arguments, describe, paths_of
from pallas_stash.checks.misplaced_rows import watch_results
from pallas_stash.explanation import Explanation
from pallas_stash.handover import name_slot
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.ragged import RaggedRows
from pallas_stash.residuals import Residual, Residuals
from pallas_stash.stash import Stash
from pallas_stash.stashed_call import StashedCall
from pallas_stash.varying import vary_alike, varying_axes


def checkpoint(
  fun: Callable[..., Any],
  *,
  policy: Callable[..., bool] | None = None,
  late_argnames: Sequence[str] = (),
  axis_name: Any = None,
  padding: Padding = "zero",
  implementation: Implementation | None = None,
) -> "StashedFunction":
  """Makes `fun` keep its row-shaped residuals in a stash.

  Call `f = checkpoint(fun, policy=policy)` as `out, stash = f(stash, ragged, *args)`. `out` and the
  gradients are those of `jax.checkpoint(fun, policy=policy)(*args)`; of what that would save, every
  value with one row for each of the ragged rows is compacted into the stash, and expanded again in
  the backward pass. If the rows do not fit, nothing is stored and the backward pass recomputes
  them.

  Stashed are the residuals of a floating-point dtype and two or more axes whose first is
  `ragged.total_rows`, except arguments of `fun` and constants that it closes over. They come back
  bit for bit, with zero in padding, or what `padding` says: a function whose result or gradient
  depends on what padding holds is not for a stash.

  A function with a parameter named `group_sizes`, as grouped matmuls have, can be given the rows of
  the worst-case buffer for `ragged`: `f(stash, rows.shape[0], rows, weights, group_sizes)`. Its
  groups are then a prefix of the buffer.

  Under a `jax.checkpoint` around the layer, let its policy save `SLOT_NAME`. Without one, all
  arguments of `f` are kept for every layer at worst-case size, as `f.explain` shows.

  Differentiable once, in reverse mode. Undifferentiated, `fun` just runs, and the stash passes
  through untouched. Like a function under `jax.checkpoint` or `jax.jit`, `fun` is traced once for
  arguments of the same shapes.

  Args:
    fun: any function of pytrees of arrays, to pytrees of arrays. It must not close over traced
      values. The leaves of its arguments may be of any dtype, or None; what is static is bound
      beforehand, with `functools.partial`.
    policy: a `jax.checkpoint` policy: which values to save. None saves all that autodiff keeps.
      What it offloads stays an ordinary residual.
    late_argnames: names of parameters of `fun`, weights of grouped matmuls of its rows, whose
      gradients `early` of `split_passes` leaves to `late`. What they are made of is then a residual
      as well, but kept by `early`: the stash has room for it beside the rows. Of padding it is
      zero. Where both halves are not used, all is as without.
    axis_name: mesh axis or axes of the collectives in `fun`. Their devices must agree on whether to
      recompute, so they then store rows only where those of all of them fit.
    padding: "zero"; or "undefined", which holds anything, NaN included, and on a TPU is not
      written: at 25% occupancy zeros are three quarters of what is. For a function whose backward
      pass selects the rows in groups wherever it reads a residual, as
      `check_padding(..., padding="undefined")` tells. In `debug` it is NaN.
    implementation: as for `dynamic_update_slice`.

  Returns:
    `f`, a `StashedFunction`. `f.residuals(ragged, *args)` gives what `Stash.empty` needs, and
    `f.explain(ragged, *args)` what becomes of each residual, and why.

  Raises:
    ValueError: when `f` is called, for a function that closes over traced values, an argument that
      is not an array, a stash that was not made for these residuals, and `late_argnames` of a stash
      with host memory, or whose gradients need cotangents that have no rows; here, for an unknown
      `padding` or `implementation`, `late_argnames` that are no parameters of `fun`, and a `fun` or
      `policy` that is no function.
  """
  return StashedFunction(fun, policy, late_argnames, axis_name, padding, implementation)


class StashedFunction:
  """A function whose row-shaped residuals are kept in a stash: what `checkpoint` returns.

      out, stash = f(stash, ragged, *args, **kwargs)

  Args of the call:
    stash: a `Stash`, made for `f.residuals(ragged, *args, **kwargs)`.
    ragged: `RaggedRows`: where the rows of the worst-case buffers are. Or an int, `total_rows`:
      then they are a prefix, of the sizes that the function's own argument `group_sizes` gives.
    *args, **kwargs: of the function.

  Returns of the call:
    out: what the function returns.
    stash: with the rows of this call, if it is differentiated.

  Raises, and warns, when called: a ValueError as `checkpoint` says; a warning, where the call is
  differentiated, for each residual that the policy names and that is not stashed for its shape.
  """

  def __init__(self, fun, policy, late_argnames, axis_name, padding, implementation):
    if not callable(fun):
      raise ValueError(f"fun={describe(fun)} must be a function.")
    if not (policy is None or callable(policy)):
      raise ValueError(f"policy={describe(policy)} must be a function, or None.")
    kernels.check_padding(padding)
    kernels.check_implementation(implementation)
    late_argnames = _check_names(fun, late_argnames)
    # What is not hashable is cached by the identity of an object of its own.
    self._fun = fun if isinstance(fun, Hashable) else functools.partial(fun)
    # Not its docstring: `help` is to tell how this is called.
    functools.update_wrapper(self, fun, ("__module__", "__name__", "__qualname__"), ())
    self.__name__ = getattr(fun, "__name__", repr(fun))
    self.__signature__ = _signature_with_stash(fun)

    def evaluate(args, kwargs):
      traced, out = self._trace(args, kwargs)
      leaves = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((args, kwargs)))
      return jax.tree.unflatten(jax.tree.structure(out), leaves), ()

    self._call = StashedCall(
      self.__name__,
      evaluate,
      policy=policy,
      is_late=functools.partial(_leaves_of, fun, late_argnames) if late_argnames else None,
      axis_name=axis_name,
      padding=padding,
      implementation=implementation,
    )

  def __repr__(self):
    return f"checkpoint({self._fun!r})"

  def __call__(self, stash: Stash, ragged: RaggedRows | int, /, *args: Any, **kwargs: Any):
    if not isinstance(stash, Stash):
      raise ValueError(f"The first argument, {describe(stash)}, must be a Stash.")
    ragged = as_ragged(ragged, self._fun, args, kwargs)
    check_arguments(args, kwargs)
    stash, ragged, args, kwargs = vary_alike(stash, ragged, args, kwargs)
    self._trace(args, kwargs)  # Here, so that what is wrong with them is said here.
    out, (stash,) = self._call([stash], (ragged,), args, kwargs)
    return watch_results(out, ragged, name_slot), stash

  def residuals(
    self, ragged: RaggedRows | int, /, *args: Any, **kwargs: Any
  ) -> list[jax.ShapeDtypeStruct]:
    """Returns a `jax.ShapeDtypeStruct(row_shape, dtype)` for each residual to stash.

    Args:
      ragged, *args, **kwargs: as of the call, or `jax.ShapeDtypeStruct`s in place of arrays.

    Raises:
      ValueError: if there is none; it says which residuals and names there are.
    """
    found = self.find_residuals(ragged, args, kwargs)
    found.require_any(self.__name__)
    halves = self._call.halves(found, (args, kwargs))
    kept = halves.kept if halves else []
    return [*found.row_specs(range(len(found.of_kind("stashed")))), *kept]

  def find_residuals(self, ragged: RaggedRows | int, args: tuple, kwargs: dict) -> Residuals:
    """Returns the residuals of a call with these arguments."""
    ragged = as_ragged(ragged, self._fun, args, kwargs)
    check_arguments(args, kwargs)
    if varying_axes((ragged, args, kwargs)):  # Also of what are only shapes.
      ragged, args, kwargs = jax.eval_shape(vary_alike, ragged, args, kwargs)
    self._trace(args, kwargs)
    return self._call.find_residuals((ragged,), args, kwargs, labels=paths_of(args, kwargs))

  def explain(self, ragged: RaggedRows | int, /, *args: Any, **kwargs: Any) -> Explanation:
    """Tells what becomes of each residual, and why. Print it to see a table.

    Args:
      ragged, *args, **kwargs: as for `residuals`.
    """
    found = self.find_residuals(ragged, args, kwargs)
    halves, (rows, *_) = self._call.halves(found, (args, kwargs)), found.total_rows
    late = [
      Residual(None, "early half", None, (rows, *spec.shape), spec.dtype, "stashed", None)
      for spec in (halves.kept if halves else ())
    ]
    arguments = [jax.typeof(leaf) for leaf in jax.tree.leaves((args, kwargs))]
    residuals, names = (*found.different, *late), tuple(found.names())
    return Explanation(*found.total_rows, residuals, tuple(arguments), names)

  def _trace(self, args, kwargs):
    """Returns the jaxpr of the function and the shapes of its result, traced once for a shape."""
    try:
      jaxpr, out = jax.make_jaxpr(self._fun, return_shape=True)(*args, **kwargs)
    except jax.errors.ConcretizationTypeError as error:
      paths = paths_of(args, kwargs, lambda leaf: isinstance(leaf, numbers.Number))
      if not paths:
        raise
      raise ValueError(
        f"{self.__name__} needs the value of an argument while it is traced, perhaps of"
        f" {', '.join(paths)}: bind what is static before `checkpoint`, with functools.partial."
      ) from error
    traced = [const for const in jaxpr.consts if isinstance(const, jax.core.Tracer)]
    if traced:
      # The backward pass runs the function again, where what it closed over no longer exists.
      raise ValueError(
        f"{self.__name__} closes over traced values,"
        f" {', '.join(str(jax.typeof(c)) for c in traced)}; they must be passed as arguments."
      )
    return jaxpr, out


def as_ragged(
  ragged: Any, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RaggedRows:
  """Returns the ragged rows of a call of `fun`.

  Args:
    ragged: they themselves; or an int, `total_rows`, of a prefix with the `group_sizes` of `fun`.
    fun: a function.
    args, kwargs: its arguments.

  Raises:
    ValueError: for anything else, and for an int where `fun` has no such parameter.
  """
  if isinstance(ragged, RaggedRows):
    return ragged
  if isinstance(ragged, bool) or not isinstance(ragged, numbers.Integral):
    raise ValueError(
      f"The argument before those of the function, {describe(ragged)}, must be RaggedRows, or an"
      " int: the rows of the worst-case buffer."
    )
  try:
    signature = inspect.signature(fun)
  except (TypeError, ValueError):  # Some callables of C have none.
    signature = inspect.Signature()
  if "group_sizes" not in signature.parameters:
    raise ValueError(
      f"{describe(ragged)} rows before the arguments of the function must be RaggedRows: it has no"
      " parameter named group_sizes, to take the rows of each group from."
    )
  bound = signature.bind(*args, **kwargs)
  bound.apply_defaults()
  return RaggedRows(bound.arguments["group_sizes"], ragged)


def _check_names(fun, names):
  """Returns names of parameters of a function as a tuple."""
  names = (names,) if isinstance(names, str) else tuple(as_list("late_argnames", names, "names"))
  try:
    parameters = inspect.signature(fun).parameters
  except (TypeError, ValueError):  # Some callables of C have none.
    parameters = {}
  if unknown := [name for name in names if name not in parameters]:
    raise ValueError(
      f"late_argnames={names} must be names of parameters of the function, and not"
      f" {', '.join(map(describe, unknown))}: it has {', '.join(parameters) or 'none'}."
    )
  return names


def _leaves_of(fun, names, args, kwargs):
  """Returns, for each leaf of the arguments of a function, whether it is of parameters `names`."""
  leaves, structure = jax.tree.flatten((args, kwargs))
  args, kwargs = jax.tree.unflatten(structure, range(len(leaves)))
  arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
  found = set(jax.tree.leaves([arguments.get(name) for name in names]))
  return [index in found for index in range(len(leaves))]


def _signature_with_stash(fun):
  """Returns the signature of a `StashedFunction`: that of `fun` behind its first two arguments."""
  try:
    parameters = list(inspect.signature(fun).parameters.values())
  except (TypeError, ValueError):  # Some callables of C have none.
    of_any = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = [
      inspect.Parameter(name, of) for name, of in zip(("args", "kwargs"), of_any, strict=True)
    ]
  names = {parameter.name for parameter in parameters}  # It may have these names itself.
  taken = [
    inspect.Parameter(
      f"{name}_" if name in names else name,
      inspect.Parameter.POSITIONAL_ONLY,
      annotation=annotation,
    )
    for name, annotation in (("stash", Stash), ("ragged", RaggedRows | int))
  ]
  return inspect.Signature([*taken, *parameters])
