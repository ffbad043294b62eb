"""The Pallas TPU kernel that copies runs of rows: compact and expand are two uses of it.

Runs of source rows go to consecutive destination rows. Each core walks over its pieces (`pieces`),
and brings each of them to its tile:

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

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from pallas_stash.kernels import pieces, tile_words
from pallas_stash.kernels.int32 import rem, repeat
from pallas_stash.kernels.slots import Slots
from pallas_stash.kernels.tiling import choose_tiling, LANES, round_up, Tiling
from pallas_stash.varying import empty, vary_alike

IDLE_SLOTS = 2  # A landing slot is loaded again two pieces after a store from it was started.
ZERO = np.int32(0)  # Under x64 the compiler is given an int as an int64.


def copy_runs(
  source,
  destination,
  runs,
  window,
  tiling=None,
  interpret=False,
  checks_bounds=False,
  middle=None,
):
  """Copies runs of rows of `source` to `destination`.

  Args:
    source: [source_rows, width], in whole HBM tiles: rows by `row_alignment`, columns by 128. On a
      TPU the last ones may lie behind what the shape says.
    destination: [destination_rows, width] to update in place, or the ShapeDtypeStruct of a new
      buffer, whose other rows are filled with the blank word or undefined. Tiles as of `source`.
    runs: `CopyRuns`; where the destination is updated, destinations leave no gap within a tile.
    window: int32[4], the fields of `Window`.
    tiling: `Tiling`, or None for `choose_tiling`.
    interpret: False, or `pltpu.InterpretParams`.
    checks_bounds: whether each DMA is checked to lie inside the buffers, on a TPU.
    middle: int32[], the second core writes the tiles that start at this row or behind; None for
      half of those of the window.

  Returns:
    The destination.
  """
  dtype = source.dtype
  tiling = tiling or choose_tiling(round_up(source.shape[1], LANES), dtype.itemsize)
  is_new = isinstance(destination, jax.ShapeDtypeStruct)
  is_whole = all(array.shape[1] % LANES == 0 for array in (source, destination))
  # Of the source's type, which inside shard_map knows the mesh axes along which it varies.
  out_shape, in_hbm = jax.typeof(source).update(shape=destination.shape), lambda x: x
  if not interpret:
    # A BlockSpec alone leaves XLA free to put what is small into VMEM, and the kernel reads HBM.
    out_shape = pltpu.HBM.like(out_shape)
    in_hbm = lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM)
  if is_new and not interpret:
    # Of a result that is no operand, too, XLA chooses the tiles by those who read it: for a matmul
    # on tpu7x such of 16 rows, within which the kernel cannot store 8.
    destination, _ = vary_alike(empty(destination.shape, dtype), source)
  of_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  for first_column, columns in tiling.column_blocks:
    updated = [] if isinstance(destination, jax.ShapeDtypeStruct) else [destination]
    # Of a slice that is known Pallas checks that it ends inside of the array, as its shape says.
    start = [] if is_whole else [jnp.full((1,), first_column, jnp.int32)]
    split = [] if middle is None else [middle[None]]
    scalars = *pieces.searchable(runs), jnp.concatenate([window, *split, *start])
    destination = pl.pallas_call(
      functools.partial(
        kernel,
        columns=(first_column if is_whole else None, columns),
        tiling=tiling,
        is_split=bool(split),
        is_new=is_new,
        interpreted=bool(interpret),
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(pieces.CORES,),
        in_specs=[of_hbm, [of_hbm] * len(updated)],
        out_specs=of_hbm,
        scratch_shapes=_scratch_shapes(tiling, columns, dtype, interpret),
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


class Window(NamedTuple):
  """The destination rows that are a kernel's to write, all int32[].

  Attributes:
    first, last: the rows, [first, last). Of a new buffer that is filled, whole HBM tiles.
    blank_word: what the rows that no run covers are filled with.
    is_filled: whether they are, 0 or 1: of a new buffer only.
  """

  first: jax.Array
  last: jax.Array
  blank_word: jax.Array
  is_filled: jax.Array


def _scratch_shapes(tiling, columns, dtype, interpret):
  """Returns what the kernel allocates: landing, assembly and blank slots, and the noted pieces."""
  # The interpreter cannot view a reference as another shape.
  alignment = None if interpret else tiling.row_alignment
  slots = functools.partial(Slots.scratch_shapes, columns=columns, dtype=dtype, alignment=alignment)
  landing_rows = tiling.tile_rows + tiling.block_rows
  return [
    slots(tiling.landing_slots, tiling.landing_slots, landing_rows),
    slots(tiling.assembly_slots, tiling.assembly_slots, tiling.tile_rows),
    slots(tiling.blank_stores, 1, tiling.tile_rows),
    pltpu.SMEM((len(pieces.Piece._fields) * tiling.landing_slots,), jnp.int32),
  ]


def kernel(
  offsets,
  destinations,
  ends,
  window,
  source,
  updated,
  out,
  *scratch,
  columns,
  tiling,
  is_split,
  **static,
):
  """Copies the pieces of one core. Takes scalars, HBM, what was allocated, fields of `_Core`."""
  del updated  # The same memory as `out`.
  first_column, number = columns
  if first_column is None:
    first_column = pl.multiple_of(window[len(Window._fields) + is_split], LANES)
  columns = pl.ds(first_column, number)
  middle = window[len(Window._fields)] if is_split else None
  window = Window(*(window[i] for i in range(len(Window._fields))))
  runs = pieces.SearchableRuns(offsets, destinations, ends)
  tiles = pieces.Tiles.of_core(pl.program_id(0), window.first, window.last, tiling, middle)
  *slots, noted = scratch
  slots = (x.as_rows() for x in slots)
  static |= {"columns": columns, "tiling": tiling}
  _Core(runs, tiles, window, source, out, *slots, noted, **static).copy_pieces()


class _Tile(NamedTuple):
  """A tile that pieces are written to, all int32[].

  Attributes:
    slot: assembly slot, for the pieces that are not stored as they landed.
    row: destination row where it starts.
    rows: its rows before the end of the window.
  """

  slot: jax.Array
  row: jax.Array
  rows: jax.Array


class _Turn(NamedTuple):
  """What one piece leaves to the next, all int32[].

  Attributes:
    slot: landing slot of the next piece.
    position: `pieces.Position` of the next piece to be loaded.
    tile: number of the tile of the piece before.
    tile_slot: its assembly slot.
    first_merged: its first row that is merged and not stored yet; -1 if there is none. Of a new
      buffer only.
  """

  slot: jax.Array
  position: pieces.Position
  tile: jax.Array
  tile_slot: jax.Array
  first_merged: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)  # JAX compares what it traces, methods of it, too.
class _Core:
  """What one core does, and with what.

  Attributes:
    runs, tiles, window: what it copies, and where to.
    source, out: HBM [rows, width].
    landing, assembly, blank: `Slots`. Those of `blank` store one tile, for rows without a piece.
    noted: SMEM int32[fields * slots], the piece that is loaded to each landing slot.
    columns: static, those that it copies.
    tiling: static.
    is_new: static, whether `out` is a new buffer.
    interpreted: static.
  """

  runs: pieces.SearchableRuns
  tiles: pieces.Tiles
  window: Window
  source: Any
  out: Any
  landing: Slots
  assembly: Slots
  blank: Slots
  noted: Any
  columns: Any
  tiling: Tiling
  is_new: bool
  interpreted: bool

  def copy_pieces(self):
    """Writes one piece after the other, and loads some ahead."""
    all_slots = self.landing, self.assembly, self.blank
    for slots in all_slots:
      for slot in range(slots.number):
        slots.rows_leaving[slot] = 0
    if self.is_new:
      pl.when(self.window.is_filled != 0)(lambda: self.fill(self.blank, ZERO))

    position = repeat(
      jnp.int32(self.landing.number - IDLE_SLOTS),
      lambda slot, position: self.load_next(pieces.seek(position, self.runs), slot),
      pieces.first_position(self.tiles),
    )
    turn = lax.while_loop(
      lambda turn: self.piece_in(turn.slot).tile < self.tiles.last,
      self.write_piece,
      _Turn(jnp.int32(0), position, self.tiles.first - 1, jnp.int32(0), jnp.int32(-1)),
    )
    if self.is_new:
      self.store_blank_tiles(turn.tile + 1, self.tiles.last)
    for slots in all_slots:
      number = jnp.int32(slots.number)
      repeat(number, lambda slot, _, slots=slots: self.finish_stores(slots, slot), None)

  def write_piece(self, turn):
    """Writes the piece in a landing slot, and loads another meanwhile; returns the next turn."""
    slot = turn.slot
    piece = self.piece_in(slot)
    next_slot = jnp.where(slot == self.landing.number - 1, 0, slot + 1)
    next_piece = self.piece_in(next_slot)
    is_first_piece, is_last_piece = piece.tile != turn.tile, piece.tile != next_piece.tile
    # By turns, and not by tile number: groups in buckets may touch every other tile only.
    tile_slot = jnp.where(is_first_piece, self.assembly.before(turn.tile_slot), turn.tile_slot)
    tile_row = self.tiles.row_of(piece.tile)
    rows = jnp.minimum(self.window.last - tile_row, self.tiling.tile_rows)
    tile = _Tile(tile_slot, tile_row, rows)
    if self.is_new:
      self.store_blank_tiles(turn.tile + 1, piece.tile)
    self.finish_load(slot, piece)

    is_whole_tile = (piece.first == 0) & (piece.last == tile.rows)
    is_aligned = (piece.shift == 0) & (piece.last == self.align_down(piece.last))
    is_ready = is_whole_tile & is_aligned
    # Where padding is undefined, what is merged is stored when the next piece is in another block.
    is_stored_now, first_merged = is_last_piece, turn.first_merged
    if self.is_new:
      first_merged = jnp.where(first_merged < 0, piece.first, first_merged)
      is_apart = self.align_up(piece.last) <= self.block_down(next_piece.first)
      is_stored_now |= (self.window.is_filled == 0) & is_apart

    free_slot = self.landing.before(slot, by=IDLE_SLOTS)
    self.finish_stores(self.landing, free_slot)
    position = pieces.seek(turn.position, self.runs)

    def store_landed(position):
      self.start_store(self.landing, slot, tile.row, 0, piece.last)
      return self.load_next(position, free_slot)

    def merge_landed(position):
      @_when_seldom(is_first_piece)
      def _():
        self.finish_stores(self.assembly, tile.slot)
        self.open_tile(tile)

      load_next = lambda: self.load_next(position, free_slot)
      next_position = self.merge(slot, piece, tile, meanwhile=load_next)
      pl.when(is_stored_now)(lambda: self.store_merged(tile, first_merged, piece.last))
      return next_position

    position = _cond_seldom(is_ready, store_landed, position)
    position = lax.cond(is_ready, lambda position: position, merge_landed, position)
    if self.is_new:
      first_merged = jnp.where(is_stored_now, -1, first_merged)
    return _Turn(next_slot, position, piece.tile, tile.slot, first_merged)

  # Rows of HBM tiles, and of a block. What is aligned, the compiler has to be told.

  def aligned(self, row):
    return pl.multiple_of(row, self.tiling.row_alignment)

  def align_down(self, row):
    return pieces.align_down(row, self.tiling.row_alignment)

  def align_up(self, row):
    return pieces.align_up(row, self.tiling.row_alignment)

  def block_down(self, row):
    return pieces.align_down(row, self.tiling.block_rows)

  # Loads to landing slots.

  def load(self, slot, source_row, landing_row, rows):
    """Returns the DMA of whole HBM tiles of the source to a landing slot."""
    rows = self.aligned(rows)
    return pltpu.make_async_copy(
      self.source.at[pl.ds(self.aligned(source_row), rows), self.columns],
      self.landing.tiles.at[slot, pl.ds(self.aligned(landing_row), rows)],
      self.landing.loads.at[slot],
    )

  def load_next(self, position, slot):
    """Notes the piece at a position and starts its load; returns where to seek the next."""
    found = pieces.next_piece(position, self.runs, self.tiles)
    there_is_one, piece, load_places, position_behind = found
    for field, value in enumerate(piece):
      self.noted[len(piece) * slot + field] = value

    @pl.when(there_is_one & (piece.load_rows > 0))
    def _():
      self.load(slot, *load_places(), piece.load_rows).start()

    return position_behind()

  def piece_in(self, slot):
    """Returns the piece that is loaded to a landing slot."""
    number = len(pieces.Piece._fields)
    return pieces.Piece(*(self.noted[number * slot + field] for field in range(number)))

  def finish_load(self, slot, piece):
    """Waits for a piece, and copies the HBM tile that it shares with the piece before it."""
    pl.when(piece.load_rows > 0)(lambda: self.load(slot, ZERO, ZERO, piece.load_rows).wait())

    @pl.when(piece.continues_at >= 0)
    def _():
      hbm_tile = lambda row: pl.ds(self.align_down(row), self.tiling.row_alignment)
      previous = self.landing.tiles.at[self.landing.before(slot)]
      shared = previous[hbm_tile(piece.continues_at)]
      self.landing.tiles[slot, hbm_tile(piece.first + piece.shift)] = shared

  # Assembly slots.

  def open_tile(self, tile):
    """Puts into the assembly slot what the tile holds besides its pieces."""
    if self.is_new:
      pl.when(self.window.is_filled != 0)(lambda: self.fill(self.assembly, tile.slot))
      return
    last = self.window.last - tile.row
    ends_inside = (last < self.tiling.tile_rows) & (last != self.align_down(last))
    pl.when(tile.row < self.window.first)(lambda: self.read_block(tile, 0, self.align_up(last)))
    pl.when(ends_inside)(lambda: self.read_block(tile, self.block_down(last), self.align_up(last)))

  def read_block(self, tile, row, last):
    """Reads the block of tile rows from `row` on, up to `last`, as the destination has them."""
    rows = self.aligned(jnp.minimum(self.tiling.block_rows, last - row))
    copy = pltpu.make_async_copy(
      self.out.at[pl.ds(self.aligned(tile.row + row), rows), self.columns],
      self.assembly.tiles.at[tile.slot, pl.ds(row, rows)],
      self.assembly.loads.at[tile.slot],
    )
    copy.start()
    copy.wait()

  def fill(self, slots, slot):
    """Fills the tile of a slot with the blank word."""
    tile_words.fill(
      slots.tiles.at[slot],
      self.window.blank_word,
      block_rows=self.tiling.block_rows,
      interpreted=self.interpreted,
    )

  def merge(self, slot, piece, tile, meanwhile):
    """Merges a landed piece into its tile; returns what `meanwhile` returns."""
    # Anything may go to the rest of a piece's last block where a later piece writes that or it is
    # undefined, and need not be masked; not where it is filled or behind the window.
    last = pieces.align_up(piece.last, self.tiling.block_rows)
    ends_exactly = (self.window.is_filled != 0) | (last > tile.rows)
    return tile_words.merge(
      self.landing.tiles.at[slot],
      self.assembly.tiles.at[tile.slot],
      piece.first,
      jnp.where(ends_exactly, piece.last, last),
      piece.shift,
      meanwhile,
      block_rows=self.tiling.block_rows,
      interpreted=self.interpreted,
    )

  # Stores.

  def store(self, slots, slot, tile_row, first, last):
    """Returns the DMA of rows `first` to `last` of a tile, whole HBM tiles, from a slot."""
    tile = slot if slots.tiles.shape[0] > 1 else ZERO
    rows = self.aligned(last - first)
    return pltpu.make_async_copy(
      slots.tiles.at[tile, pl.ds(first, rows)],
      self.out.at[pl.ds(self.aligned(tile_row + first), rows), self.columns],
      slots.stores.at[slot],
    )

  def start_store(self, slots, slot, tile_row, first, last):
    slots.rows_leaving[slot] = slots.rows_leaving[slot] + last - first
    self.store(slots, slot, tile_row, first, last).start()

  def finish_stores(self, slots, slot):
    """Waits for the stores that were started from a slot."""
    rows = slots.rows_leaving[slot]

    @pl.when(rows > 0)
    def _():
      self.store(slots, slot, ZERO, ZERO, rows).wait()
      slots.rows_leaving[slot] = 0

  def store_merged(self, tile, first_merged, last):
    """Starts to store a tile: all of it, or what was merged where other rows are undefined."""
    if not self.is_new:
      first_merged = jnp.maximum(self.window.first - tile.row, 0)
    is_filled = self.window.is_filled
    first = self.align_down(jnp.where(is_filled == 0, first_merged, 0))
    last = self.align_up(jnp.where(is_filled == 0, last, tile.rows))
    self.start_store(self.assembly, tile.slot, tile.row, first, last)

  def store_blank_tiles(self, first, last):
    """Starts to store tiles `first` to `last`, in which no piece is, if they are to be filled."""

    def store_tile(tile, _):
      slot = rem(tile, self.blank.number)
      self.finish_stores(self.blank, slot)
      row = self.tiles.row_of(tile)
      rows = jnp.minimum(self.tiling.tile_rows, self.window.last - row)
      self.start_store(self.blank, slot, row, 0, rows)

    lax.fori_loop(first, jnp.where(self.window.is_filled == 0, first, last), store_tile, None)


def _cond_seldom(condition, function, operand):
  """Returns `function(operand)` if a condition holds, else `operand`; costs little if not.

  It is a loop: of a branch the compiler may execute what is short in any case, predicated.
  """
  return repeat(condition.astype(jnp.int32), lambda _, x: function(x), operand)


def _when_seldom(condition):
  """Is `pl.when` as `_cond_seldom`."""
  return lambda function: _cond_seldom(condition, lambda nothing: function(), None)
