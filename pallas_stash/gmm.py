"""Grouped matmul whose left-hand side is kept in a stash for the backward pass."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.arguments import as_array, as_groups, as_integer, describe
from pallas_stash.batching import batch_alike
from pallas_stash.checks import debugging
from pallas_stash.checks.misplaced_rows import watch_results
from pallas_stash.handover import name_slot, receive, with_rules
from pallas_stash.kernels import Implementation
from pallas_stash.ragged import RaggedRows
from pallas_stash.stash import read_rows, Stash
from pallas_stash.varying import vary_alike

# Megablox adds up numbers of several dtypes. What a strict mode refuses does not change with it.
_PROMOTION = functools.partial(jax.numpy_dtype_promotion, "standard")


def gmm(
  stash: Stash,
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  preferred_element_type: Any = jnp.float32,
  tiling: Any = (128, 128, 128),
  group_offset: jax.Array | None = None,
  transpose_rhs: bool = False,
  interpret: bool = False,
  *,
  grouped_matmul: Callable[..., jax.Array] | None = None,
  implementation: Implementation | None = None,
) -> tuple[jax.Array, Stash]:
  """Megablox `gmm` that keeps `lhs` for the backward pass in the stash.

  Multiplies the rows of each group with the group's own matrix. Only the rows of `lhs` in the
  groups of `rhs` are kept. The gradients are those of the grouped matmul, bit for bit on rows in
  groups; padding of the gradient of `lhs` is zero.

  This is a building block: `lhs` is an argument, so there is nothing to recompute it from. If its
  rows do not fit, the gradient of `rhs` is NaN and `stash.stats()` counts an overflowed push. Use
  `checkpoint` on the function that computes `lhs` for gradients that are exact at any capacity.

  Args:
    stash: a stash for one residual, `[jax.ShapeDtypeStruct((k,), lhs.dtype)]`.
    lhs: [m, k]. Rows at or past `sum(group_sizes)` are padding.
    rhs: [groups here, k, n], or [groups here, n, k] with `transpose_rhs`.
    group_sizes: int32[groups], rows of each group.
    preferred_element_type: dtype of the result.
    tiling: the row, k and n tile sizes, or a function of (m, k, n) that gives them.
    group_offset: int32[], the first group that `rhs` has; None for 0.
    transpose_rhs: whether `rhs` is [groups here, n, k].
    interpret: whether megablox is interpreted.
    grouped_matmul: `(lhs, rhs, group_sizes) -> out` to use instead of megablox, such as
      `jax.lax.ragged_dot`. It must be differentiable in `lhs` and `rhs`. The arguments that are
      megablox's own then have no effect, but for `group_offset` and `transpose_rhs`, which must be
      left out.
    implementation: of compact and expand, as for `dynamic_update_slice`.

  Returns:
    out: [m, n]. Its padding is what the grouped matmul leaves there; undefined for megablox.
    stash: with the rows of `lhs`.

  Raises:
    ValueError: for a stash that was not made for `lhs`, or arguments that `grouped_matmul` does not
      take.
  """
  if not isinstance(stash, Stash):
    raise ValueError(f"The first argument, {describe(stash)}, must be a Stash.")
  lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
  group_sizes = as_groups("group_sizes", group_sizes)
  if group_offset is not None:
    group_offset = as_integer("group_offset", group_offset)
  if lhs.ndim != 2 or rhs.ndim != 3:
    raise ValueError(f"{lhs.shape=} must have rank 2 and {rhs.shape=} rank 3.")
  if grouped_matmul is not None and not callable(grouped_matmul):
    raise ValueError(f"grouped_matmul={describe(grouped_matmul)} must be a function, or None.")
  kernels.check_implementation(implementation)
  # Megablox selects the rows of each group, whatever the others hold; of others it is not known.
  padding = "undefined" if grouped_matmul is None else "zero"
  if grouped_matmul is not None:
    if group_offset is not None or transpose_rhs:
      raise ValueError(
        f"{group_offset=} and {transpose_rhs=} must be left out with a grouped_matmul of your own."
      )
    multiply = lambda lhs, rhs, group_sizes, group_offset: grouped_matmul(lhs, rhs, group_sizes)
  else:
    multiply = functools.partial(
      _megablox, preferred_element_type, tiling, bool(transpose_rhs), interpret
    )
  operands = vary_alike(stash, lhs, rhs, group_sizes, group_offset)
  stashed = with_rules(_stashed_gmm, _forward, _backward, nondiff_argnums=(0, 1, 2))
  out, stash = stashed(multiply, padding, implementation, *operands)
  if debugging.is_debugging():
    ragged = _rows_of_groups(rhs, group_sizes, group_offset, lhs.shape[0])
    out = watch_results(out, ragged, name_slot)
  return out, stash


def _megablox(
  preferred_element_type, tiling, transpose_rhs, interpret, lhs, rhs, group_sizes, group_offset
):
  with _PROMOTION():
    # By position: megablox declares its static arguments by their numbers.
    return megablox_gmm(
      lhs,
      rhs,
      group_sizes,
      preferred_element_type,
      tiling,
      group_offset,
      None,
      transpose_rhs,
      interpret,
    )


def _rows_of_groups(rhs, group_sizes, group_offset, total_rows):
  """Returns the rows of `lhs` that `rhs` has matrices for: groups are adjacent, so one run."""
  first = 0 if group_offset is None else group_offset
  group = jnp.arange(group_sizes.shape[0])
  is_before, is_here = group < first, (group >= first) & (group < first + rhs.shape[0])
  start = jnp.sum(jnp.where(is_before, group_sizes, 0), dtype=jnp.int32)
  size = jnp.sum(jnp.where(is_here, group_sizes, 0), dtype=jnp.int32)
  return RaggedRows(size[None], total_rows, start[None])


def _stashed_gmm(multiply, padding, implementation, stash, lhs, rhs, group_sizes, group_offset):
  del padding, implementation
  out = multiply(lhs, rhs, group_sizes, group_offset)
  return out, batch_alike(stash, (lhs, rhs, group_sizes, group_offset))


def _forward(multiply, padding, implementation, stash, lhs, rhs, group_sizes, group_offset):
  del padding
  out = multiply(lhs, rhs, group_sizes, group_offset)
  ragged = _rows_of_groups(rhs, group_sizes, group_offset, lhs.shape[0])
  stash = batch_alike(stash, (lhs, rhs, group_sizes, group_offset))
  if debugging.is_debugging():
    # Whatever padding holds is right here, and is not to be spoken of.
    lhs = jnp.where(ragged.is_in_group()[:, None], lhs, jnp.zeros_like(lhs))
  stash, slot = stash.push([lhs], ragged, implementation=implementation)
  return (out, stash), (name_slot(slot), ragged, rhs, group_sizes, group_offset)


def _backward(multiply, padding, implementation, saved, cotangents):
  slot, ragged, rhs, group_sizes, group_offset = saved
  d_out, d_stash = cotangents
  # NaN where it was not stored, so that the gradient of `rhs` is NaN and that of `lhs` is right.
  (lhs,) = read_rows(d_stash, slot, ragged, slot.is_stored(), implementation, padding)
  product = lambda lhs, rhs: multiply(lhs, rhs, group_sizes, group_offset)
  _, vjp = jax.vjp(product, lhs, rhs)  # The product itself is not used, and so not computed.
  d_stash, d_out = receive(d_stash, slot, d_out)
  with _PROMOTION():
    d_lhs, d_rhs = vjp(d_out)
  row = jnp.arange(ragged.total_rows)
  start, size = ragged.group_starts[0], ragged.group_sizes[0]
  is_in_group = (row >= start) & (row < start + size)
  d_lhs = jnp.where(is_in_group[:, None], d_lhs, jnp.zeros_like(d_lhs))
  return d_stash, d_lhs, d_rhs, None, None
