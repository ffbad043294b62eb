"""What a grouped matmul and its two gradients mean, in plain jnp.

Groups of rows are adjacent, in order, from row 0 on. What is behind them is padding: it may hold
anything, NaN included, and is never multiplied.
"""

import jax.numpy as jnp


def gmm(lhs, rhs, group_sizes):
  """Multiplies the rows of each group with the group's own matrix.

  Args:
    lhs: [total_rows, k].
    rhs: [groups, k, n].
    group_sizes: int[groups].

  Returns:
    [total_rows, n], zero in padding, of the dtype of `lhs`. Sums are float32.
  """
  is_in_group = _is_in_group(len(lhs), group_sizes)
  lhs = _without_padding(lhs, is_in_group)
  return _einsum("rg,rk,gkn->rn", is_in_group, lhs, rhs).astype(lhs.dtype)


def gradient_of_lhs(d_out, rhs, group_sizes):
  """The gradient of `lhs`, [total_rows, k], zero in padding, from that of the result."""
  is_in_group = _is_in_group(len(d_out), group_sizes)
  d_out = _without_padding(d_out, is_in_group)
  return _einsum("rg,rn,gkn->rk", is_in_group, d_out, rhs).astype(d_out.dtype)


def gradient_of_rhs(lhs, d_out, group_sizes):
  """The gradient of `rhs`, [groups, k, n], from that of the result."""
  is_in_group = _is_in_group(len(lhs), group_sizes)
  lhs, d_out = (_without_padding(rows, is_in_group) for rows in (lhs, d_out))
  return _einsum("rg,rk,rn->gkn", is_in_group, lhs, d_out).astype(lhs.dtype)


def _is_in_group(total_rows, group_sizes):
  """bool[total_rows, groups]."""
  row, ends = jnp.arange(total_rows)[:, None], jnp.cumsum(jnp.asarray(group_sizes))
  return (row >= ends - group_sizes) & (row < ends)


def _without_padding(rows, is_in_group):
  return jnp.where(jnp.any(is_in_group, axis=1)[:, None], rows, 0)


def _einsum(subscripts, is_in_group, *operands):
  precision = {"precision": "highest", "preferred_element_type": jnp.float32}
  return jnp.einsum(subscripts, is_in_group.astype(operands[0].dtype), *operands, **precision)
