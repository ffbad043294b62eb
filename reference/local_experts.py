"""The rows of one device's experts, out of rows that are sorted by the experts of all devices."""

from jax import lax
import jax.numpy as jnp


def first_row(group_sizes, group_offset):
  """Returns int32[], how many rows are in the groups before `group_offset`, an int32 scalar."""
  return jnp.sum(jnp.where(jnp.arange(group_sizes.shape[0]) < group_offset, group_sizes, 0))


def ring_buffer(rows, group_sizes, group_offset, total_rows):
  """Turns sorted rows, as a ring, until those of a group come first, and truncates them.

  Args:
    rows: [rows, ...], those of the first group, those of the second, and so on.
    group_sizes: int32[groups], which sum to all rows.
    group_offset: int32 scalar, the group whose rows are to come first.
    total_rows: a Python integer, at most all rows.

  Returns:
    [total_rows, ...]
  """
  row = first_row(group_sizes, group_offset) + jnp.arange(total_rows)
  return rows.at[row % rows.shape[0]].get(mode="promise_in_bounds")


def local_group_sizes(group_sizes, group_offset, local_experts):
  """Returns int32[local_experts], the sizes of the groups from `group_offset` on."""
  return lax.dynamic_slice_in_dim(group_sizes, group_offset, local_experts)


def local_grouped_matmul(lhs, rhs, group_sizes, group_offset, *, grouped_matmul=lax.ragged_dot):
  """Multiplies the rows of each of one device's experts with the expert's own matrix.

  Args:
    lhs: [total_rows, k], a `ring_buffer` of rows sorted by the experts of all devices, with room
      for all rows of the local ones. What is behind them may be rows of other experts.
    rhs: [local_experts, k, n].
    group_sizes: int32[num_experts], the rows of each expert of all devices.
    group_offset: int32 scalar, the first local expert.
    grouped_matmul: `(lhs, rhs, sizes) -> [total_rows, n]`, of groups that start at row 0.

  Returns:
    [total_rows, n], the rows of the local experts; then padding, as `grouped_matmul` leaves it.
  """
  sizes = local_group_sizes(group_sizes, group_offset, rhs.shape[0])
  return grouped_matmul(lhs, rhs, sizes)
