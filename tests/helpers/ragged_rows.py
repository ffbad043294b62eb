"""What `reference.ragged_rows` says of arrays of NumPy, of any dtype, with few programs compiled.

The reference is asked where row numbers go; the rows follow them. Layouts are given to it with
empty groups behind them, up to `GROUPS`.
"""

import jax
import numpy as np

import reference.ragged_rows
from tests.helpers.support import GROUPS

INT32 = np.iinfo(np.int32)

_compact = jax.jit(reference.ragged_rows.compact)
_expand = jax.jit(reference.ragged_rows.expand, static_argnums=2)


def compact(rows, stash, start, group_sizes, group_starts=None):
  """As `reference.ragged_rows.compact`."""
  rows, stash = np.asarray(rows), np.array(stash)
  number, none = np.arange(len(rows))[:, None], np.full((len(stash), 1), -1)
  start, *layout = _traced(start, group_sizes, group_starts)
  with jax.enable_x64(start.dtype == np.int64):
    row = np.asarray(_compact(number, none, start, *layout))[:, 0]
  stash[row >= 0] = rows[row[row >= 0]]
  return stash


def expand(stash, start, total_rows, group_sizes, group_starts=None):
  """As `reference.ragged_rows.expand`."""
  stash = np.asarray(stash)
  number = 1 + np.arange(len(stash))[:, None]  # Zero is padding.
  start, *layout = _traced(start, group_sizes, group_starts)
  with jax.enable_x64(start.dtype == np.int64):
    row = np.asarray(_expand(number, start, total_rows, *layout))[:, 0] - 1
  rows = np.zeros((total_rows, *stash.shape[1:]), stash.dtype)
  rows[row >= 0] = stash[row[row >= 0]]
  return rows


def _traced(start, group_sizes, group_starts):
  """Returns arrays; a start is of 64 bits only if it must be."""
  group_sizes = np.asarray(group_sizes)
  if group_starts is None:
    group_starts = np.cumsum(group_sizes) - group_sizes
  empty = (0, max(0, GROUPS - len(group_sizes)))
  layout = [np.pad(np.asarray(groups, np.int32), empty) for groups in (group_sizes, group_starts)]
  is_near = INT32.min <= start <= INT32.max
  return np.asarray(start, np.int32 if is_near else np.int64), *layout
