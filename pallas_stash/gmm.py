"""Grouped matmul whose left-hand side is kept in a stash for the backward pass."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.arguments import as_array, as_groups, as_integer, describe
from pallas_stash.batching import batch_alike
from pallas_stash.checks import debugging
from pallas_stash.checks.misplaced_rows import watch_results
from pallas_stash.handover import first_order_only, name_slot, receive, with_rules
from pallas_stash.kernels import grouped, Implementation, in_place
from pallas_stash.kernels.megablox import Megablox, standard_promotion
from pallas_stash.kernels.visits import Place
from pallas_stash.pushed_rows import (
  are_kept_rows_intact,
  check_push,
  read_rows,
  sum_kept_rows,
  take_rows,
)
from pallas_stash.ragged import RaggedRows
from pallas_stash.stash import Stash
from pallas_stash.tiers import before_loads
from pallas_stash.varying import vary_alike


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

  On a TPU the matmul stores the rows as it loads them, and the gradient of `rhs` reads them in the
  stash: none is copied. With `group_offset` a push then takes up to 14 rows more than there are.
  They are copied, with the same results, to a stash with pages or host memory, for a
  `grouped_matmul`, where row tiles are no multiple of 16 or have more rows than the stash, and
  where tiles along k are no multiple of 128 or do not divide the width of the stash. Groups that
  reach past the end of `lhs` store nothing and count as invalid; their products are undefined.

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
    implementation: as for `dynamic_update_slice`; "xla" copies the rows.

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
    tiling = tuple(tiling) if isinstance(tiling, list) else tiling
    multiply = Megablox(preferred_element_type, tiling, bool(transpose_rhs), interpret)
  operands = vary_alike(stash, lhs, rhs, group_sizes, group_offset)
  stashed = with_rules(_stashed_gmm, _forward, _backward, nondiff_argnums=(0, 1, 2))
  out, stash = stashed(multiply, padding, implementation, *operands)
  if debugging.is_debugging():
    ragged = _rows_of_groups(rhs, group_sizes, group_offset, lhs.shape[0])
    out = watch_results(out, ragged, name_slot)
  return out, stash


def _rows_of_groups(rhs, group_sizes, group_offset, total_rows):
  """Returns the rows of `lhs` that `rhs` has matrices for: groups are adjacent, so one run."""
  first = 0 if group_offset is None else group_offset
  group = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
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
  ragged = _rows_of_groups(rhs, group_sizes, group_offset, lhs.shape[0])
  stash = batch_alike(stash, (lhs, rhs, group_sizes, group_offset))
  if _fits(multiply, implementation, stash, lhs.shape, lhs.dtype, rhs):
    check_push(stash, [lhs], ragged)
    stash, lhs = first_order_only((stash, lhs))
    stash, slot = take_rows(stash, ragged, is_congruent=True)
    operands = lhs, rhs, stash.buffers[0], group_sizes, group_offset, _place(ragged, slot)
    out, buffer = in_place.gmm_and_keep(*operands, multiply, implementation)
    stash = dataclasses.replace(stash, buffers=(buffer,))
    slot = sum_kept_rows(stash, slot, lhs.shape[0])
  else:
    out = multiply(lhs, rhs, group_sizes, group_offset)
    if debugging.is_debugging():
      # Whatever padding holds is right here, and is not to be spoken of.
      lhs = jnp.where(ragged.is_in_group()[:, None], lhs, jnp.zeros_like(lhs))
    stash, slot = stash.push([lhs], ragged, implementation=implementation)
  return (out, stash), (name_slot(slot), ragged, rhs, group_sizes, group_offset)


def _backward(multiply, padding, implementation, saved, cotangents):
  slot, ragged, rhs, group_sizes, group_offset = saved
  d_out, d_stash = cotangents
  if d_stash.part == "late":  # The early half was all of it.
    return receive(d_stash, slot, ())[0], None, None, None, None
  groups = group_sizes, group_offset
  (residual,) = d_stash.residuals
  shape = ragged.total_rows, *residual.shape
  if _fits(multiply, implementation, d_stash, shape, residual.dtype, rhs):
    buffer, place = d_stash.buffers[0], _place(ragged, slot)
    if slot.checksum is not None:
      is_intact = are_kept_rows_intact(d_stash, slot, shape[0])
      place = place._replace(start=jnp.where(is_intact, place.start, -1))
    d_stash, d_out = receive(d_stash, slot, d_out)
    operands = buffer, d_out, rhs, *groups, place, shape[1]
    d_rhs = in_place.tgmm(*operands, multiply, implementation)
    of_lhs, _ = vary_alike(jnp.zeros(shape, residual.dtype), d_out)  # It has no influence.
    d_lhs = multiply.gradient("lhs", d_out, of_lhs, rhs, *groups)
  else:
    # NaN where it was not stored, so that the gradient of `rhs` is NaN and that of `lhs` is right.
    contents = d_stash.as_cotangent(d_stash.canary)  # Without the zeros of its integers.
    is_held = contents.allocator.holds(slot)
    lhs = read_rows(contents, slot, ragged, is_held, implementation, padding)
    slot, (lhs,) = before_loads(contents, slot, lhs)
    d_stash, d_out = receive(d_stash, slot, d_out)
    _, vjp = jax.vjp(lambda lhs, rhs: multiply(lhs, rhs, *groups), lhs, rhs)
    with standard_promotion():
      d_lhs, d_rhs = vjp(d_out)
  row = jnp.arange(ragged.total_rows, dtype=jnp.int32)
  start, size = ragged.group_starts[0], ragged.group_sizes[0]
  is_in_group = (row >= start) & (row < start + size)
  d_lhs = jnp.where(is_in_group[:, None], d_lhs, jnp.zeros_like(d_lhs))
  return d_stash, d_lhs, d_rhs, None, None


def _fits(multiply, implementation, stash, shape, dtype, rhs):
  """Returns whether a matmul can write and read the stash in place, on a TPU. All is static."""
  if not isinstance(multiply, Megablox) or implementation == "xla":
    return False
  if stash.page_rows or stash.host is not None:
    return False
  (m, k), n = shape, rhs.shape[1 if multiply.transpose_rhs else 2]
  dtypes = dtype, rhs.dtype, multiply.preferred_element_type
  tiles = multiply.tiles(m, k, n)
  return tiles is not None and grouped.fits((m, k, n), stash.buffers[0], dtypes, tiles)


def _place(ragged, slot):
  return Place(ragged.group_starts[0], slot.rows[0], slot.start[0])
