"""The plan of the kernel: which pieces there are, and what to load for each. Scalar arithmetic.

A tile is `tile_rows` destination rows, a piece is the part of one run that lands in one tile. Each
core has a share of the tiles and goes from piece to piece, in the order of the destination rows.
All numbers are int32[], in a kernel or outside of one; only runs are arrays, or references to them.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_stash.kernels.int32 import div, rem
from pallas_stash.kernels.tiling import Tiling

CORES = 2  # Those of a megacore chip share the tiles; elsewhere one core takes both halves in turn.
NO_ROW = 2**31 - 2  # Behind every row.


class SearchableRuns(NamedTuple):
  """What the plan reads of each run: the first row behind it tells whether to skip it.

  Attributes:
    offsets: int32[runs + 1], source row less destination row.
    destinations: int32[runs + 1], first destination row.
    ends: int32[runs + 1], destination row behind the last; 0 for an empty run.
  """

  offsets: Any
  destinations: Any
  ends: Any


def searchable(runs):
  """Returns `CopyRuns` with one more, which ends every search: it starts behind all rows."""
  sources, destinations, sizes = runs
  ends = jnp.where(sizes > 0, destinations + sizes, 0)
  end_of_runs = 0, NO_ROW, NO_ROW + 1
  searched = sources - destinations, destinations, ends
  return SearchableRuns(
    *(jnp.append(x, jnp.int32(end)) for x, end in zip(searched, end_of_runs, strict=True))
  )


def align_down(row, alignment: int):
  """Returns the last multiple of a power of two up to `row`; the compiler is told that it is."""
  return pl.multiple_of(row & -alignment, alignment)


def align_up(row, alignment: int):
  """Returns the first multiple of a power of two from `row` on; the compiler is told that it is."""
  return align_down(row + alignment - 1, alignment)


class Tiles(NamedTuple):
  """The tiles of destination rows, and which of them are a core's.

  Attributes:
    start: row where tile 0 starts: that of the HBM tile in which the window starts.
    first, last: numbers of the tiles of the core, [first, last).
    last_row: row behind those of the core.
    tiling: static.
  """

  start: jax.Array
  first: jax.Array
  last: jax.Array
  last_row: jax.Array
  tiling: Tiling

  @classmethod
  def of_core(cls, core, window_first, window_last, tiling, middle=None):
    """Returns the tiles of a core, for a window of rows [window_first, window_last).

    The second core has those that start at row `middle` or behind it; by default, half of them.
    """
    start = align_down(window_first, tiling.row_alignment)
    tiles_before = lambda row: div(row - start + tiling.tile_rows - 1, tiling.tile_rows)
    count = tiles_before(window_last)
    share = div(count + CORES - 1, CORES) if middle is None else tiles_before(middle)
    first = jnp.minimum(core * share, count)
    last = jnp.minimum(share + core * count, count)
    tiles = cls(start, first, last, window_last, tiling)
    # Row 2**31 may be in the last tile of all, not behind another.
    return tiles._replace(last_row=jnp.where(last == count, window_last, tiles.row_of(last)))

  def row_of(self, tile):
    """Returns the destination row where a tile starts."""
    return pl.multiple_of(self.start + tile * self.tiling.tile_rows, self.tiling.row_alignment)


class Position(NamedTuple):
  """Where to look for the next piece, all int32[].

  Attributes:
    run, row: it starts at the first destination row from `row` on that is in run `run` or a later.
    landed: the source row behind those of the piece before; -1 for the first piece of a core.
    landed_at: where that row is in the landing slot of the piece before.
  """

  run: jax.Array
  row: jax.Array
  landed: jax.Array
  landed_at: jax.Array


class Piece(NamedTuple):
  """Consecutive rows of one run within one tile, all int32[].

  Attributes:
    tile: number of the tile; not one of the core's if it has no more pieces.
    first, last: rows of the piece within the tile, [first, last).
    shift: row `i` of the tile is row `i + shift` of the landing slot, `0 <= shift < row_alignment`.
    load_rows: rows to be loaded, whole HBM tiles.
    continues_at: where the piece before ends in its landing slot, if this piece starts in the same
      HBM tile, which is then not loaded again but copied; else -1.
  """

  tile: jax.Array
  first: jax.Array
  last: jax.Array
  shift: jax.Array
  load_rows: jax.Array
  continues_at: jax.Array


def first_position(tiles):
  """Returns the position of a core that has looked for no piece yet."""
  return Position(jnp.int32(0), tiles.row_of(tiles.first), jnp.int32(-1), jnp.int32(0))


def seek(position, runs):
  """Returns the position with the run that holds its row, or else the next that starts."""
  is_before = lambda run: runs.ends[run] <= position.row
  return position._replace(run=lax.while_loop(is_before, lambda run: run + 1, position.run))


def next_piece(position, runs, tiles):
  """Returns what is at a position that was sought.

  What is only needed if there is something to load, or when its load was started, is a function:
  computed before, it costs a kernel with small pieces up to 2.6% more cycles.

  Args:
    position: `Position`.
    runs: `SearchableRuns`.
    tiles: `Tiles`.

  Returns:
    there_is_one: bool[], whether a piece of the core is there.
    piece: `Piece`.
    load_places: function of nothing that returns the rows of the source and of the landing slot
      where the load starts, whole HBM tiles.
    position_behind: function of nothing that returns the `Position` behind the piece.
  """
  tile_rows, alignment = tiles.tiling.tile_rows, tiles.tiling.row_alignment
  run = position.run
  row = jnp.maximum(runs.destinations[run], position.row)
  there_is_one = row < tiles.last_row
  tile = div(row - tiles.start, tile_rows)
  tile_row = tiles.row_of(tile)
  first, last = row - tile_row, jnp.minimum(runs.ends[run] - tile_row, tile_rows)

  # HBM tiles land in whole, so that the first row of the piece is at `first` or behind it.
  source_row = row + runs.offsets[run]
  in_hbm_tile = rem(source_row, alignment)
  landing_row = align_up(first - in_hbm_tile, alignment)
  shift = landing_row + in_hbm_tile - first
  is_continued = (source_row == position.landed) & (in_hbm_tile != 0)
  there = jnp.where(is_continued, jnp.int32(alignment), 0)
  load_rows = align_up(in_hbm_tile + last - first, alignment) - there

  piece = Piece(
    tile=jnp.where(there_is_one, tile, tiles.last),
    first=first,
    last=last,
    shift=shift,
    load_rows=load_rows,
    continues_at=jnp.where(is_continued, position.landed_at, -1),
  )

  def load_places():
    return source_row - in_hbm_tile + there, landing_row + there

  def position_behind():
    next_row = jnp.where(there_is_one, tile_row + last, row)
    return Position(
      run=run + (runs.ends[run] == next_row).astype(jnp.int32),
      row=next_row,
      landed=source_row + last - first,
      landed_at=last + shift,
    )

  return there_is_one, piece, load_places, position_behind
