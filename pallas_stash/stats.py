"""What happened to a stash: counted in the program, read outside of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_stash.allocators import Allocator
from pallas_stash.arguments import describe, static_int
from pallas_stash.handover import next_number
from pallas_stash.kernels import int32


class StashStats(NamedTuple):
  """What happened to a stash, each int32[shards].

  Attributes:
    rows_in_use: rows that hold values now, alignment included; with pages, the rows of those.
    peak_rows: most rows that were ever in use.
    overflowed_pushes: pushes that did not fit and stored nothing.
    invalid_pushes: pushes whose groups overlapped or left the buffer, and stored nothing.
    sufficient_rows: the least capacity at which no push would have overflowed. It is `peak_rows` if
      none did.
  """

  rows_in_use: jax.Array
  peak_rows: jax.Array
  overflowed_pushes: jax.Array
  invalid_pushes: jax.Array
  sufficient_rows: jax.Array

  def log_line(self, capacity_rows: int | None = None) -> str:
    """Formats the statistics for a log.

        stash: peak 5,496 of 6,144 rows (89.5%), 0 pushes overflowed, 0 invalid, 5,496 rows would do

    Rows are those of the busiest shard: the capacity is of each, and it is the busiest that
    overflows first. Pushes are those of all shards together, so that none goes unseen.

    Args:
      capacity_rows: of a shard, `stash.rows_per_shard`. None leaves it out of the line.

    Raises:
      ValueError: for statistics that are traced, or a capacity that is no static int.
    """
    return _log_line(self, capacity_rows)


class TierStats(NamedTuple):
  """What happened to a stash with host memory, each int32[shards].

  Attributes:
    rows_in_use, peak_rows: as in `StashStats`, of HBM.
    overflowed_pushes, invalid_pushes: as in `StashStats`.
    sufficient_rows: the least capacity at which no push would have overflowed, of HBM and host
      memory together.
    host_rows_in_use: rows of host memory that are in use now, alignment included, of those too
      that are still on their way there.
    host_peak_rows: most rows of host memory that were ever in use.
    spilled_rows: rows that went to host memory at once, over all pushes, because HBM had no room
      for them: nothing overlaps that. At most 2**31 - 1.
    spilled_pushes: pushes that had such rows.
  """

  rows_in_use: jax.Array
  peak_rows: jax.Array
  overflowed_pushes: jax.Array
  invalid_pushes: jax.Array
  sufficient_rows: jax.Array
  host_rows_in_use: jax.Array
  host_peak_rows: jax.Array
  spilled_rows: jax.Array
  spilled_pushes: jax.Array

  def log_line(self, capacity_rows: int | None = None) -> str:
    """Formats the statistics for a log: as of `StashStats`, with those of host memory behind.

    ..., 5,496 rows would do, host peak 1,024 rows, 0 rows of 0 pushes spilled
    """
    of_both = _log_line(self, capacity_rows)
    spilled, pushes = (int(np.sum(count)) for count in (self.spilled_rows, self.spilled_pushes))
    return (
      f"{of_both}, host peak {int(np.max(self.host_peak_rows)):,} rows,"
      f" {spilled:,} rows of {pushes:,} push{'' if pushes == 1 else 'es'} spilled"
    )


def _log_line(stats, capacity_rows):
  for name, value in zip(stats._fields, stats, strict=True):
    if isinstance(value, jax.core.Tracer):
      raise ValueError(
        f"{name}={describe(value)} is traced and must have a value: return the statistics from"
        " the function under `jax.jit`, and format them outside."
      )
  peak, sufficient = (int(np.max(rows)) for rows in (stats.peak_rows, stats.sufficient_rows))
  overflowed, invalid = (
    int(np.sum(pushes)) for pushes in (stats.overflowed_pushes, stats.invalid_pushes)
  )
  of_capacity = ""
  if capacity_rows is not None:
    capacity_rows = static_int("capacity_rows", capacity_rows)
    of_capacity = f" of {capacity_rows:,}"
  share = f" ({peak / capacity_rows:.1%})" if capacity_rows else ""
  shards = np.size(stats.peak_rows)
  where = f" on the busiest of {shards} shards" if shards > 1 else ""
  return (
    f"stash: peak {peak:,}{of_capacity} rows{share}{where},"
    f" {overflowed:,} push{'' if overflowed == 1 else 'es'} overflowed, {invalid:,} invalid,"
    f" {sufficient:,} rows would do"
  )


class Counters(NamedTuple):
  """What a stash counts, each int32[shards].

  Attributes:
    peak_rows, overflowed_pushes, invalid_pushes, sufficient_rows: as in `StashStats`.
    pushes: of every kind, below 2**22 and then from 0 again; the number of the next one.
  """

  peak_rows: jax.Array
  overflowed_pushes: jax.Array
  invalid_pushes: jax.Array
  sufficient_rows: jax.Array
  pushes: jax.Array

  @classmethod
  def zero(cls, num_shards: int) -> "Counters":
    return cls(*(jnp.zeros((num_shards,), jnp.int32) for _ in cls._fields))

  def not_stored(self) -> jax.Array:
    """Returns how many pushes were not stored."""
    return self.overflowed_pushes + self.invalid_pushes

  def after_push(
    self,
    is_valid: jax.Array,
    is_stored: jax.Array,
    allocator: Allocator,
    host_wanted_rows: jax.Array | None = None,
  ) -> "Counters":
    """Counts a push.

    Args:
      is_valid: bool[], whether its groups were.
      is_stored: bool[].
      allocator: after it.
      host_wanted_rows: `HostCounters.wanted_rows` after it, of a stash with host memory.
    """
    wanted_rows = allocator.wanted_rows
    if host_wanted_rows is not None:
      wanted_rows = int32.add(wanted_rows, host_wanted_rows)
    return Counters(
      peak_rows=jnp.maximum(self.peak_rows, allocator.rows_in_use()),
      overflowed_pushes=self.overflowed_pushes + (is_valid & ~is_stored).astype(jnp.int32),
      invalid_pushes=self.invalid_pushes + (~is_valid).astype(jnp.int32),
      sufficient_rows=jnp.maximum(self.sufficient_rows, wanted_rows),
      pushes=next_number(self.pushes),
    )
