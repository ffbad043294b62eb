"""Compact and expand: every implementation against the reference, bit for bit."""

import collections
import dataclasses
import itertools

from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import kernels, RaggedRows
from pallas_stash.kernels import xla
from pallas_stash.ragged import CopyRuns
from tests.helpers.checks import long, once
from tests.helpers.kernel_check import (
  check,
  copy_runs,
  edge_cases,
  kernels_of,
  LONG,
  MANY_TILES,
  TWO_BLOCKS,
  UNEVEN,
)
from tests.helpers.sampling import run_sampled
from tests.helpers.support import (
  as_rows,
  DTYPES,
  GROUPS,
  IMPLEMENTATIONS,
  layouts,
  long_if_interpreted,
  ON_TPU,
  start_rows,
)

XLA, MOSAIC = IMPLEMENTATIONS

# Of the kernels, few are interpreted by `make test`.
BY_XLA = [
  *((XLA, UNEVEN, dtype) for dtype in ("float32", "bfloat16", "int8")),
  *(once(XLA, UNEVEN, d) for d in ("float16", "int32", "float8_e4m3fn", "float8_e5m2")),
  (XLA, MANY_TILES, "bfloat16"),
  (XLA, TWO_BLOCKS, "int8"),
]
BY_THE_KERNEL = {
  (MOSAIC, case, dtype): long_if_interpreted
  for case, dtype in (
    *((UNEVEN, d) for d in DTYPES),
    (MANY_TILES, "bfloat16"),
    (TWO_BLOCKS, "int8"),
  )
}


def in_every_case(*interpreted):
  """Returns parameters: by XLA; of the kernel, these cases, and others in the long target."""
  marked = BY_THE_KERNEL | {(MOSAIC, *case): once for case in interpreted}
  return BY_XLA + [mark(*case) for case, mark in marked.items()]


@pytest.mark.parametrize("implementation, case, dtype", in_every_case((UNEVEN, "bfloat16")))
def test_edge_cases(implementation, case, dtype):
  for seed, (layout, start) in enumerate(edge_cases(case)):
    check(implementation, case, dtype, layout, start, seed)


@pytest.mark.parametrize("implementation, case, dtype", in_every_case())
def test_sampled(implementation, case, dtype):
  sampled = {"layout": layouts(case.total_rows), "start": start_rows(case.stash_rows)}
  sampled |= {"seed": st.integers(0, 2**31)}
  few = 4 if implementation == "mosaic_interpret" else 40
  run_sampled(check, implementation, case, dtype, max_examples=few, **sampled)


@pytest.mark.parametrize(
  "implementation, groups",
  [(XLA, 6), *(long_if_interpreted(MOSAIC, groups) for groups in (3, 6))],
)
def test_all_patterns_of_empty_groups(implementation, groups):
  sizes, starts = np.array([3, 1, 8, 5, 2, 3][:groups]), [29, 0, 12, 1, 24, 6][:groups]
  for pattern in itertools.product([0, 1], repeat=groups):
    layout = (sizes * pattern).tolist(), starts
    check(implementation, UNEVEN, "bfloat16", layout, start=5, seed=sum(pattern))


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
    long(0, {"num_cores_or_threads": 2}),
    long(5, {"num_cores_or_threads": 2}),
    # A DMA that no one waits for then leaves its semaphore raised, which `no_races` reports.
    long(5, {"dma_execution_mode": "eager"}),
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


@pytest.mark.parametrize("dtype", [d if d in ("float32", "float16") else once(d) for d in DTYPES])
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
