"""Which row tiles a grouped matmul visits, and where in the stash the rows of each of them lie.

Scalar arithmetic: what the kernels of `grouped` steer by, without what they move.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_stash.kernels import megablox
from pallas_stash.kernels.tiling import SUBLANES

ALIGN = SUBLANES  # Rows of an HBM tile, of two or four bytes an element.


class Place(NamedTuple):
  """The rows of a push, in `lhs` and in the stash.

  Attributes:
    first: int32[], first row in `lhs`.
    rows: int32[], how many.
    start: int32[], first row in the stash, congruent to `first` modulo an HBM tile; -1 where they
      were not stored.
  """

  first: jax.Array
  rows: jax.Array
  start: jax.Array


class Visits(NamedTuple):
  """The row tiles that a matmul visits, once for each group with rows in it; in scalar memory.

  Attributes:
    group_starts: int32[groups + 1], first row of each group, and the end of the last.
    groups: int32[visits], the group of each visit.
    tiles: int32[visits], its row tile.
    scalars: int32[4], the first of the groups here, and the fields of `Place`.
  """

  group_starts: Any
  groups: Any
  tiles: Any
  scalars: Any

  @classmethod
  def of(cls, group_sizes, place, total_rows, tile_rows, group_offset, groups_here, with_empty):
    """Returns them, and their number."""
    group_sizes = megablox.within(group_sizes, total_rows)
    (starts, groups, tiles), number = megablox.group_metadata(
      group_sizes, total_rows, tile_rows, group_offset, groups_here, with_empty
    )
    scalars = jnp.stack([group_offset, *place]).astype(jnp.int32)
    return cls(starts.astype(jnp.int32), groups, tiles, scalars), number.astype(jnp.int32)

  @property
  def place(self):
    return Place(*(self.scalars[i] for i in (1, 2, 3)))

  def group_here(self, visit):
    """Returns the group of a visit, as its matrix is numbered here."""
    return self.groups[visit] - self.scalars[0]

  def is_empty(self, visit):
    group = self.groups[visit]
    return self.group_starts[group] == self.group_starts[group + 1]

  def is_stored(self):
    return self.place.start >= 0

  def has_rows(self):
    """Returns whether there are rows in the stash: a push of none may start anywhere."""
    return self.is_stored() & (self.place.rows > 0)

  def stash_row(self, visit, tile_rows):
    """Returns the stash row of the first row of the tile; it may lie outside of the stash."""
    shift = jnp.where(self.has_rows(), self.place.start - self.place.first, 0)
    return self.tiles[visit] * tile_rows + shift

  def own_rows(self, visit, tile_rows):
    """Returns the first row within the tile, and how many, of the HBM tiles that are the push's."""
    first = self.place.first - self.tiles[visit] * tile_rows
    last = jnp.clip(first + self.place.rows, 0, tile_rows)
    first = jnp.clip(first, 0, tile_rows) & -ALIGN
    rows = ((last + ALIGN - 1) & -ALIGN) - first
    rows = jnp.where(self.has_rows(), jnp.maximum(rows, 0), 0)
    return pl.multiple_of(first, ALIGN), pl.multiple_of(rows, ALIGN)

  def read_row(self, visit, tile_rows, stash_rows):
    """Returns the first of `tile_rows` stash rows to read for the tile, and the row to roll it by.

    Where the tile reaches out of the stash, which has fewer rows in front of the push or behind it
    than the tile, the rows that are read lie further in.
    """
    row = self.stash_row(visit, tile_rows)
    read = pl.multiple_of(jnp.clip(row, 0, stash_rows - tile_rows), ALIGN)
    return read, jnp.where(row > read, tile_rows - (row - read), read - row)

  def is_first_of(self, ids, visit):
    """Returns whether a visit is the first of its `ids`, of `groups` or `tiles`."""
    return (visit == 0) | (ids[jnp.maximum(visit - 1, 0)] != ids[visit])

  def is_last_of(self, ids, visit, visits):
    return (visit == visits - 1) | (ids[jnp.minimum(visit + 1, visits - 1)] != ids[visit])

  def rows_of_group(self, visit, tile_rows):
    """Returns the first row of the group and its end, counted from the first of the tile."""
    group, first = self.groups[visit], self.tiles[visit] * tile_rows
    return self.group_starts[group] - first, self.group_starts[group + 1] - first

  def is_in_group(self, visit, shape):
    """Returns bool[shape], whether the rows of the tile are of the group of the visit."""
    first, end = self.rows_of_group(visit, shape[0])
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= first) & (row < end)
