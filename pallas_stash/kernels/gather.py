"""The Pallas TPU kernel that gathers runs of rows: compact and expand are two uses of it.

Runs of source rows go to consecutive destination rows. A tile is `tile_rows` destination rows, a
piece is the part of one run that lands in one tile, and each core walks over the pieces of its
share of the tiles:

    source --load--> landing slot --shift and merge--> assembly slot --store--> destination
                          \\_________ a whole aligned tile needs neither __________/

HBM moves in blocks of `row_alignment` rows, whatever the row numbers: a piece is loaded with up to
a block too much at either end, but for a block that the piece before it has brought already. In
VMEM the landed rows are shifted to where they belong and merged into the tile (`tile_words`).
Compact owns only the window of rows that its runs cover; what else lies in the first and last block
is read first and written back as it was. Expand owns every row, and fills those that no run covers
with a blank word, or leaves them undefined: then it stores no tile without a piece.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels import tile_words
from pallas_stash.kernels.int32 import div, rem
from pallas_stash.kernels.tiling import choose_tiling

CORES = 2  # Those of a megacore chip share the tiles; elsewhere one core takes both halves in turn.
LOADS_AHEAD = 2  # A landing slot is loaded again two pieces after its last store was started.
NO_ROW = 2**31 - 2  # Behind every row.


class Slots(NamedTuple):
  """VMEM tiles with the semaphores of their DMAs.

  Attributes:
    tiles: VMEM [slots, rows, columns]; or [1, rows, columns], from which all slots store.
    loads: DMA semaphore [slots], HBM to tile.
    stores: DMA semaphore [slots], tile to HBM.
    rows_leaving: SMEM int32[slots], rows of the store in flight, 0 where there is none.
  """

  tiles: Any
  loads: Any
  stores: Any
  rows_leaving: Any

  @classmethod
  def scratch_shapes(cls, slots, tiles, rows, columns, dtype, alignment):
    """Returns what to allocate; of `tiles` with an axis for each HBM tile, unless it is None.

    VMEM is then tiled as HBM is, and a DMA is a plain copy. The compiler for tpu7x otherwise tiles
    twice as many rows of two bytes, and a DMA gathers and scatters: four times the cycles.
    """
    semaphores = pltpu.SemaphoreType.DMA((slots,))
    rows = (rows,) if alignment is None else (rows // alignment, alignment)
    return cls(
      pltpu.VMEM((tiles, *rows, columns), dtype),
      semaphores,
      semaphores,
      pltpu.SMEM((slots,), jnp.int32),
    )

  def as_rows(self):
    """Returns the slots, from what was allocated."""
    tiles, *rows, columns = self.tiles.shape
    if len(rows) == 1:
      return self
    return self._replace(tiles=self.tiles.reshape(tiles, math.prod(rows), columns))


class Position(NamedTuple):
  """Where the next piece starts, all int32[].

  Attributes:
    run, row: row `row` of the destination, which is in run `run`.
    landed: the source row behind those of the piece before; -1 for the first piece of a core.
    landed_at: where the block of that row is in the landing slot of the piece before.
  """

  run: jax.Array
  row: jax.Array
  landed: jax.Array
  landed_at: jax.Array


class Piece(NamedTuple):
  """Consecutive rows of one run within one tile, all int32[].

  Attributes:
    tile: number of the tile.
    tile_row: destination row where the tile starts.
    first, last: rows of the piece within the tile, [first, last).
    source_row: source row of row `first`.
    is_continued: whether the block of `source_row` landed with the piece before, to be copied.
    load_row, load_rows: the other aligned source rows around the piece, to be loaded.
    landing_row: where the block of `source_row` is in the landing slot, a multiple of `block_rows`.
    load_to: where the load goes in the landing slot, a multiple of `row_alignment`.
    shift: row `i` of the tile is row `i + shift` of the landing slot, `0 <= shift < block_rows`.
  """

  tile: jax.Array
  tile_row: jax.Array
  first: jax.Array
  last: jax.Array
  source_row: jax.Array
  is_continued: jax.Array
  load_row: jax.Array
  load_rows: jax.Array
  landing_row: jax.Array
  load_to: jax.Array
  shift: jax.Array


def gather(source, destination, runs, window, tiling=None, interpret=False):
  """Copies runs of rows of `source` to `destination`.

  Args:
    source: [source_rows, width], whole tiles of rows and of 128 columns.
    destination: [destination_rows, width] to update in place, or the ShapeDtypeStruct of a new
      buffer, whose other rows are filled with the blank word or undefined.
    runs: `CopyRuns`; without gaps between destinations where the destination is updated.
    window: int32[4]: the first and last (exclusive) destination row to write, the blank word, and
      of a new buffer whether other rows are filled with it, 0 or 1.
    tiling: `Tiling`, or None for `choose_tiling`.
    interpret: False, or `pltpu.InterpretParams`.

  Returns:
    The destination.
  """
  dtype = source.dtype
  tiling = tiling or choose_tiling(source.shape[1], dtype.itemsize)
  is_new = isinstance(destination, jax.ShapeDtypeStruct)
  # One more run ends every search: it starts behind all rows.
  end_of_runs = [jnp.full((1,), value, jnp.int32) for value in (0, NO_ROW, 1)]
  scalars = (*map(jnp.append, runs, end_of_runs), window)
  mat = jax.typeof(source).manual_axis_type
  out_shape = jax.ShapeDtypeStruct(destination.shape, dtype, manual_axis_type=mat)
  in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  landing_rows = tiling.tile_rows + tiling.block_rows
  for first_column, columns in tiling.column_blocks:
    updated = [] if isinstance(destination, jax.ShapeDtypeStruct) else [destination]
    # The interpreter cannot view a reference as another shape.
    alignment = None if interpret else tiling.row_alignment
    slots = functools.partial(
      Slots.scratch_shapes, columns=columns, dtype=dtype, alignment=alignment
    )
    destination = pl.pallas_call(
      functools.partial(
        _kernel,
        columns=pl.ds(first_column, columns),
        tiling=tiling,
        is_new=is_new,
        interpreted=bool(interpret),
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(CORES,),
        in_specs=[in_hbm, [in_hbm] * len(updated)],
        out_specs=in_hbm,
        scratch_shapes=[
          slots(tiling.landing_slots, tiling.landing_slots, landing_rows),
          slots(tiling.assembly_slots, tiling.assembly_slots, tiling.tile_rows),
          slots(tiling.blank_stores, 1, tiling.tile_rows),
        ],
      ),
      out_shape=out_shape,
      input_output_aliases={len(scalars) + 1: 0} if updated else {},
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel",),
        vmem_limit_bytes=tiling.vmem_bytes(dtype.itemsize) + 2**21,
      ),
      interpret=interpret,
      name="stash_expand" if is_new else "stash_compact",
    )(*scalars, source, updated)
  return destination


def _kernel(
  # Scalars.
  sources,
  destinations,
  sizes,
  window,
  # HBM.
  source,
  updated,
  out,
  # VMEM, semaphores and bookkeeping.
  landing,
  assembly,
  blank,
  *,
  columns,
  tiling,
  is_new,
  interpreted,
):
  del updated  # The same memory as `out`.
  tile_rows, block_rows, alignment = tiling.tile_rows, tiling.block_rows, tiling.row_alignment
  landing, assembly, blank = all_slots = [s.as_rows() for s in (landing, assembly, blank)]
  as_words = {"block_rows": block_rows, "interpreted": interpreted}
  merge = functools.partial(tile_words.merge, **as_words)
  fill = functools.partial(tile_words.fill, **as_words)
  align_down = lambda row: pl.multiple_of(row & -alignment, alignment)
  align_up = lambda row: align_down(row + alignment - 1)
  block_down = lambda row: pl.multiple_of(row & -block_rows, block_rows)

  window_first, window_last, blank_word, is_filled = (window[i] for i in range(4))
  tiles_row = align_down(window_first)
  row_of_tile = lambda tile: pl.multiple_of(tiles_row + tile * tile_rows, alignment)

  # The tiles of this core.
  tiles = div(window_last - tiles_row + tile_rows - 1, tile_rows)
  share = div(tiles + CORES - 1, CORES)
  first_tile = jnp.minimum(pl.program_id(0) * share, tiles)
  last_tile = jnp.minimum(first_tile + share, tiles)
  last_row = jnp.minimum(row_of_tile(last_tile), window_last)

  def seek(run, row):
    """Returns the run and the row of the first row at or after `row` in run `run` or later."""
    is_before = lambda run: (sizes[run] == 0) | (destinations[run] + sizes[run] <= row)
    run = lax.while_loop(is_before, lambda run: run + 1, run)
    return run, jnp.maximum(destinations[run], row)

  def piece_at(position):
    run, row, landed, _ = position
    tile = div(row - tiles_row, tile_rows)
    tile_row = row_of_tile(tile)
    first = row - tile_row
    last = jnp.minimum(destinations[run] + sizes[run] - tile_row, tile_rows)
    source_row = sources[run] + row - destinations[run]
    source_block = align_down(source_row)
    is_continued = (source_row == landed) & (source_row != source_block)
    there = jnp.where(is_continued, alignment, 0)
    landing_row = block_down(first)
    shift = (source_row - source_block) - (first - landing_row)
    behind = jnp.where(shift < 0, block_rows, 0)
    return Piece(
      tile=tile,
      tile_row=tile_row,
      first=first,
      last=last,
      source_row=source_row,
      is_continued=is_continued,
      load_row=pl.multiple_of(source_block + there, alignment),
      load_rows=align_up(source_row + last - first) - source_block - there,
      landing_row=pl.multiple_of(landing_row + behind, block_rows),
      load_to=pl.multiple_of(landing_row + behind + there, alignment),
      shift=shift + behind,
    )

  def load(piece, slot):
    rows = pl.multiple_of(piece.load_rows, alignment)
    return pltpu.make_async_copy(
      source.at[pl.ds(piece.load_row, rows), columns],
      landing.tiles.at[slot, pl.ds(piece.load_to, rows)],
      landing.loads.at[slot],
    )

  def load_next(position, slot):
    """Starts the load of the piece at `position`, if there is one; returns the next position."""
    piece = piece_at(position)
    there_is_one = position.row < last_row
    pl.when(there_is_one & (piece.load_rows > 0))(lambda: load(piece, slot).start())
    return position_behind(piece, position, there_is_one)

  def position_behind(piece, position, there_is_one=True):
    """Returns the position of the piece that follows; the same run and row where there is none."""
    end = piece.source_row + piece.last - piece.first
    landed_at = piece.landing_row + align_down(end) - align_down(piece.source_row)
    row = jnp.where(there_is_one, piece.tile_row + piece.last, position.row)
    return Position(*seek(position.run, row), end, landed_at)

  def store(slots, slot, tile_row, first, last):
    tile = slot if slots.tiles.shape[0] > 1 else 0
    rows = pl.multiple_of(last - first, alignment)
    return pltpu.make_async_copy(
      slots.tiles.at[tile, pl.ds(first, rows)],
      out.at[pl.ds(pl.multiple_of(tile_row + first, alignment), rows), columns],
      slots.stores.at[slot],
    )

  def start_store(slots, slot, tile_row, first, last):
    """Starts to store rows `first` to `last` of a tile, from the start of a block on."""
    slots.rows_leaving[slot] = last - first
    store(slots, slot, tile_row, first, last).start()

  def finish_store(slots, slot):
    rows = slots.rows_leaving[slot]

    @pl.when(rows > 0)
    def _():
      store(slots, slot, 0, 0, rows).wait()
      slots.rows_leaving[slot] = 0

  def store_blank_tiles(first, last):
    @pl.loop(first, jnp.where(is_filled == 0, first, last))
    def _(tile):
      slot = rem(tile, tiling.blank_stores)
      finish_store(blank, slot)
      row = row_of_tile(tile)
      start_store(blank, slot, row, 0, jnp.minimum(tile_rows, window_last - row))

  def read_edge(slot, tile_row, row, last):
    """Reads the block of tile rows from `row` on, up to `last`, as the destination has them."""
    rows = pl.multiple_of(jnp.minimum(block_rows, last - row), alignment)
    copy = pltpu.make_async_copy(
      out.at[pl.ds(pl.multiple_of(tile_row + row, alignment), rows), columns],
      assembly.tiles.at[slot, pl.ds(row, rows)],
      assembly.loads.at[slot],
    )
    copy.start()
    copy.wait()

  def open_tile(slot, tile_row):
    """Puts into the assembly slot what the tile holds besides its pieces."""
    if is_new:
      pl.when(is_filled != 0)(lambda: fill(assembly.tiles.at[slot], blank_word))
      return
    last = window_last - tile_row
    ends_inside = (last < tile_rows) & (last != align_down(last))
    pl.when(tile_row < window_first)(lambda: read_edge(slot, tile_row, 0, align_up(last)))
    pl.when(ends_inside)(lambda: read_edge(slot, tile_row, block_down(last), align_up(last)))

  def write_piece(state):
    index, position, position_to_load, previous_tile, tiles_opened, first = state
    slot = rem(index, tiling.landing_slots)
    piece = piece_at(position)
    next_position = position_behind(piece, position)
    rows_owned = jnp.minimum(window_last - piece.tile_row, tile_rows)
    is_first_piece = piece.tile != previous_tile
    first = jnp.where(is_first_piece, piece.first, first)
    tiles_opened += is_first_piece.astype(jnp.int32)
    pl.when(piece.load_rows > 0)(lambda: load(piece, slot).wait())

    @pl.when(piece.is_continued)
    def _():
      # Two slots before the one that is loaded next: what landed there is still there.
      previous = landing.tiles.at[rem(index + tiling.landing_slots - 1, tiling.landing_slots)]
      shared = previous[pl.ds(pl.multiple_of(position.landed_at, alignment), alignment)]
      landing.tiles[slot, pl.ds(piece.landing_row, alignment)] = shared

    if is_new:
      store_blank_tiles(previous_tile + 1, piece.tile)

    is_whole_tile = (piece.first == 0) & (piece.last == rows_owned)
    is_aligned = (piece.source_row == piece.load_row) & (piece.last == align_down(piece.last))
    is_ready = is_whole_tile & is_aligned

    @pl.when(is_ready)
    def _():
      start_store(landing, slot, piece.tile_row, 0, piece.last)

    @pl.when(jnp.logical_not(is_ready))
    def _():
      # By turns, and not by tile number: groups in buckets may touch every other tile only.
      tile_slot = rem(tiles_opened, tiling.assembly_slots)

      @pl.when(is_first_piece)
      def _():
        finish_store(assembly, tile_slot)
        open_tile(tile_slot, piece.tile_row)

      merge(
        landing.tiles.at[slot], assembly.tiles.at[tile_slot], piece.first, piece.last, piece.shift
      )

      @pl.when(next_position.row >= jnp.minimum(piece.tile_row + tile_rows, last_row))
      def _():
        # What is undefined is left as it is, but for the ends of blocks.
        first_stored = block_down(jnp.where(is_filled == 0, first, 0))
        last_stored = align_up(jnp.where(is_filled == 0, piece.last, rows_owned))
        start_store(assembly, tile_slot, piece.tile_row, first_stored, last_stored)

    free_slot = rem(index + LOADS_AHEAD, tiling.landing_slots)
    finish_store(landing, free_slot)
    position_to_load = load_next(position_to_load, free_slot)
    return index + 1, next_position, position_to_load, piece.tile, tiles_opened, first

  for slots in all_slots:
    for slot in range(slots.rows_leaving.shape[0]):
      slots.rows_leaving[slot] = 0
  if is_new:
    fill(blank.tiles.at[0], blank_word)

  start = Position(*seek(jnp.int32(0), row_of_tile(first_tile)), jnp.int32(-1), jnp.int32(0))
  position_to_load = start
  for slot in range(LOADS_AHEAD):
    position_to_load = load_next(position_to_load, slot)
  *_, last_written_tile, _, _ = lax.while_loop(
    lambda state: state[1].row < last_row,
    write_piece,
    (jnp.int32(0), start, position_to_load, first_tile - 1, jnp.int32(0), jnp.int32(0)),
  )
  if is_new:
    store_blank_tiles(last_written_tile + 1, last_tile)
  for slots in all_slots:
    for slot in range(slots.rows_leaving.shape[0]):
      finish_store(slots, slot)
