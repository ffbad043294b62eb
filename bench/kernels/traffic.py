"""The rows that a benchmark copies, and what the kernel moves for them by its own plan.

`tests/test_bench_kernels.py` counts the DMAs of interpreted kernels and compares.
"""

import dataclasses

from pallas_stash.kernels.pieces import CORES
from pallas_stash.kernels.tiling import Tiling


@dataclasses.dataclass(frozen=True)
class Layout:
  """Groups in a worst-case buffer, by arithmetic: the rows of group `i` may be traced.

  Attributes:
    groups: number of groups.
    size: rows of a group on average.
    stride: rows from the start of a group to that of the next.
    first: row where the first group starts.
    uneven: rows that every other group is larger, and those between are smaller.
    start: row of the other buffer, where they are tight, that the first group starts at.
    gap: rows between two groups there, where they are pages.
  """

  groups: int
  size: int
  stride: int
  first: int
  uneven: int
  start: int
  gap: int = 0

  @property
  def rows(self):
    return self.groups * self.size

  def sizes(self, i):
    return self.size + self.uneven * (2 * (i & 1) - 1)

  def wide_rows(self, i):
    return self.first + i * self.stride

  def tight_rows(self, i):
    return self.start + i * (self.size + self.gap) - self.uneven * (i & 1)


def make_layout(name: str, rows: int, total_rows: int, start: int) -> Layout:
  """Returns a layout of `rows` rows in a buffer of `total_rows`, tight from row `start` on.

  Args:
    name: "prefix"; "run", one group in the middle; "buckets-N" and "ragged-N" for N groups, the
      latter of different sizes and from odd rows; "pages-N", a prefix in every other page of N
      rows.
  """
  name, _, groups = name.partition("-")
  groups = int(groups or 1)
  if name == "pages":
    return Layout(rows // groups, groups, groups, 0, 0, start, gap=groups)
  size, stride = rows // groups, total_rows // groups
  gap = stride - size
  first = {"prefix": 0, "run": gap // 2 // 8 * 8 + start % 8, "buckets": 0, "ragged": gap // 2 | 1}
  uneven = min(gap // 4, size // 4) | 1 if name == "ragged" and gap else 0
  return Layout(groups, size, stride, min(first[name], gap), uneven, start)


def dma_rows(layout: Layout, kernel: str, total_rows: int, tiling: Tiling) -> tuple[int, int]:
  """Returns the rows that compact, expand or expand_undefined reads and writes in HBM."""
  align, block, tile_rows = tiling.row_alignment, tiling.block_rows, tiling.tile_rows
  down, up = lambda row, of=align: row // of * of, lambda row, of=align: -(-row // of) * of
  ends = layout.wide_rows, layout.tight_rows
  sources, destinations = ends if kernel == "compact" else ends[::-1]
  groups = range(layout.groups)
  window_first = destinations(0)
  window_last = destinations(groups[-1]) + layout.sizes(groups[-1])
  is_filled = kernel == "expand"
  if is_filled:
    window_first, window_last = 0, up(total_rows)

  pieces = {}  # of each tile: (first, last, source row)
  for group in groups:
    row, end = destinations(group), destinations(group) + layout.sizes(group)
    while row < end:
      tile = (row - down(window_first)) // tile_rows
      tile_row = down(window_first) + tile * tile_rows
      last = min(end - tile_row, tile_rows)
      source = sources(group) + row - destinations(group)
      pieces.setdefault(tile, []).append((row - tile_row, last, source))
      row = tile_row + last

  read = written = 0
  tiles = -(-(window_last - down(window_first)) // tile_rows)
  share = -(-tiles // CORES)
  landed, core = None, 0
  for tile, in_tile in pieces.items():
    tile_row = down(window_first) + tile * tile_rows
    owned = window_last - tile_row
    if tile // share != core:
      landed, core = None, tile // share
    for first, last, source in in_tile:
      # The HBM tile that it shares with the piece before it is there.
      read += up(source + last - first) - (up(source) if source == landed else down(source))
      landed = source + last - first
    first, last, source = in_tile[0]
    if first == 0 and last == min(owned, tile_rows) and source % align == last % align == 0:
      written += last
      continue
    if kernel == "compact":
      read += min(block, up(owned)) if tile_row < window_first else 0
      read += up(owned) - down(owned, block) if owned < tile_rows and owned % align else 0
    if is_filled:
      written += up(min(owned, tile_rows))
      continue
    lasts = [last for _, last, _ in in_tile]
    for end, (next_first, _, _) in zip(lasts, [*in_tile[1:], (tile_rows, 0, 0)], strict=True):
      # Pieces in different blocks are stored one by one, unless there is no gap between any.
      is_apart = kernel == "expand_undefined" and up(end) <= down(next_first, block)
      if is_apart or end == lasts[-1]:
        written += up(end) - down(first)
        first = next_first
  if is_filled:
    written += sum(
      min(tile_rows, window_last - tile * tile_rows)
      for tile in range(-(-window_last // tile_rows))
      if tile not in pieces
    )
  return read, written
