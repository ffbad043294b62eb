"""The Pallas TPU kernel that gathers runs of rows: compact and expand are two uses of it.

Runs of source rows go to consecutive destination rows. A tile is `tile_rows` destination rows, a
piece is the part of one run that lands in one tile, and each core walks over the pieces of its
share of the tiles:

    source --load--> landing slot --shift and merge--> assembly slot --store--> destination
                          \\_________ a whole aligned tile needs neither __________/

The loads of some pieces are ahead, noted in scalar memory. DMAs move whole HBM tiles, of
`row_alignment` rows, whatever the row numbers: a piece is loaded with up to an HBM tile too much at
either end, but for one that the piece before it has brought already. In VMEM the landed rows are
shifted to where they belong and merged into the tile, a register's rows (a block) at a time
(`tile_words`). Compact owns only the window of rows that its runs cover; what else lies in the
first and last block is read first and written back as it was. Expand owns every row, and fills
those that no run covers with a blank word, or leaves them undefined: then it stores hardly more
than the pieces.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from pallas_stash.kernels import tile_words
from pallas_stash.kernels.int32 import div, rem, repeat
from pallas_stash.kernels.tiling import choose_tiling

CORES = 2  # Those of a megacore chip share the tiles; elsewhere one core takes both halves in turn.
IDLE_SLOTS = 2  # A landing slot is loaded again two pieces after a store from it was started.
NO_ROW = 2**31 - 2  # Behind every row.
ZERO = np.int32(0)  # Under x64 the compiler is given an int as an int64.


class Slots(NamedTuple):
  """VMEM tiles with the semaphores of their DMAs.

  Attributes:
    tiles: VMEM [slots, rows, columns]; or [1, rows, columns], from which all slots store.
    loads: DMA semaphore [slots], HBM to tile.
    stores: DMA semaphore [slots], tile to HBM.
    rows_leaving: SMEM int32[slots], rows of the stores in flight, which share a semaphore.
  """

  tiles: Any
  loads: Any
  stores: Any
  rows_leaving: Any

  @classmethod
  def scratch_shapes(cls, slots, tiles, rows, columns, dtype, alignment):
    """Returns what to allocate; `tiles` with an axis of HBM tiles, unless `alignment` is None.

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


def gather(source, destination, runs, window, tiling=None, interpret=False, checks_bounds=False):
  """Copies runs of rows of `source` to `destination`.

  Args:
    source: [source_rows, width], whole tiles of rows and of 128 columns.
    destination: [destination_rows, width] to update in place, or the ShapeDtypeStruct of a new
      buffer, whose other rows are filled with the blank word or undefined.
    runs: `CopyRuns`; without gaps between destinations where the destination is updated.
    window: int32[4]: the first and last (exclusive) destination row to write, the blank word, and
      whether other rows of the window are filled with it, 0 or 1: of a new buffer only, and then
      the window consists of whole HBM tiles.
    tiling: `Tiling`, or None for `choose_tiling`.
    interpret: False, or `pltpu.InterpretParams`.
    checks_bounds: whether each DMA is checked to lie inside the buffers, on a TPU.

  Returns:
    The destination.
  """
  dtype = source.dtype
  tiling = tiling or choose_tiling(source.shape[1], dtype.itemsize)
  is_new = isinstance(destination, jax.ShapeDtypeStruct)
  scalars = *searchable(runs), window
  # Of the source's type, which inside shard_map knows the mesh axes along which it varies.
  out_shape, in_hbm = jax.typeof(source).update(shape=destination.shape), lambda x: x
  if not interpret:
    # A BlockSpec alone leaves XLA free to put what is small into VMEM, and the kernel reads HBM.
    out_shape = pltpu.HBM.like(out_shape)
    in_hbm = lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM)
  of_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
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
        in_specs=[of_hbm, [of_hbm] * len(updated)],
        out_specs=of_hbm,
        scratch_shapes=[
          slots(tiling.landing_slots, tiling.landing_slots, landing_rows),
          slots(tiling.assembly_slots, tiling.assembly_slots, tiling.tile_rows),
          slots(tiling.blank_stores, 1, tiling.tile_rows),
          pltpu.SMEM((len(Piece._fields) * tiling.landing_slots,), jnp.int32),
        ],
      ),
      out_shape=out_shape,
      input_output_aliases={len(scalars) + 1: 0} if updated else {},
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel",),
        # Runs lie inside both buffers. Checking that again costs as much as all else for a piece.
        disable_bounds_checks=not checks_bounds,
        vmem_limit_bytes=tiling.vmem_bytes(dtype.itemsize) + 2**21,
      ),
      interpret=interpret,
      name="stash_expand" if is_new else "stash_compact",
    )(*map(in_hbm, scalars), in_hbm(source), [in_hbm(x) for x in updated])
  if interpret:
    return destination
  # The compiler of libtpu 0.0.42 copies, or refuses, a result in HBM that a program just returns.
  return lax.optimization_barrier(destination)


def searchable(runs):
  """Returns what the kernel reads of each run: the first row behind it tells whether to skip it.

  Returns:
    int32[runs + 1], source row less destination row, first destination row and that behind the
    last, 0 for an empty run. The last run ends every search: it starts behind all rows.
  """
  sources, destinations, sizes = runs
  ends = jnp.where(sizes > 0, destinations + sizes, 0)
  end_of_runs = 0, NO_ROW, NO_ROW + 1
  searched = sources - destinations, destinations, ends
  return [jnp.append(x, jnp.int32(end)) for x, end in zip(searched, end_of_runs, strict=True)]


def _cond_seldom(condition, function, operand):
  """Returns `function(operand)` if a condition holds, else `operand`; costs little if not.

  It is a loop: of a branch the compiler may execute what is short in any case, predicated.
  """
  return repeat(condition.astype(jnp.int32), lambda _, x: function(x), operand)


def _when_seldom(condition):
  """Is `pl.when` as `_cond_seldom`."""
  return lambda function: _cond_seldom(condition, lambda nothing: function(), None)


def _kernel(
  # Scalars.
  offsets,
  destinations,
  ends,
  window,
  # HBM.
  source,
  updated,
  out,
  # VMEM, semaphores and bookkeeping.
  landing,
  assembly,
  blank,
  pieces,
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
  # Row 2**31 may be in the last tile of all, not behind another.
  last_row = jnp.where(last_tile == tiles, window_last, row_of_tile(last_tile))

  def slot_before(slot, of, by=1):
    """Returns the slot whose turn was `by` turns before that of `slot`."""
    return jnp.where(slot < by, slot + of.stores.shape[0] - by, slot - by)

  def load(slot, row, to, rows):
    rows = pl.multiple_of(rows, alignment)
    return pltpu.make_async_copy(
      source.at[pl.ds(pl.multiple_of(row, alignment), rows), columns],
      landing.tiles.at[slot, pl.ds(pl.multiple_of(to, alignment), rows)],
      landing.loads.at[slot],
    )

  def piece_in(slot):
    """Returns the piece whose load goes to a landing slot."""
    count = len(Piece._fields)
    return Piece(*(pieces[count * slot + field] for field in range(count)))

  def seek(position):
    """Returns the position with the run that holds its row, or else the next that starts."""
    is_before = lambda run: ends[run] <= position.row
    return position._replace(run=lax.while_loop(is_before, lambda run: run + 1, position.run))

  def load_next(position, slot):
    """Notes the piece at a position and starts its load; returns where to seek the next."""
    run = position.run
    row = jnp.maximum(destinations[run], position.row)
    there_is_one = row < last_row
    tile = div(row - tiles_row, tile_rows)
    tile_row = row_of_tile(tile)
    first, last = row - tile_row, jnp.minimum(ends[run] - tile_row, tile_rows)

    # HBM tiles land in whole, so that the first row of the piece is at `first` or behind it.
    source_row = row + offsets[run]
    in_hbm_tile = rem(source_row, alignment)
    landing_row = align_up(first - in_hbm_tile)
    shift = landing_row + in_hbm_tile - first
    is_continued = (source_row == position.landed) & (in_hbm_tile != 0)
    there = jnp.where(is_continued, jnp.int32(alignment), 0)
    load_rows = align_up(in_hbm_tile + last - first) - there

    piece = Piece(
      tile=jnp.where(there_is_one, tile, last_tile),
      first=first,
      last=last,
      shift=shift,
      load_rows=load_rows,
      continues_at=jnp.where(is_continued, position.landed_at, -1),
    )
    for field, value in enumerate(piece):
      pieces[len(piece) * slot + field] = value

    @pl.when(there_is_one & (load_rows > 0))
    def _():
      load(slot, source_row - in_hbm_tile + there, landing_row + there, load_rows).start()

    row = jnp.where(there_is_one, tile_row + last, row)
    return Position(
      run=run + (ends[run] == row).astype(jnp.int32),
      row=row,
      landed=source_row + last - first,
      landed_at=last + shift,
    )

  def store(slots, slot, tile_row, first, last):
    tile = slot if slots.tiles.shape[0] > 1 else ZERO
    rows = pl.multiple_of(last - first, alignment)
    return pltpu.make_async_copy(
      slots.tiles.at[tile, pl.ds(first, rows)],
      out.at[pl.ds(pl.multiple_of(tile_row + first, alignment), rows), columns],
      slots.stores.at[slot],
    )

  def start_store(slots, slot, tile_row, first, last):
    """Starts to store rows `first` to `last` of a tile, whole HBM tiles."""
    slots.rows_leaving[slot] = slots.rows_leaving[slot] + last - first
    store(slots, slot, tile_row, first, last).start()

  def finish_stores(slots, slot):
    rows = slots.rows_leaving[slot]

    @pl.when(rows > 0)
    def _():
      store(slots, slot, ZERO, ZERO, rows).wait()
      slots.rows_leaving[slot] = 0

  def store_blank_tiles(first, last):
    def store_tile(tile, _):
      slot = rem(tile, tiling.blank_stores)
      finish_stores(blank, slot)
      row = row_of_tile(tile)
      start_store(blank, slot, row, 0, jnp.minimum(tile_rows, window_last - row))

    lax.fori_loop(first, jnp.where(is_filled == 0, first, last), store_tile, None)

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
    slot, position, previous_tile, tile_slot, first_merged = state
    piece = piece_in(slot)
    next_slot = jnp.where(slot == tiling.landing_slots - 1, 0, slot + 1)
    next_piece = piece_in(next_slot)
    is_first_piece = piece.tile != previous_tile
    is_last_piece = piece.tile != next_piece.tile
    # By turns, and not by tile number: groups in buckets may touch every other tile only.
    tile_slot = jnp.where(is_first_piece, slot_before(tile_slot, assembly), tile_slot)
    tile_row = row_of_tile(piece.tile)
    rows_owned = jnp.minimum(window_last - tile_row, tile_rows)
    if is_new:
      store_blank_tiles(previous_tile + 1, piece.tile)
    pl.when(piece.load_rows > 0)(lambda: load(slot, ZERO, ZERO, piece.load_rows).wait())

    @pl.when(piece.continues_at >= 0)
    def _():
      previous = landing.tiles.at[slot_before(slot, landing)]
      shared = previous[pl.ds(align_down(piece.continues_at), alignment)]
      landing.tiles[slot, pl.ds(align_down(piece.first + piece.shift), alignment)] = shared

    is_whole_tile = (piece.first == 0) & (piece.last == rows_owned)
    is_aligned = (piece.shift == 0) & (piece.last == align_down(piece.last))
    is_ready = is_whole_tile & is_aligned

    # Where padding is undefined, what is merged is stored when the next piece is in another block.
    is_stored_now = is_last_piece
    if is_new:
      first_merged = jnp.where(first_merged < 0, piece.first, first_merged)
      is_apart = align_up(piece.last) <= block_down(next_piece.first)
      is_stored_now |= (is_filled == 0) & is_apart

    free_slot = slot_before(slot, landing, by=IDLE_SLOTS)
    finish_stores(landing, free_slot)
    position = seek(position)

    def store_landed(position):
      start_store(landing, slot, tile_row, 0, piece.last)
      return load_next(position, free_slot)

    def merge_landed(position):
      @_when_seldom(is_first_piece)
      def _():
        finish_stores(assembly, tile_slot)
        open_tile(tile_slot, tile_row)

      # Anything may go to the rest of a piece's last block where a later piece writes that or it is
      # undefined, and need not be masked; not where it is filled or behind the window.
      last = block_down(piece.last + block_rows - 1)
      ends_exactly = (is_filled != 0) | (last > rows_owned)
      next_position = merge(
        landing.tiles.at[slot],
        assembly.tiles.at[tile_slot],
        piece.first,
        jnp.where(ends_exactly, piece.last, last),
        piece.shift,
        meanwhile=lambda: load_next(position, free_slot),
      )

      @pl.when(is_stored_now)
      def _():
        first_stored = first_merged if is_new else jnp.maximum(window_first - tile_row, 0)
        first_stored = align_down(jnp.where(is_filled == 0, first_stored, 0))
        last_stored = align_up(jnp.where(is_filled == 0, piece.last, rows_owned))
        start_store(assembly, tile_slot, tile_row, first_stored, last_stored)

      return next_position

    position = _cond_seldom(is_ready, store_landed, position)
    position = lax.cond(is_ready, lambda position: position, merge_landed, position)
    if is_new:
      first_merged = jnp.where(is_stored_now, -1, first_merged)
    return next_slot, position, piece.tile, tile_slot, first_merged

  for slots in all_slots:
    for slot in range(slots.rows_leaving.shape[0]):
      slots.rows_leaving[slot] = 0
  if is_new:
    pl.when(is_filled != 0)(lambda: fill(blank.tiles.at[ZERO], blank_word))

  position = repeat(
    jnp.int32(tiling.landing_slots - IDLE_SLOTS),
    lambda slot, position: load_next(seek(position), slot),
    Position(jnp.int32(0), row_of_tile(first_tile), jnp.int32(-1), jnp.int32(0)),
  )
  _, _, last_written_tile, _, _ = lax.while_loop(
    lambda state: piece_in(state[0]).tile < last_tile,
    write_piece,
    (jnp.int32(0), position, first_tile - 1, jnp.int32(0), jnp.int32(-1)),
  )
  if is_new:
    store_blank_tiles(last_written_tile + 1, last_tile)
  for slots in all_slots:
    count = jnp.int32(slots.rows_leaving.shape[0])
    repeat(count, lambda slot, _, slots=slots: finish_stores(slots, slot), None)
