"""Compact and expand: every implementation against the reference, bit for bit."""

import collections
import dataclasses
import functools
import itertools
from unittest import mock

from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import kernels, RaggedRows
from pallas_stash.kernels import mosaic_tpu, xla
from pallas_stash.kernels.tiling import choose_tiling
from pallas_stash.ragged import CopyRuns
from tests.helpers import ragged_rows
from tests.helpers.checks import once, OPTIMIZED
from tests.helpers.sampling import run_sampled
from tests.helpers.support import (
  as_rows,
  assert_same_bits,
  DTYPES,
  GROUPS,
  IMPLEMENTATIONS,
  layouts,
  long_if_interpreted,
  nan_of,
  ON_TPU,
  random_bits,
  start_rows,
)


@dataclasses.dataclass(frozen=True)
class Case:
  """Static sizes. Each compiles an interpreted kernel, so there are few."""

  total_rows: int
  width: int
  stash_rows: int
  stash_width: int
  tile_rows: int = 32
  column_blocks: tuple[tuple[int, int], ...] = ((0, 128),)


# Nothing is a multiple of anything: HBM tiles, vector registers, words and lanes are cut.
UNEVEN = Case(101, 100, 69, 130, column_blocks=((0, 256),))
# More tiles for each core than there are slots, so that slots are reused.
MANY_TILES = Case(352, 128, 328, 128)
TWO_BLOCKS = Case(168, 200, 136, 384, tile_rows=64, column_blocks=((0, 256), (256, 128)))
SMALL = Case(32, 128, 40, 128)
LONG = Case(2**11, 128, 2**12, 128)

XLA, MOSAIC = IMPLEMENTATIONS
CASES = [(UNEVEN, dtype) for dtype in DTYPES] + [(MANY_TILES, "bfloat16"), (TWO_BLOCKS, "int8")]


@functools.cache
def kernels_of(implementation, case, dtype, interpret=kernels.INTERPRET):
  """Returns `compact(rows, stash, runs)` and `expand(stash, runs, blank, fill)`, jitted."""
  itemsize = jnp.dtype(dtype).itemsize
  if implementation == "xla":
    module, options = xla, {}
  else:
    tiling = dataclasses.replace(
      choose_tiling(case.stash_width + -case.stash_width % 128, itemsize),
      tile_rows=case.tile_rows,
      column_blocks=case.column_blocks,
      landing_slots=4,  # The fewest, so that they are used often.
      assembly_slots=2,
    )
    interpret = implementation == "mosaic_interpret" and interpret
    module, options = mosaic_tpu, {"tiling": tiling, "interpret": interpret}

  def expand(stash, runs, blank, fill):
    like_rows = {"total_rows": case.total_rows, "width": case.width}
    return module.expand(stash, runs, blank, fill, **like_rows, **options)

  def in_large_chunks_of_about_a_tile(kernel):
    chunk_bytes = (case.tile_rows + 9) * case.width * itemsize

    def traced(*args):
      with mock.patch.object(xla, "LARGE_CHUNK_BYTES", chunk_bytes):
        return kernel(*args)

    # Of interpreted kernels nothing is left to the compiler that users have.
    return jax.jit(traced, compiler_options=OPTIMIZED if implementation == "xla" else None)

  compact = functools.partial(module.compact, **options)
  return tuple(map(in_large_chunks_of_about_a_tile, (compact, expand)))


@functools.partial(jax.jit, static_argnums=0)
def copy_runs(case, sizes, starts, start):
  """Returns the runs of compact and of expand, `GROUPS` of each."""
  ragged = RaggedRows(sizes, case.total_rows, starts)
  runs = ragged.compact_runs(start, case.stash_rows), ragged.expand_runs(start, case.stash_rows)
  return jax.tree.map(lambda field: jnp.pad(field, (0, GROUPS - field.shape[0])), runs)


def check(implementation, case, dtype, layout, start, seed=0, **options):
  """Compacts random bits from among NaN into random bits, then expands them from among NaN."""
  compact, expand = kernels_of(implementation, case, dtype, **options)
  to_stash, from_stash = copy_runs(case, *map(as_rows, (*layout, start)))
  ones = lambda length: np.ones((length, 1), np.int8)
  is_read = ragged_rows.expand(ones(case.stash_rows), start, case.total_rows, *layout)[:, 0] == 1
  is_written = ragged_rows.compact(ones(case.total_rows), 0 * ones(case.stash_rows), start, *layout)
  is_written = is_written[:, 0] == 1

  rng = np.random.default_rng(seed)
  bits = lambda *shape: random_bits(rng, shape, dtype)
  rows, stash = bits(case.total_rows, case.width), bits(case.stash_rows, case.stash_width)
  if seed % 2 == 0:
    rows[~is_read] = nan_of(dtype)
  actual = np.asarray(compact(rows, stash, to_stash))
  expected = ragged_rows.compact(rows, stash[:, : case.width], start, *layout)
  assert_same_bits(actual[:, : case.width], expected, message=f"compact {layout} {start}")
  assert_same_bits(actual[~is_written], stash[~is_written], message=f"compact {layout} {start}")

  stash[:, : case.width] = expected
  if seed % 2 == 0:
    stash[~is_written] = nan_of(dtype)
  blank = random_bits(rng, (1,), dtype)[0] if seed % 3 else np.nan
  blank = np.asarray(blank if jnp.issubdtype(dtype, jnp.inexact) else seed - 1).astype(dtype)
  expected = ragged_rows.expand(stash[:, : case.width], start, case.total_rows, *layout)
  expected[~is_read] = blank
  message = f"expand {layout} {start} {blank}"
  assert_same_bits(expand(stash, from_stash, blank, True), expected, message=message)
  if seed % 3 == 0:
    actual = np.asarray(expand(stash, from_stash, blank, False))
    assert_same_bits(actual[is_read], expected[is_read], message=f"{message}, undefined padding")


def edge_cases(case):
  """Yields (layout, start)."""
  rows, stash_rows = case.total_rows, case.stash_rows
  yield ([0] * GROUPS, None), 8
  yield ([rows], [0]), 0
  yield ([rows // GROUPS] * GROUPS, None), -3
  yield ([rows - 13], [13]), 5  # Crosses every tile, shifted by whole words and not.
  yield ([2], [13]), 11  # Within one block, at neither edge.
  yield ([8, 16, 8], [40, 0, 32]), 32  # Aligned groups, out of order.
  yield ([1, 0, 9, 1, 0, 1, 1, 1], [31, 9, 2, 30, 0, 17, 0, 12]), 33  # Many groups, one tile.
  yield ([20, 0, 17, 3], [1, 64, 44, 25]), stash_rows - 35  # Falls past the end.
  # From the last row of a block to within one, and blank tiles between the groups.
  yield ([41, 2, 9, 0, 14], [rows - 42, 15, 1, 0, 17]), 7
  yield ([5, 9], None), stash_rows


# Of the kernels, few are interpreted by `make test`, and one of them with every jax.
IN_EVERY_CASE = [
  *((XLA, case, dtype) for case, dtype in CASES),
  *((MOSAIC, UNEVEN, "bfloat16"), once(MOSAIC, UNEVEN, "float32")),
  *(once(MOSAIC, case, dtype) for case, dtype in CASES[len(DTYPES) :]),
  *(long_if_interpreted(MOSAIC, UNEVEN, d) for d in DTYPES if d not in ("bfloat16", "float32")),
]


@pytest.mark.parametrize("implementation, case, dtype", IN_EVERY_CASE)
def test_edge_cases(implementation, case, dtype):
  for seed, (layout, start) in enumerate(edge_cases(case)):
    check(implementation, case, dtype, layout, start, seed)


@pytest.mark.parametrize("implementation, case, dtype", IN_EVERY_CASE)
def test_sampled(implementation, case, dtype):
  sampled = {"layout": layouts(case.total_rows), "start": start_rows(case.stash_rows)}
  sampled |= {"seed": st.integers(0, 2**31)}
  few = 4 if implementation == "mosaic_interpret" else 40
  run_sampled(check, implementation, case, dtype, max_examples=few, **sampled)


@pytest.mark.parametrize(
  "implementation, groups",
  [(XLA, 6), once(MOSAIC, 3), long_if_interpreted(MOSAIC, 6)],
)
def test_all_patterns_of_empty_groups(implementation, groups):
  sizes, starts = np.array([3, 1, 8, 5, 2, 3][:groups]), [29, 0, 12, 1, 24, 6][:groups]
  for pattern in itertools.product([0, 1], repeat=groups):
    layout = (sizes * pattern).tolist(), starts
    check(implementation, SMALL, "bfloat16", layout, start=5, seed=sum(pattern))


@pytest.mark.parametrize("implementation", [XLA, once(MOSAIC)])
class TestEveryImplementation:
  def test_nothing_to_copy(self, implementation):
    rows, stash = jnp.ones((4, 2)), jnp.ones((8, 2))
    no_group = RaggedRows(np.zeros(0, np.int32), 4, np.zeros(0, np.int32))
    no_runs = no_group.compact_runs(0, 8), no_group.expand_runs(0, 8)
    np.testing.assert_array_equal(kernels.compact(rows, 2 * stash, no_runs[0], implementation), 2)
    np.testing.assert_array_equal(
      kernels.expand(stash, no_runs[1], 4, 2, jnp.float32(7), implementation), 7
    )
    runs = RaggedRows(np.array([3]), 4).compact_runs(0, 8)
    assert kernels.compact(rows, stash[:0], runs, implementation).shape == (0, 2)
    assert kernels.compact(rows[:, :0], stash[:, :0], runs, implementation).shape == (8, 0)
    assert kernels.expand(stash, runs, 4, 0, jnp.float32(7), implementation).shape == (4, 0)
    blank = kernels.expand(stash[:0], runs, 4, 2, jnp.float32(7), implementation)
    np.testing.assert_array_equal(blank, np.full((4, 2), 7.0))

  def test_work_follows_the_rows(self, implementation, monkeypatch):
    if implementation == "mosaic":
      pytest.skip("a compiled kernel calls nothing back")
    counts = collections.Counter()

    def count(name, amount):
      jax.debug.callback(lambda: counts.update({name: amount}))

    class CountedCopy:
      def __init__(self, *refs):
        self._copy = make_async_copy(*refs)
        self.wait = self._copy.wait

      def start(self):
        count("copies", 1)
        self._copy.start()

    def counted_update(operand, update, start_indices):
      count("rows", update.shape[0])
      return dynamic_update_slice(operand, update, start_indices)

    make_async_copy, dynamic_update_slice = pltpu.make_async_copy, lax.dynamic_update_slice
    monkeypatch.setattr(pltpu, "make_async_copy", CountedCopy)
    monkeypatch.setattr(lax, "dynamic_update_slice", counted_update)
    compact, expand = kernels_of.__wrapped__(implementation, LONG, "float32")
    layout, start = ([40, 0, 1, 30], [1001, 7, 500, 900]), 1003
    to_stash, from_stash = copy_runs(LONG, *map(as_rows, (*layout, start)))
    rows, stash = np.zeros((2, LONG.total_rows, LONG.width), np.float32)

    def most(copies):
      rows = sum(layout[0]) + 32 * len(layout[0])
      return {"rows": rows} if implementation == "xla" else {"copies": copies}

    # The 71 rows lie in 3 tiles and, cut by runs, 5 pieces. A piece is loaded, a tile stored, and
    # the blocks at both ends are read before.
    jax.block_until_ready(compact(rows, stash, to_stash))
    jax.effects_barrier()
    assert counts and counts <= collections.Counter(most(copies=5 + 3 + 2))
    counts.clear()
    # They come from 6 pieces, and every tile is stored once.
    jax.block_until_ready(expand(stash, from_stash, np.float32(0), True))
    jax.effects_barrier()
    assert counts and counts <= collections.Counter(most(copies=6 + LONG.total_rows // 32))
    counts.clear()
    # Where padding may be undefined, only the 6 tiles that the runs touch are stored.
    jax.block_until_ready(expand(stash, from_stash, np.float32(0), False))
    jax.effects_barrier()
    assert counts and counts <= collections.Counter(most(copies=6 + 6))


@pytest.mark.skipif(ON_TPU, reason="reads what XLA makes of it for a CPU")
def test_few_rows_are_gathered_only_where_there_are_few():
  runs = RaggedRows(np.array([3]), 4096).compact_runs(0, 4096)
  rows = jnp.ones((4096, 256))
  text = jax.jit(xla.compact).lower(rows, rows, runs).compile().as_text()
  gathered = "f32[32,256]"
  assert gathered in text
  assert gathered not in text.split("\nENTRY ")[1]


@pytest.mark.once
@pytest.mark.skipif("mosaic_interpret" not in IMPLEMENTATIONS, reason="a chip has the cores it has")
@pytest.mark.parametrize(
  "start, change",
  [
    (0, {"num_cores_or_threads": 2}),
    (5, {"num_cores_or_threads": 2}),
    # A DMA that no one waits for then leaves its semaphore raised, which `no_races` reports.
    (5, {"dma_execution_mode": "eager"}),
  ],
)
def test_other_ways_to_interpret(start, change):
  interpret = dataclasses.replace(kernels.INTERPRET, **change)
  layout = [97, 31, 0, 96, 1], [201, 0, 4, 64, 33]
  check("mosaic_interpret", MANY_TILES, "bfloat16", layout, start, interpret=interpret)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
      if hasattr(value, "eqns"):
        yield from equations(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("batch", [(), (2,)], ids=["plain", "vmap"])
def test_xla_makes_nothing_of_worst_case_size(batch):
  rows = jnp.broadcast_to(jnp.float32(0), (*batch, 2**16, 64))
  stash = jnp.broadcast_to(jnp.float32(0), (*batch, 2**17, 64))
  runs = CopyRuns(*jnp.zeros((3, *batch, GROUPS), jnp.int32))
  blank = jnp.float32(0)
  compact = lambda rows, stash, runs: kernels.compact(rows, stash, runs, "xla")
  expand = lambda stash, runs: kernels.expand(stash, runs, 2**16, 64, blank, "xla")
  large = xla.LARGE_CHUNK_BYTES // 4
  for kernel, args in (compact, (rows, stash, runs)), (expand, (stash, runs)):
    jaxpr = jax.make_jaxpr(jax.vmap(kernel) if batch else kernel)(*args).jaxpr
    whole = set()
    for equation in equations(jaxpr):
      whole |= {equation.primitive.name for out in equation.outvars if out.aval.size > large}
      if equation.primitive.name == "dynamic_update_slice":
        assert equation.invars[1].aval.size <= large
    # What is updated in place, what carries it, and the blank rows of expand.
    assert "dynamic_update_slice" in whole
    assert whole <= {
      "broadcast_in_dim",
      "custom_vmap_call",
      "dynamic_update_slice",
      "jit",
      "scan",
      "while",
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_platform_chooses_when_lowered(dtype):
  def roundtrip(rows, stash, sizes, start):
    ragged = RaggedRows(sizes, 64)
    stash = kernels.compact(rows, stash, ragged.compact_runs(start, 64), None)
    runs = ragged.expand_runs(start, 64)
    return kernels.expand(stash, runs, 64, 128, jnp.zeros((), dtype), None)

  rows = jax.ShapeDtypeStruct((64, 128), dtype)
  scalars = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
  traced = jax.jit(roundtrip).trace(rows, rows, *scalars)
  kernels_in = lambda platform: (
    traced.lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call")
  )
  assert kernels_in("cpu") == 0
  assert kernels_in("tpu") == (0 if dtype == "float16" else 2)


def test_unknown_implementation():
  runs = RaggedRows(np.array([3]), 4).compact_runs(0, 8)
  with pytest.raises(ValueError, match="implementation='pallas' must be one of"):
    kernels.compact(jnp.ones((4, 2)), jnp.ones((8, 2)), runs, "pallas")
