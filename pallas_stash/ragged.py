"""Ragged rows: groups of different sizes inside a worst-case buffer, and the copies they mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_stash.arguments import as_groups, describe, static_int


class CopyRuns(NamedTuple):
  """Contiguous runs of rows to copy: what the kernels are given.

  Every row lies inside both buffers, no two runs overlap in the destination, and `destinations`
  ascends over the runs that are not empty. Empty runs may stand anywhere.

  Attributes:
    sources: int32[runs], first source row of each run.
    destinations: int32[runs], first destination row of each run.
    sizes: int32[runs], rows of each run, zero or more.
  """

  sources: jax.Array
  destinations: jax.Array
  sizes: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class RaggedRows:
  """Where the rows of each group are in a worst-case buffer. All its other rows are padding.

  Row `i` of group `g` is row `group_starts[g] + i` of the buffer, for `i < group_sizes[g]`: a valid
  prefix (the layout of megablox `gmm`; leave `group_starts` out), valid rows at `[start, end)` of a
  globally sorted buffer (one group), capacity buckets (starts at multiples of the capacity), or any
  other layout whose groups do not overlap, in any order, empty groups included.

  Whether the groups fit into the buffer and are disjoint is known only at run time: see `is_valid`.

  Args:
    group_sizes: int[groups], rows in each group.
    total_rows: static int, rows of the worst-case buffer.
    group_starts: int[groups], first row of each group. None: the exclusive cumulative sum of
      `group_sizes`.

  Raises:
    ValueError: for what is no array of integers, a rank other than 1, starts and sizes of different
      lengths, or a `total_rows` that is not positive.
  """

  def __init__(self, group_sizes, total_rows: int, group_starts=None):
    total_rows = static_int("total_rows", total_rows, ": the rows of the worst-case buffer")
    if not 0 < total_rows < 2**31:
      raise ValueError(f"{total_rows=} must be positive, and below 2**31.")
    self.total_rows = total_rows
    self.group_sizes = as_groups("group_sizes", group_sizes)
    self.group_starts = None
    if group_starts is not None:
      self.group_starts = as_groups("group_starts", group_starts)
      if self.group_starts.shape != self.group_sizes.shape:
        raise ValueError(
          f"group_starts of shape {self.group_starts.shape} must have one entry for each entry"
          f" of group_sizes, of shape {self.group_sizes.shape}."
        )

  def __repr__(self):
    sizes, starts = (describe(x, with_values=True) for x in (self.group_sizes, self.group_starts))
    return f"RaggedRows(group_sizes={sizes}, total_rows={self.total_rows}, group_starts={starts})"

  def tree_flatten_with_keys(self):
    key = jax.tree_util.GetAttrKey
    children = (
      (key("group_sizes"), self.group_sizes),
      (key("group_starts"), self.group_starts),
    )
    return children, self.total_rows

  @classmethod
  def tree_unflatten(cls, total_rows, children):
    # Not through __init__: transformations rebuild pytrees around leaves that are not arrays.
    ragged = object.__new__(cls)
    ragged.total_rows = total_rows
    ragged.group_sizes, ragged.group_starts = children
    return ragged

  def num_rows(self) -> jax.Array:
    """Returns the rows in all groups together, int32[]; 0 where the layout is not valid."""
    return jnp.sum(self._segments()[1], dtype=jnp.int32)

  def is_valid(self) -> jax.Array:
    """Returns bool[]: whether every group lies inside the buffer and no two groups overlap."""
    sizes, starts = self._sizes_and_starts()
    given_sizes = as_int32(self.group_sizes)
    in_range = jnp.all((given_sizes >= 0) & (given_sizes <= self.total_rows))
    if self.group_starts is None:
      # A cumulative sum that leaves int32 was past total_rows one group before, or is negative now.
      ends = starts + sizes
      return in_range & jnp.all((ends >= 0) & (ends <= self.total_rows))
    occupied = sizes > 0
    given_starts = as_int32(self.group_starts)
    inside = (given_starts >= 0) & (given_starts <= self.total_rows - sizes)
    in_range &= jnp.all(inside | ~occupied)
    order = jnp.argsort(jnp.where(occupied, starts, self.total_rows))
    starts, sizes = starts[order], sizes[order]
    return in_range & jnp.all((starts[:-1] + sizes[:-1] <= starts[1:]) | (sizes[1:] == 0))

  def is_in_group(self) -> jax.Array:
    """Returns bool[total_rows]: whether each row is in a group. None is where it is not valid."""
    starts, sizes = self._segments()
    # Groups are disjoint: as many have started as have ended at a row of padding.
    started = jnp.zeros((self.total_rows + 1,), jnp.int32)
    # Every row is inside: nothing is left to a scatter that drops the others.
    for rows, by in (starts, 1), (starts + sizes, -1):
      started = started.at[rows].add(by, mode="promise_in_bounds")
    return jnp.cumsum(started)[:-1] > 0

  def compact_runs(self, start, stash_rows: int) -> CopyRuns:
    """Returns the runs that copy the groups, tight and in order, to stash row `start` onwards.

    Rows that would fall outside the stash are left out; a layout that is not valid moves nothing.

    Args:
      start: int32[], stash row of the first row of the first group.
      stash_rows: static, rows of the stash.

    Raises:
      ValueError: where row numbers could pass int32.
    """
    if self.total_rows + stash_rows >= 2**31:
      raise ValueError(
        f"total_rows={self.total_rows} and {stash_rows=} must sum to less than 2**31: row numbers"
        " are int32."
      )
    starts, sizes = self._segments()
    start = jnp.clip(as_int32(start), -self.total_rows, stash_rows)
    destinations = start + jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    first = jnp.maximum(destinations, 0)
    stop = jnp.minimum(destinations + sizes, stash_rows)
    return CopyRuns(
      sources=starts + first - destinations,
      destinations=first,
      sizes=jnp.maximum(stop - first, 0),
    )

  def expand_runs(self, start, stash_rows: int) -> CopyRuns:
    """Returns the runs that copy back what `compact_runs` copied; arguments as there."""
    return self.back(self.compact_runs(start, stash_rows))

  def back(self, to_stash: CopyRuns) -> CopyRuns:
    """Returns the runs that copy back what `compact_runs` or `runs_between` copied."""
    runs = CopyRuns(to_stash.destinations, to_stash.sources, to_stash.sizes)
    if self.group_starts is None:
      return runs
    order = jnp.argsort(runs.destinations)
    return CopyRuns(*(field[order] for field in runs))

  def runs_between(self, first, last, start) -> CopyRuns:
    """Returns the runs that copy some rows of all groups, tight and in order.

    A layout that is not valid moves nothing. The rows have to be inside of what they are copied to.

    Args:
      first, last: int32[], which rows, counted over all groups: [first, last).
      start: int32[], where the first of them is copied to.
    """
    starts, sizes = self._segments()
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    before = ends - sizes
    low, high = (jnp.clip(row, before, ends) for row in (first, last))
    sizes = jnp.maximum(high - low, 0)
    # Of an empty run any place will do that is in the buffer.
    destinations = jnp.where(sizes > 0, start + low - first, 0)
    return CopyRuns(starts + low - before, destinations, sizes)

  def _sizes_and_starts(self):
    sizes = jnp.clip(as_int32(self.group_sizes), 0, self.total_rows)
    if self.group_starts is None:
      return sizes, jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    return sizes, jnp.clip(as_int32(self.group_starts), 0, self.total_rows)

  def _segments(self):
    """Returns starts and sizes, int32[segments > 0], adjacent groups as one; empty if not valid."""
    sizes, starts = self._sizes_and_starts()
    sizes = jnp.where(self.is_valid(), sizes, 0)
    if self.group_starts is None or sizes.shape[0] == 0:
      return jnp.zeros((1,), jnp.int32), jnp.sum(sizes, dtype=jnp.int32)[None]
    return starts, sizes


def as_int32(integers: jax.Array) -> jax.Array:
  """Returns integers of any dtype as int32, the nearest one for those that it does not hold."""
  integers = jnp.asarray(integers)
  limits, to = jnp.iinfo(integers.dtype), jnp.iinfo(jnp.int32)
  low, high = max(limits.min, to.min), min(limits.max, to.max)
  return jnp.clip(integers, low, high).astype(jnp.int32)
