"""Static sizes of the Pallas TPU kernels, as pure functions of width and element size."""

import dataclasses

SUBLANES = 8
LANES = 128
VMEM_BYTES = 22 * 2**20  # Of a core's 64 MiB or more.


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Static sizes of a kernel.

  Attributes:
    row_alignment: rows of an HBM tile; a DMA starts at a multiple of it and moves a multiple of it.
    word_rows: rows packed into one 32-bit word of a vector register.
    block_rows: rows of one vector register, the unit of arithmetic.
    tile_rows: destination rows of a tile, a multiple of `block_rows` and of `row_alignment`.
    column_blocks: (first column, columns) of each kernel call; one, unless rows are very wide.
    landing_slots: tiles that can be on their way in or, where no arithmetic is needed, out.
      Two hold the piece that is merged and that before it, and the next is on its way: four at
      least.
    assembly_slots: tiles that can be assembled or on their way out.
    blank_stores: tiles of padding that can be on their way out.
  """

  row_alignment: int
  word_rows: int
  block_rows: int
  tile_rows: int
  column_blocks: tuple[tuple[int, int], ...]
  landing_slots: int = 6
  assembly_slots: int = 3
  blank_stores: int = 4

  def __post_init__(self):
    if self.landing_slots < 4:
      raise ValueError(f"landing_slots={self.landing_slots} must be 4 or more.")
    if self.tile_rows % self.block_rows or self.tile_rows % self.row_alignment:
      raise ValueError(
        f"tile_rows={self.tile_rows} must be a multiple of block_rows={self.block_rows} and of"
        f" row_alignment={self.row_alignment}."
      )

  def vmem_bytes(self, itemsize: int) -> int:
    """Returns the bytes of the VMEM buffers of one core, for elements of `itemsize` bytes."""
    rows = self.landing_slots * (self.tile_rows + self.block_rows)
    rows += (self.assembly_slots + 1) * self.tile_rows
    return rows * max(columns for _, columns in self.column_blocks) * itemsize


def round_up(size, multiple):
  """Returns the least multiple of `multiple` that is `size` or more: integers, or int32 arrays."""
  return (size + multiple - 1) // multiple * multiple


def row_alignment(itemsize: int) -> int:
  """Returns the rows of an HBM tile for elements of `itemsize` bytes: 8, or 32 for one byte."""
  return 32 if itemsize == 1 else SUBLANES


def choose_tiling(width: int, itemsize: int, page_rows: int | None = None) -> Tiling:
  """Returns the tiling for rows of `width` elements of `itemsize` bytes; `width % 128 == 0`.

  With pages of `page_rows` rows, a multiple of 32, each tile lies within one: it divides them.

  Tiles are as large as 22 MiB of VMEM for each core allow, up to 512 rows, so that DMAs are long
  enough to hide their latency, and few groups are divided between tiles. Their rows are a
  power of two, by which the kernel divides with a shift. Rows of more than 32 KiB are split by
  columns.
  """
  columns = min(width, 32 * 1024 // itemsize)
  word_rows = 4 // itemsize
  tiling = Tiling(
    row_alignment=row_alignment(itemsize),
    word_rows=word_rows,
    block_rows=SUBLANES * word_rows,
    tile_rows=0,
    column_blocks=tuple((c, min(columns, width - c)) for c in range(0, width, columns)),
  )
  tiles = tiling.landing_slots + tiling.assembly_slots + 1
  tile_bytes = (VMEM_BYTES - tiling.vmem_bytes(itemsize)) // tiles
  tile_rows = min(512, 1 << (tile_bytes // (columns * itemsize)).bit_length() - 1)
  if page_rows is not None:
    tile_rows = min(tile_rows, page_rows & -page_rows)  # The largest power of two that divides it.
  return dataclasses.replace(tiling, tile_rows=tile_rows)
