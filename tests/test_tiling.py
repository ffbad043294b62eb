"""Tile sizes are a pure function of width and element size."""

import dataclasses

import pytest

from pallas_stash.kernels.tiling import choose_tiling, round_up, row_alignment, Tiling

WIDTHS = [*range(128, 9 * 1024, 128), *range(9 * 1024, 65_537, 1024), 20_992, 65_408, 2**20 + 128]


def test_deepseek_v3():
  assert choose_tiling(7168, itemsize=2) == Tiling(
    row_alignment=8, word_rows=2, block_rows=16, tile_rows=128, column_blocks=((0, 7168),)
  )


@pytest.mark.parametrize("size, rounded", [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_round_up(size, rounded):
  assert round_up(size, 8) == rounded


@pytest.mark.parametrize("itemsize, alignment", [(1, 32), (2, 8), (4, 8)])
def test_row_alignment(itemsize, alignment):
  assert row_alignment(itemsize) == alignment
  assert choose_tiling(128, itemsize).row_alignment == alignment


@pytest.mark.parametrize("itemsize", [1, 2, 4])
class TestEveryWidth:
  def test_rows(self, itemsize):
    for width in WIDTHS:
      tiling = choose_tiling(width, itemsize)
      assert tiling.word_rows * itemsize == 4
      assert tiling.block_rows == 8 * tiling.word_rows
      assert tiling.tile_rows >= 32
      assert tiling.tile_rows.bit_count() == 1
      assert tiling.tile_rows % tiling.block_rows == 0
      assert tiling.tile_rows % tiling.row_alignment == 0

  def test_column_blocks_cover_each_column_once(self, itemsize):
    for width in WIDTHS:
      end = 0
      for first_column, columns in choose_tiling(width, itemsize).column_blocks:
        assert first_column == end
        assert columns > 0
        assert columns % 128 == 0
        end += columns
      assert end == width

  def test_narrow_rows_are_not_split(self, itemsize):
    for width in range(128, 32 * 1024 // itemsize + 1, 128):
      assert choose_tiling(width, itemsize).column_blocks == ((0, width),)

  def test_buffers_stay_below_22_mib(self, itemsize):
    sizes = {width: choose_tiling(width, itemsize).vmem_bytes(itemsize) for width in WIDTHS}
    assert {width: size for width, size in sizes.items() if size > 22 * 2**20} == {}


def test_vmem_bytes_counts_every_buffer():
  tiling = Tiling(
    row_alignment=8,
    word_rows=1,
    block_rows=8,
    tile_rows=32,
    column_blocks=((0, 256), (256, 128)),
    landing_slots=4,
    assembly_slots=2,
    blank_stores=5,
  )
  landing, assembly, blank = 4 * (32 + 8), 2 * 32, 1 * 32  # All blank stores read one tile.
  assert tiling.vmem_bytes(4) == (landing + assembly + blank) * 256 * 4


@pytest.mark.parametrize("sizes", [{"landing_slots": 3}, {"tile_rows": 40}])
def test_what_the_kernel_cannot_do_is_refused(sizes):
  (name,) = sizes
  with pytest.raises(ValueError, match=f"{name}={sizes[name]} must be"):
    dataclasses.replace(choose_tiling(128, 2), **sizes)
