"""What compact and expand mean, one row at a time, in NumPy.

Row `i` of group `g` is row `group_starts[g] + i` of the worst-case buffer, and row
`start + sum(group_sizes[:g]) + i` of the stash. Groups do not overlap and lie inside the worst-case
buffer; every other row of it is padding. Rows are copied bit for bit, whatever their dtype.
"""

import numpy as np


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
  rows, stash = np.asarray(rows), np.array(stash)
  if rows.dtype != stash.dtype:
    raise ValueError(f"{rows.dtype=} must be {stash.dtype=}")
  for row, stash_row in _moves(start, group_sizes, group_starts):
    if 0 <= stash_row < len(stash):
      stash[stash_row] = rows[row]
  return stash


def expand(stash, start, total_rows, group_sizes, group_starts=None):
  """Copies the rows of every group back to where they were in the worst-case buffer.

  Args:
    stash: [stash_rows, width].
    start: the stash row of the first row.
    total_rows: rows of the worst-case buffer.
    group_sizes: int[groups].
    group_starts: int[groups], by default the exclusive cumulative sum of `group_sizes`.

  Returns:
    rows, [total_rows, width] of the stash's dtype. Padding is zero, and so are rows that would come
    from before the first or past the last row of the stash.
  """
  stash = np.asarray(stash)
  rows = np.zeros((total_rows, *stash.shape[1:]), stash.dtype)
  for row, stash_row in _moves(start, group_sizes, group_starts):
    if 0 <= stash_row < len(stash):
      rows[row] = stash[stash_row]
  return rows


def _moves(start, group_sizes, group_starts):
  """Yields (row of the worst-case buffer, row of the stash) for every row of every group."""
  group_sizes = np.asarray(group_sizes).tolist()
  if group_starts is None:
    group_starts = [sum(group_sizes[:group]) for group in range(len(group_sizes))]
  stash_row = int(start)
  for group_start, group_size in zip(np.asarray(group_starts).tolist(), group_sizes, strict=True):
    for i in range(group_size):
      yield group_start + i, stash_row
      stash_row += 1
