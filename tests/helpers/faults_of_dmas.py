"""Faults to plant: when DMAs are waited for, how much they move, and from where to where."""

from tests.helpers.planting import COMPACT, EAGER, EXPAND, Fault, in_plan, NOTHING

WAITS = [
  Fault(
    "a load is not waited for",
    COMPACT,
    "self.load(slot, ZERO, ZERO, piece.load_rows).wait()",
    "None",
  ),
  Fault(
    "the read of an edge is not waited for",
    COMPACT,
    "    copy.start()\n    copy.wait()\n",
    "    copy.start()\n",
  ),
  Fault(
    "a kernel ends with stores in flight",
    EXPAND,
    "repeat(number, lambda slot, _, slots=slots: self.finish_stores(slots, slot), None)",
    NOTHING,
  ),
  Fault(
    "rows leaving are forgotten, so no store is waited for",
    COMPACT,
    "slots.rows_leaving[slot] = slots.rows_leaving[slot] + last - first",
    NOTHING,
  ),
  Fault(
    "a landing slot is loaded while it is stored from",
    COMPACT,
    "self.finish_stores(self.landing, free_slot)",
    NOTHING,
  ),
  Fault(
    "an assembly slot is filled while it is stored from",
    EXPAND,
    "self.finish_stores(self.assembly, tile.slot)\n        self.open_tile(tile)",
    "self.open_tile(tile)\n        self.finish_stores(self.assembly, tile.slot)",
  ),
  Fault(
    "an assembly slot is never waited for before it is used again",
    COMPACT,
    "self.finish_stores(self.assembly, tile.slot)",
    NOTHING,
  ),
  Fault("as many loads ahead as slots", COMPACT, "IDLE_SLOTS = 2", "IDLE_SLOTS = 0"),
  in_plan(
    "a load is started that no one waits for",
    COMPACT,
    "tiles._replace(last_row=jnp.where(last == count, window_last, tiles.row_of(last)))",
    "tiles",
    interpret=EAGER,
  ),
]

SIZES = [
  in_plan(
    "a load is an HBM tile short",
    COMPACT,
    "load_rows = align_up(in_hbm_tile + last - first, alignment)",
    "load_rows = align_down(in_hbm_tile + last - first, alignment)",
  ),
  in_plan(
    "a load is an HBM tile too long",
    EXPAND,
    "load_rows = align_up(in_hbm_tile + last - first, alignment)",
    "load_rows = alignment + align_up(in_hbm_tile + last - first, alignment)",
  ),
  Fault(
    "a store is an HBM tile short",
    COMPACT,
    "last = self.align_up(jnp.where(",
    "last = self.align_down(jnp.where(",
  ),
  Fault(
    "a store is an HBM tile too long",
    COMPACT,
    "last = self.align_up(jnp.where(",
    "last = self.tiling.row_alignment + self.align_up(jnp.where(",
  ),
  Fault(
    "a store starts at the first piece",
    EXPAND,
    "first = self.align_down(jnp.where(is_filled == 0, first_merged, 0))",
    "first = self.align_down(first_merged)",
  ),
  Fault(
    "a store starts at the last piece",
    EXPAND,
    "first_merged = jnp.where(first_merged < 0, piece.first, first_merged)",
    "first_merged = piece.first",
  ),
  Fault(
    "what is undefined is stored with each piece's last block",
    EXPAND,
    "self.align_up(piece.last) <= self.block_down(next_piece.first)",
    "piece.last <= next_piece.first",
  ),
  Fault(
    "the window ends a row early",
    COMPACT,
    "(window[i] for i in range(len(Window._fields)))",
    "(window[i] - (i == 1) for i in range(len(Window._fields)))",
  ),
  Fault(
    "the window starts a row late",
    COMPACT,
    "(window[i] for i in range(len(Window._fields)))",
    "(window[i] + (i == 0) for i in range(len(Window._fields)))",
  ),
]

PLACES = [
  Fault("all loads signal one semaphore", EXPAND, "landing.loads.at[slot]", "landing.loads.at[0]"),
  Fault("all stores signal one semaphore", EXPAND, "slots.stores.at[slot]", "slots.stores.at[0]"),
  Fault("all loads land in one slot", COMPACT, "landing.tiles.at[slot, ", "landing.tiles.at[0, "),
  Fault(
    "all stores leave from one slot",
    COMPACT,
    "tile = slot if slots.tiles.shape[0] > 1 else ZERO",
    "tile = 0",
  ),
  Fault(
    "pieces of a tile go to different slots",
    COMPACT,
    "tile_slot = jnp.where(is_first_piece, self.assembly.before(turn.tile_slot), turn.tile_slot)",
    "tile_slot = self.assembly.before(turn.tile_slot)",
  ),
  Fault(
    "each piece of a tile opens it again",
    COMPACT,
    "@_when_seldom(is_first_piece)",
    "@_when_seldom(piece.tile >= 0)",
  ),
  in_plan(
    "rows that are to move down land before their place",
    COMPACT,
    "landing_row = align_up(first - in_hbm_tile, alignment)",
    "landing_row = align_down(first, alignment)",
  ),
  Fault(
    "rows at odd places are stored as they landed",
    EXPAND,
    "is_ready = is_whole_tile & is_aligned",
    "is_ready = is_whole_tile",
  ),
  Fault(
    "a tile of several pieces is stored as it landed",
    EXPAND,
    "is_ready = is_whole_tile & is_aligned",
    "is_ready = is_aligned & (piece.first == 0)",
  ),
  Fault(
    "the stash does not alias the result",
    COMPACT,
    "input_output_aliases={len(scalars) + 1: 0} if updated else {}",
    "input_output_aliases={}",
  ),
]
