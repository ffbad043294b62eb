"""The mesh in the types of values: axes that vary in `shard_map`, axes that are explicit."""

from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def varying_axes(tree: Any) -> frozenset[str]:
  """Returns the mesh axes over which any leaf, an array or what has its type, varies."""
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
  is_type = isinstance(leaf, jax.ShapeDtypeStruct | jax.core.AbstractValue)
  manual_axis_type = (leaf if is_type else jax.typeof(leaf)).manual_axis_type
  return manual_axis_type.varying if manual_axis_type else frozenset()


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Returns `lax.empty` that knows an explicit mesh, as all that is computed under one does."""
  return lax.empty(shape, dtype, out_sharding=PartitionSpec() if _explicit_mesh() else None)


def mesh_alike(*arrays: jax.Array) -> list[jax.Array]:
  """Returns the arrays; those that know no mesh in the explicit one that others, or all, are in.

  For `lax.dynamic_update_slice`, which does not take one of either. Anything else does.
  """
  meshes = [jax.typeof(array).sharding.mesh for array in arrays]
  mesh = next((mesh for mesh in meshes if not mesh.empty), _explicit_mesh())
  if mesh is None:
    return list(arrays)
  whole, pairs = NamedSharding(mesh, PartitionSpec()), zip(arrays, meshes, strict=True)
  return [jax.reshard(array, whole) if known.empty else array for array, known in pairs]


def _explicit_mesh():
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if AxisType.Explicit in mesh.axis_types else None


def refuse_sharded(**operands: Any) -> None:
  """Raises a ValueError if a leaf is sharded over explicit mesh axes: each device has some rows."""
  for name, tree in operands.items():
    for leaf in jax.tree.leaves(tree):
      if isinstance(leaf, jax.ShapeDtypeStruct):  # Of what is made here.
        continue
      if any(axis is not None for axis in jax.typeof(leaf).sharding.spec):
        raise ValueError(
          f"{name}, {jax.typeof(leaf)}, must not be sharded here: a stash is of one device."
          " Call it inside `jax.shard_map`, or reshard to PartitionSpec() first, or make the mesh"
          " with jax.sharding.AxisType.Auto."
        )
