"""`make traffic`: the account of a layer's residuals, by formula and by what kernels move."""

import jax
import jax.numpy as jnp
import pytest

from bench.fit.model_sizes import PRESETS
from bench.kernels import cases
from bench.kernels.traffic import dma_rows, make_layout
from bench.traffic import account, table
from pallas_stash.kernels.tiling import choose_tiling
from pallas_stash.kernels.visits import Place, Visits

DEEPSEEK_V3 = table.layer_of(PRESETS["deepseek-v3"])
SMALL = account.Layer(rows=4000, worst_case_rows=16_384, width=1024, hidden=512)
TILE_ROWS = 128
UNDEFINED_OR_NOT = {
  "checkpoint": "expand",
  "checkpoint, undefined padding": "expand_undefined",
}
SIZES = [1000, 0, 1700, 1300]

# Of v5p, as the compiler estimates them.
CYCLES = {
  ("megablox", "gmm", True): 971_530,
  ("megablox", "gmm", False): 1_136_628,
  ("megablox", "tgmm", True): 1_071_521,
  ("megablox", "tgmm", False): 1_227_825,
  (cases.OURS, "gmm", True): 967_000,
  (cases.OURS, "tgmm", True): 1_070_000,
  (cases.OURS, "gate_up_weights", True): 1_965_957,
  (cases.OURS, "gate_up_backward_weights", True): 1_069_931,
}


def line_of(layer, keeps, way):
  (line,) = [x for x in account.lines_of(layer) if (x.keeps, x.way) == (keeps, way)]
  return line


def test_the_ways_of_deepseek_v3():
  """15.6% of the matmuls saved plainly, 1.8% in place: the figures of docs/deepseek-v3.md."""
  assert set(table.needed_cases("v5p", DEEPSEEK_V3)) == set(CYCLES)
  rows, milliseconds = table.rows_of("v5p", DEEPSEEK_V3, CYCLES)
  assert milliseconds == pytest.approx(44.3, abs=0.1)
  part = {(row["keeps"], row["way"]): round(100 * row["part_of_matmuls"], 1) for row in rows}
  assert [part[account.X, way] for way in ("saved", "checkpoint", "gmm")] == [12.3, 5.4, 0.8]
  ways = "saved", "checkpoint", "checkpoint, undefined padding", "grouped_mlp"
  assert [part[account.MLP, way] for way in ways] == [15.6, 11.6, 10.3, 1.8]
  lines = table.lines_of(rows)
  assert len(lines) == 1 + len(rows) and all("GB" in line or "." in line for line in lines)


def test_copies_move_what_the_account_says():
  """Of a prefix, by the plan of the kernels, whose DMAs `test_bench_kernels` counts."""
  n, worst = SMALL.rows, SMALL.worst_case_rows
  tiling = choose_tiling(SMALL.hidden, account.ITEMSIZE)
  layout = make_layout("prefix", n, worst, 0)
  moved = lambda kernel: sum(dma_rows(layout, kernel, worst, tiling))
  for way, kernel in UNDEFINED_OR_NOT.items():
    # Beside gate and up in the stash: what is between the matmuls.
    said = line_of(SMALL, account.MLP, way).hbm_bytes / SMALL.hidden / account.ITEMSIZE
    counted = 2 * (moved("compact") + moved(kernel)) + 3 * n + 9 * worst
    assert counted == pytest.approx(said, rel=0.05)


def test_kernels_in_place_move_what_the_account_says():
  """By what they visit: a block is fetched, or stored, where it is another than the one before."""
  place = Place(*map(jnp.int32, (0, SMALL.rows, 24)))
  sizes, groups = jnp.array(SIZES, jnp.int32), len(SIZES)
  assert sum(SIZES) == SMALL.rows
  args = sizes, place, SMALL.worst_case_rows, TILE_ROWS, jnp.int32(0), groups, False
  visits, number = jax.jit(lambda: Visits.of(*args))()
  tiles = [int(tile) for tile in visits.tiles[: int(number)]]
  blocks = 1 + sum(a != b for a, b in zip(tiles[:-1], tiles[1:], strict=True))
  own = [int(visits.own_rows(visit, TILE_ROWS)[1]) for visit in range(int(number))]
  is_first = [visit == 0 or tiles[visit] != tiles[visit - 1] for visit in range(int(number))]
  stored = sum(rows for rows, is_one in zip(own, is_first, strict=True) if is_one)
  # Forward stores gate and up by DMAs of a push's own rows, and hidden by blocks; backward fetches
  # gate and up by blocks, and stores both gradients and hidden.
  rows = 2 * stored + (1 + 2 + 3) * blocks * TILE_ROWS
  said = line_of(SMALL, account.MLP, "grouped_mlp").hbm_bytes / SMALL.hidden / account.ITEMSIZE
  assert said <= rows <= 1.05 * said
