"""The varying mesh axes of `shard_map(check_vma=True)`."""

from typing import Any

import jax
from jax import lax


def varying_axes(tree: Any) -> frozenset[str]:
  """Returns the mesh axes over which any leaf, an array or a `ShapeDtypeStruct`, varies."""
  return frozenset().union(*map(_varying_axes, jax.tree.leaves(tree)))


def vary_over(tree: Any, axes: frozenset[str]) -> Any:
  """Returns `tree` with every leaf varying over `axes` (and over what it varied over before)."""

  def vary(leaf):
    missing = axes - _varying_axes(leaf)
    return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

  return jax.tree.map(vary, tree)


def vary_alike(*trees: Any) -> tuple[Any, ...]:
  """Returns the trees with every leaf varying over all axes that any of them varies over.

  A kernel reads all its operands on every device, so its result varies as they do together. To make
  the operands alike before a `custom_vjp` leaves the sum of cotangents over devices to autodiff.
  """
  return vary_over(trees, varying_axes(trees))


def _varying_axes(leaf):
  is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
  manual_axis_type = (leaf if is_struct else jax.typeof(leaf)).manual_axis_type
  return manual_axis_type.varying if manual_axis_type else frozenset()
