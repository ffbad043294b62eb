"""What compact and expand mean, in plain jnp.

Row `i` of group `g` is row `group_starts[g] + i` of the worst-case buffer, and row
`start + sum(group_sizes[:g]) + i` of the stash. Groups do not overlap and lie inside the worst-case
buffer; every other row of it is padding. Rows are copied bit for bit, whatever their dtype.

Both are differentiable. Nothing here is fast: each looks every row up in every group.
"""

import jax
from jax import lax
import jax.numpy as jnp


def compact(rows, stash, start, group_sizes, group_starts=None):
  """Copies the rows of every group into the stash, tight and in group order.

  Args:
    rows: [total_rows, width], the worst-case buffer.
    stash: [stash_rows, width] of the same dtype.
    start: the stash row of the first row.
    group_sizes: int[groups].
    group_starts: int[groups], by default the exclusive cumulative sum of `group_sizes`.

  Returns:
    A new stash, [stash_rows, width]. Rows that nothing is copied to are unchanged. Rows that would
    go before the first or past the last row of the stash are dropped.
  """
  rows, stash = jnp.asarray(rows), jnp.asarray(stash)
  if rows.dtype != stash.dtype:
    raise ValueError(f"{rows.dtype=} must be {stash.dtype=}")
  group_sizes, tight_starts, group_starts = _groups(group_sizes, group_starts)
  stash_row = jnp.arange(len(stash)) - start
  return _pick(rows, _moved(stash_row, group_sizes, tight_starts, group_starts), stash)


def expand(stash, start, total_rows, group_sizes, group_starts=None):
  """Copies the rows of every group back to where they were in the worst-case buffer.

  Args:
    stash: [stash_rows, width].
    start: the stash row of the first row.
    total_rows: rows of the worst-case buffer, a Python integer.
    group_sizes: int[groups].
    group_starts: int[groups], by default the exclusive cumulative sum of `group_sizes`.

  Returns:
    rows, [total_rows, width] of the stash's dtype. Padding is zero, and so are rows that would come
    from before the first or past the last row of the stash.
  """
  stash = jnp.asarray(stash)
  group_sizes, tight_starts, group_starts = _groups(group_sizes, group_starts)
  row = jnp.arange(total_rows)
  stash_row = _moved(row, group_sizes, group_starts, tight_starts + start)
  return _pick(stash, stash_row, jnp.zeros((total_rows, *stash.shape[1:]), stash.dtype))


def _groups(group_sizes, group_starts):
  """Returns sizes, where groups start if they are tight, and where they do start."""
  group_sizes = jnp.asarray(group_sizes)
  tight_starts = jnp.cumsum(group_sizes) - group_sizes
  return group_sizes, tight_starts, tight_starts if group_starts is None else group_starts


def _moved(row, group_sizes, from_starts, to_starts):
  """Where rows go when each group moves from one start to another; -1 for rows of no group."""
  from_starts, to_starts = jnp.asarray(from_starts), jnp.asarray(to_starts)
  in_group = row[:, None] - from_starts
  is_in_group = (in_group >= 0) & (in_group < group_sizes)
  moved = jnp.sum(jnp.where(is_in_group, to_starts + in_group, 0), axis=1)
  return jnp.where(jnp.any(is_in_group, axis=1), moved, -1)


@jax.custom_jvp
def _pick(source, index, otherwise):
  """Returns `source[index[i]]` for each row i, or `otherwise[i]` if `source` has no such row.

  It moves bit patterns, because XLA may rewrite NaNs and subnormal numbers when it moves floats.
  """
  dtype = source.dtype
  if not jnp.issubdtype(dtype, jnp.floating):
    return _pick_rows(source, index, otherwise)
  bits = f"uint{jnp.finfo(dtype).bits}"
  source, otherwise = (lax.bitcast_convert_type(rows, bits) for rows in (source, otherwise))
  return lax.bitcast_convert_type(_pick_rows(source, index, otherwise), dtype)


@_pick.defjvp
def _pick_jvp(primals, tangents):
  """Bit patterns have no derivative, and `_pick` is linear: its tangents are picked alike."""
  (_, index, _), (d_source, _, d_otherwise) = primals, tangents
  return _pick(*primals), _pick_rows(d_source, index, d_otherwise)


def _pick_rows(source, index, otherwise):
  is_there = (index >= 0) & (index < len(source))
  return jnp.where(is_there[:, None], source[jnp.where(is_there, index, 0)], otherwise)
