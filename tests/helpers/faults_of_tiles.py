"""Faults to plant: tiles that are shared, what they hold, who writes them, and their words."""

from tests.helpers.kernel_check import UNEVEN
from tests.helpers.planting import COMPACT, EXPAND, Fault, in_plan, in_words, NOTHING, TWO_CORES

SHARED = [
  Fault(
    "an HBM tile that two pieces share is not copied",
    EXPAND,
    "self.landing.tiles[slot, hbm_tile(piece.first + piece.shift)] = shared",
    NOTHING,
  ),
  Fault(
    "it is copied from the slot before the last",
    COMPACT,
    "self.landing.before(slot)]",
    "self.landing.before(slot, by=2)]",
  ),
  in_plan(
    "it is copied from where the piece starts",
    EXPAND,
    "landed_at=last + shift",
    "landed_at=first + shift",
  ),
  Fault(
    "it is copied to where the load goes",
    COMPACT,
    "hbm_tile(piece.first + piece.shift)",
    "hbm_tile(self.align_up(piece.first + piece.shift))",
  ),
  in_plan(
    "every HBM tile is taken for shared",
    COMPACT,
    "is_continued = (source_row == position.landed) & (in_hbm_tile != 0)",
    "is_continued = in_hbm_tile != 0",
  ),
  in_plan(
    "a whole HBM tile is taken for shared",
    COMPACT,
    "is_continued = (source_row == position.landed) & (in_hbm_tile != 0)",
    "is_continued = source_row == position.landed",
  ),
  Fault(
    "the first piece of a core takes an HBM tile from the core before it",
    EXPAND,
    "pieces.first_position(self.tiles)",
    "pieces.first_position(self.tiles)._replace("
    "landed=self.tiles.row_of(self.tiles.first) + self.runs.offsets[0])",
  ),
]

CONTENTS = [
  Fault(
    "the block before the window is not read",
    COMPACT,
    "pl.when(tile.row < self.window.first)",
    "pl.when(tile.row < 0)",
  ),
  Fault(
    "the block behind the window is not read",
    COMPACT,
    "pl.when(ends_inside)",
    "pl.when(tile.row < 0)",
  ),
  Fault(
    "an assembled tile is not blank before",
    EXPAND,
    "pl.when(self.window.is_filled != 0)(lambda: self.fill(self.assembly",
    "pl.when(self.window.is_filled > 1)(lambda: self.fill(self.assembly",
  ),
  Fault(
    "the blank tile is not blank",
    EXPAND,
    "pl.when(self.window.is_filled != 0)(lambda: self.fill(self.blank",
    "pl.when(self.window.is_filled > 1)(lambda: self.fill(self.blank",
  ),
  Fault(
    "rows behind the window are lost where two pieces end in its last block",
    COMPACT,
    "ends_exactly = (self.window.is_filled != 0) | (last > tile.rows)",
    "ends_exactly = self.window.is_filled != 0",
  ),
  Fault(
    "rows between pieces are not blank",
    EXPAND,
    "ends_exactly = (self.window.is_filled != 0) | (last > tile.rows)",
    "ends_exactly = last > tile.rows",
  ),
  Fault(
    "a blank tile is skipped",
    EXPAND,
    "store_blank_tiles(turn.tile + 1, piece.tile)",
    "store_blank_tiles(turn.tile + 2, piece.tile)",
  ),
  Fault(
    "the last blank tiles are skipped",
    EXPAND,
    "self.store_blank_tiles(turn.tile + 1, self.tiles.last)",
    NOTHING,
  ),
  Fault(
    "a blank tile passes the end",
    EXPAND,
    "jnp.minimum(self.tiling.tile_rows, self.window.last - row)",
    "self.tiling.tile_rows",
    case=UNEVEN,
  ),
]

CORES = [
  in_plan(
    "no core has the last tile",
    COMPACT,
    "div(row - start + tiling.tile_rows - 1, tiling.tile_rows)",
    "div(row - start, tiling.tile_rows)",
  ),
  in_plan(
    "a tile is between the shares of the cores",
    EXPAND,
    "jnp.minimum(core * share, count)",
    "jnp.minimum(core * (share + 1), count)",
  ),
  in_plan(
    "both cores write a tile",
    COMPACT,
    "jnp.minimum(share + core * count, count)",
    "jnp.minimum(share + 1 + core * count, count)",
    interpret=TWO_CORES,
  ),
]

WORDS = [
  in_words("what is merged is not masked", COMPACT, "if mask is not None:", "if False:"),
  in_words("a merge starts at a block", COMPACT, "(row >= first) & (row < last)", "row < last"),
  in_words("a merge ends at a block", COMPACT, "(row >= first) & (row < last)", "row >= first"),
  in_words("a merge starts a row late", EXPAND, "(row >= first) &", "(row > first) &"),
  in_words("a merge ends a row late", COMPACT, "& (row < last)", "& (row <= last)"),
  in_words(
    "the next block is not looked at", EXPAND, "landed.load(block + 1)", "landed.load(block)"
  ),
  in_words("half words are not moved", EXPAND, "if word_rows == 1:", "if True:"),
  in_words(
    "whole words are joined with the next",
    COMPACT,
    "words + jnp.minimum(rest, 1)",
    "words + 1",
  ),
  in_words(
    "rows in a word are numbered backwards",
    EXPAND,
    "(row_bits * row_in_word)",
    "(row_bits * (word_rows - 1 - row_in_word))",
  ),
]
