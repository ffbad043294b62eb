"""A stash of its own for each example of `jax.vmap`."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp


def batch_alike(tree: Any, operands: Any) -> Any:
  """Returns `tree`; under `vmap`, with each leaf batched if any leaf of `operands` is.

  What a layer does to a stash is batched where its operands are. If the stash that comes in is not,
  `vmap` would take the primal function of a `custom_vjp`, which passes it through, and its forward
  rule for functions of different results, and would add up what examples send back.
  """
  # `custom_vmap` has no transpose: a second derivative is to be refused by who can say so.
  operands = lax.stop_gradient(jax.tree.leaves(operands))
  # Leaf by leaf: to recompute one of them is not to keep all of them.
  return jax.tree.map(lambda leaf: _batch_with(leaf, operands), tree)


@jax.custom_batching.custom_vmap
def _batch_with(leaf, operands):
  del operands
  return leaf


@_batch_with.def_vmap
def _batch_with_rule(axis_size, is_batched, leaf, operands):
  if not is_batched[0]:
    leaf = jnp.broadcast_to(leaf, (axis_size, *leaf.shape))
  return _batch_with(leaf, operands), True  # Again for a `vmap` around this one.
