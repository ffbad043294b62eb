"""What callers pass: checked, with a `ValueError` in their words, and described in few of ours."""

from collections.abc import Callable, Iterable
import fractions
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of whoever takes a derivative that a stash cannot give.
FIRST_ORDER_ONLY = (
  "pallas_stash supports first-order reverse-mode differentiation of `checkpoint`, `gmm` and"
  " `grouped_mlp`. Rows in a stash carry no tangents: second-order and forward-mode derivatives,"
  " and derivatives through Stash.push and Stash.restore, must be taken of a program without one."
)

_MOST_VALUES = 32
_MOST_CHARACTERS = 100


def static_int(name: str, value: Any, meaning: str = "") -> int:
  """Returns an integer that is known while the program is traced."""
  try:
    if not isinstance(value, bool | np.bool_):
      return operator.index(value)
  except TypeError:  # Of a traced value, too.
    pass
  raise ValueError(f"{name}={describe(value)} must be a static int{meaning}.")


def positive_int(name: str, value: Any) -> int:
  """Returns an integer above zero that is known while the program is traced."""
  value = static_int(name, value)
  if value < 1:
    raise ValueError(f"{name}={value} must be positive.")
  return value


def positive_fraction(name: str, value: Any) -> fractions.Fraction:
  """Returns a number above zero as it is written: 1.1 is eleven tenths, not the float nearest."""
  try:
    # Through the decimal text: Fraction(1.1) is above 11/10, and its ceiling one row too many.
    fraction = fractions.Fraction(str(value))
  except ValueError:
    fraction = fractions.Fraction(0)  # "nan", "inf" and whatever is not a number
  if fraction <= 0:
    raise ValueError(f"{name}={describe(value)} must be a finite number above zero")
  return fraction


def as_array(name: str, value: Any, what: str = "an array") -> jax.Array:
  """Returns what `jnp.asarray` makes of a value."""
  try:
    return jnp.asarray(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(f"{name}={describe(value)} must be {what}.") from error


def as_integer(name: str, value: Any) -> jax.Array:
  """Returns an integer, traced or not, as an array."""
  array = as_array(name, value, "an integer scalar")
  if array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
    value = describe(value, with_values=True)
    raise ValueError(f"{name} {value} of shape {array.shape} must be an integer scalar.")
  return array


def as_groups(name: str, value: Any) -> Any:
  """Returns integers [groups]: an array of any kind as it is, a list of integers as an array."""
  if not _is_array_like(value):
    is_empty = isinstance(value, list | tuple) and not value
    value = jnp.zeros((0,), jnp.int32) if is_empty else as_array(name, value, "int[groups]")
  check_integers(name, value, ("groups",))
  return value


def as_list(name: str, values: Any, of: str) -> list[Any]:
  """Returns a list of several things; one array, which could be iterated over, is not several."""
  if isinstance(values, str | dict) or _is_array_like(values) or not isinstance(values, Iterable):
    raise ValueError(f"{name}={describe(values)} must be a list of {of}.")
  return list(values)


def row_specs(residuals: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the shape of one row and the dtype of each residual."""
  what = "jax.ShapeDtypeStruct(row_shape, dtype)"
  residuals = as_list("residuals", residuals, what)
  for index, residual in enumerate(residuals):
    if not _is_array_like(residual):
      raise ValueError(f"residuals[{index}]={describe(residual)} must be a {what}.")
  # As Python integers: products of NumPy's may overflow.
  return tuple(jax.ShapeDtypeStruct(tuple(map(int, r.shape)), r.dtype) for r in residuals)


def check_integers(name: str, array: Any, axes: tuple[str, ...]) -> None:
  """Raises a ValueError unless an array is of integers, and has one axis for each of `axes`."""
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f"{name} of dtype {array.dtype} must have an integer dtype.")
  if len(array.shape) != len(axes):
    axes = f"rank {len(axes)}: [{', '.join(axes)}]"
    raise ValueError(f"{name} of shape {array.shape} must have {axes}.")


def check_arguments(args: Any, kwargs: Any) -> None:
  """Raises a ValueError unless all leaves of the arguments of a function can be traced."""
  is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
  is_static = lambda leaf: not (is_array(leaf) or isinstance(leaf, numbers.Number))
  if paths := paths_of(args, kwargs, is_static):
    raise ValueError(
      f"The arguments {', '.join(paths)} must be arrays: bind what is static beforehand, with"
      " functools.partial."
    )


def paths_of(
  args: Any, kwargs: Any, is_wanted: Callable[[Any], bool] = lambda leaf: True
) -> list[str]:
  """Returns where in the arguments the leaves are, and what a leaf is if it is no array."""
  paths = []
  for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
    name = f"args{jax.tree_util.keystr(path[1:])}" if path[0].idx == 0 else path[1].key
    if path[0].idx:
      name += jax.tree_util.keystr(path[2:])
    if is_wanted(leaf):
      paths.append(name if hasattr(leaf, "shape") else f"{name}={leaf!r}")
  return paths


def check_type(name: str, value: Any, of: type, what: str) -> None:
  """Raises a ValueError unless `value` is an `of`."""
  if not isinstance(value, of):
    raise ValueError(f"{name}={describe(value)} must be {what}.")


def describe(value: Any, with_values: bool = False) -> str:
  """Returns what a value is, in few words. Arrays may be traced, deleted, or none at all.

  Args:
    value: anything.
    with_values: whether to fetch and print a small array that is there.
  """
  if _is_array_like(value):
    if with_values and _is_small_and_here(value):
      return str(np.asarray(value).tolist())
    return f"{value.dtype}{list(value.shape)}"
  if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
    text = ", ".join(describe(item) for item in value[:_MOST_VALUES])
    text = f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
  elif isinstance(value, bool | int | float | complex | str | None):
    text = repr(value)
  else:
    text = f"<{value.__name__ if isinstance(value, type) else type(value).__name__}>"
  return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _is_array_like(value):
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_small_and_here(array):
  if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
    is_here = not array.is_deleted() and array.is_fully_addressable
  else:
    is_here = isinstance(array, np.ndarray | np.generic)
  return is_here and array.size <= _MOST_VALUES


def check_local(stash: Any) -> None:
  """Raises a ValueError unless a stash has one shard here."""
  if (shards := stash.canary.shape[0]) != 1:
    raise ValueError(
      f"The stash has {shards} shards here and must have 1: a stash made with num_shards is used"
      " inside `shard_map`, with PartitionSpec(mesh_axes) for the whole of it."
    )
