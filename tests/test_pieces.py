"""The plan of the kernel, as numbers: against a model that goes row by row."""

import dataclasses
import functools
import itertools

from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash.kernels import pieces
from pallas_stash.kernels.tiling import choose_tiling
from pallas_stash.ragged import CopyRuns
from tests.helpers.sampling import run_sampled

pytestmark = pytest.mark.once

RUNS = 8
ROWS = 256  # Of the source and of the destination, which are whole HBM tiles.
HIGH = 2**31 - 32 - ROWS  # From here on, buffers end where int32 does, less an HBM tile.
STEPS = 32  # More than there are pieces for a core.


def tiling_of(itemsize, tile_rows):
  return dataclasses.replace(choose_tiling(128, itemsize), tile_rows=tile_rows)


# Rows of an HBM tile, and of a block: 8 and 8, 8 and 16, 32 and 32. One tile is no power of two.
TILINGS = [tiling_of(4, 16), tiling_of(2, 32), tiling_of(1, 64), tiling_of(2, 48)]


def step(position, runs, tiles):
  """Returns the position behind the next piece, and (there_is_one, piece, load places)."""
  position = pieces.seek(position, runs)
  there_is_one, piece, load_places, position_behind = pieces.next_piece(position, runs, tiles)
  return position_behind(), (there_is_one, piece, load_places())


@functools.partial(jax.jit, static_argnames="tiling")
def walk(runs, window, tiling):
  """Returns the first and last tile of each core, and what it finds in each of `STEPS` steps."""
  runs = pieces.searchable(runs)

  def of_core(core):
    tiles = pieces.Tiles.of_core(core, *window, tiling)
    first = pieces.first_position(tiles)
    _, found = lax.scan(lambda position, _: step(position, runs, tiles), first, length=STEPS)
    return tiles.first, tiles.last, found

  return lax.map(of_core, jnp.arange(pieces.CORES))


def model(runs, window, tiling):
  """Returns (tile, first, last, source row of the first) of all pieces, put together from rows."""
  start = window[0] - window[0] % tiling.row_alignment
  rows = [
    (run, *divmod(destination + i - start, tiling.tile_rows), source + i)
    for run, (source, destination, size) in enumerate(runs)
    for i in range(size)
  ]
  found = []
  for (_, tile), of_piece in itertools.groupby(rows, lambda row: row[:2]):
    _, _, in_tile, sources = zip(*of_piece, strict=True)
    found.append((tile, in_tile[0], in_tile[-1] + 1, sources[0]))
  return found


def land(piece, places, source_row, before, tiling):
  """Returns the source row of each row of a landing slot, after the load and the copy of a piece.

  Args:
    piece: `Piece`.
    places: rows of the source and of the slot where its load starts.
    source_row: of its first row.
    before: the slot of the piece before it.
    tiling: static sizes.
  """
  alignment = tiling.row_alignment
  hbm_tile = lambda row: range(row - row % alignment, row - row % alignment + alignment)
  slot = {places[1] + i: places[0] + i for i in range(piece.load_rows)}
  needed = {row for i in range(piece.last - piece.first) for row in hbm_tile(source_row + i)}
  if piece.continues_at >= 0:
    needed -= {*hbm_tile(source_row)}
  assert sorted(slot.values()) == sorted(needed)
  assert not slot or places[1] % alignment == 0
  if piece.continues_at >= 0:
    here, there = hbm_tile(piece.first + piece.shift), hbm_tile(piece.continues_at)
    assert not {*here} & {*slot}
    slot |= {row: before[copied] for row, copied in zip(here, there, strict=True)}
  assert all(0 <= row < tiling.tile_rows + tiling.block_rows for row in slot)
  return slot


def check_walk(tiling, runs, is_tight, origin):
  """Compares the plan of all cores with the model.

  Args:
    tiling: static sizes.
    runs: (source, destination, size), rows from `origin` on.
    is_tight: whether the window is what the runs cover, or else the whole destination.
    origin: row where source and destination begin.
  """
  runs = [(source + origin, destination + origin, size) for source, destination, size in runs]
  covered = [row for _, first, size in runs if size for row in (first, first + size)]
  whole = origin, origin + ROWS
  window = (min(covered, default=0), max(covered, default=0)) if is_tight else whole
  first_row = window[0] - window[0] % tiling.row_alignment
  firsts, lasts, found = jax.device_get(walk(CopyRuns(*np.int32(runs).T), np.int32(window), tiling))

  tiles = -(-(window[1] - first_row) // tiling.tile_rows)
  assert [*firsts, tiles] == [0, *lasts]  # The cores share all tiles, and each has its own,
  assert np.ptp(lasts - firsts) <= 1  # of which none has many more.

  expected = iter(model(runs, window, tiling))
  for core, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
    steps = [jax.tree.map(lambda x, at=(core, i): int(x[at]), found) for i in range(STEPS)]
    number = [there_is_one for there_is_one, _, _ in steps].index(0)
    assert all(not there_is_one and piece.tile == last for there_is_one, piece, _ in steps[number:])
    slot, source_end = {}, -1
    for _, piece, places in steps[:number]:
      tile, in_tile, end, source_row = next(expected)
      assert (piece.tile, piece.first, piece.last) == (tile, in_tile, end)
      assert first <= tile < last
      assert 0 <= piece.shift < tiling.row_alignment
      is_continued = source_row == source_end and source_row % tiling.row_alignment != 0
      assert is_continued == (piece.continues_at >= 0)
      slot = land(piece, places, source_row, slot, tiling)
      for i in range(end - in_tile):
        assert slot[in_tile + i + piece.shift] == source_row + i
      source_end = source_row + end - in_tile
  assert not [*expected]


@st.composite
def layouts(draw):
  """Runs (source, destination, size): some continue the one before it, and some are empty."""
  rows, end, source_end = st.integers(0, ROWS - 1), 0, 0
  runs = []
  for _ in range(RUNS):
    start = end + draw(st.sampled_from([0, 0, 1, 7, 8, 32]) | st.integers(0, 64))
    source = draw(st.just(source_end) | rows)
    most = ROWS - max(start, source)
    size = min(draw(st.sampled_from([1, 2, 8, 9, 32]) | st.integers(0, ROWS)), most)
    if size <= 0:
      runs.append((draw(rows), draw(rows), 0))  # Wherever it is.
      continue
    runs.append((source, start, size))
    end, source_end = start + size, source + size
  return runs


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.word_rows}-{t.tile_rows}")
def test_pieces_are_those_of_the_model(tiling):
  sampled = {"runs": layouts(), "is_tight": st.booleans(), "origin": st.sampled_from([0, HIGH])}
  run_sampled(check_walk, tiling, max_examples=100, **sampled)


def test_a_plan_is_arithmetic_of_any_integers():
  """Without a kernel and without `jax.jit`, of Python's integers and of NumPy's."""
  tiling, runs = TILINGS[0], [(5, 3, 20), (25, 23, 0), (25, 24, 4)]
  runs = pieces.searchable(CopyRuns(*np.int32(runs).T))
  found = []
  for as_scalar in int, np.int32:
    tiles = pieces.Tiles.of_core(*map(as_scalar, (0, 3, 28)), tiling)
    position = jax.tree.map(as_scalar, pieces.first_position(tiles))
    found.append(jax.tree.map(int, step(position, runs, tiles)))
  # Rows 5 to 18 go to rows 3 to 16 of the tile that begins at row 0, loaded from row 0 on.
  piece = pieces.Piece(tile=0, first=3, last=16, shift=2, load_rows=24, continues_at=-1)
  assert found == 2 * [
    (pieces.Position(run=0, row=16, landed=18, landed_at=18), (1, piece, (0, 0)))
  ]


@pytest.mark.parametrize("row, down, up", [(0, 0, 0), (1, 0, 8), (8, 8, 8), (15, 8, 16)])
def test_rows_are_aligned(row, down, up):
  assert (pieces.align_down(row, 8), pieces.align_up(row, 8)) == (down, up)
