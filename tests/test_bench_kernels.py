"""What the kernel benchmark says of bytes is what the kernels move, and what it compares."""

import collections
import dataclasses
import itertools
import json
import pathlib

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernels import cases, report
from bench.kernels.alternatives import ALTERNATIVES
from bench.kernels.cases import DTYPES, KERNELS
from bench.kernels.traffic import dma_rows, make_layout
from pallas_stash import kernels
from pallas_stash.kernels import mosaic_tpu
from pallas_stash.kernels.tiling import choose_tiling
from pallas_stash.ragged import CopyRuns
from tests.helpers.checks import long
from tests.helpers.support import ON_TPU

pytestmark = pytest.mark.once

TOTAL_ROWS, STASH_ROWS = 512, 256


def count_dma_rows(layout, kernel, tiling, monkeypatch):
  """Interprets a kernel; returns the rows that its DMAs read and wrote in HBM."""
  counts = collections.Counter()

  class CountedCopy:
    def __init__(self, source, destination, semaphore):
      self._copy = make_async_copy(source, destination, semaphore)
      self.wait = self._copy.wait
      # HBM is [rows, columns], VMEM is [slots, rows, columns].
      is_read = len(source.ref.shape) == 2
      self._name = "read" if is_read else "written"
      self._rows = (source if is_read else destination).transforms[-1].indices[0].size

    def start(self):
      count = lambda rows: counts.update({self._name: int(rows)})
      jax.debug.callback(count, jnp.int32(self._rows))
      self._copy.start()

  make_async_copy = pltpu.make_async_copy
  monkeypatch.setattr(pltpu, "make_async_copy", CountedCopy)
  i = np.arange(layout.groups)
  wide, tight, sizes = layout.wide_rows(i), layout.tight_rows(i), layout.sizes(i)
  options = {"tiling": tiling, "interpret": kernels.INTERPRET}
  rows, stash = jnp.zeros((TOTAL_ROWS, 128)), jnp.zeros((STASH_ROWS, 128))
  if kernel == "compact":
    runs = CopyRuns(*map(jnp.int32, (wide, tight, sizes)))
    out = mosaic_tpu.compact(rows, stash, runs, **options)
  else:
    runs = CopyRuns(*map(jnp.int32, (tight, wide, sizes)))
    fill = jnp.bool_(kernel == "expand")
    options |= {"total_rows": TOTAL_ROWS, "width": 128}
    out = mosaic_tpu.expand(stash, runs, jnp.float32(0), fill, **options)
  jax.block_until_ready(out)
  jax.effects_barrier()
  return counts["read"], counts["written"]


@pytest.mark.skipif(ON_TPU, reason="counts the DMAs of interpreted kernels")
@pytest.mark.parametrize("kernel", [k if k == "compact" else long(k) for k in KERNELS])
@pytest.mark.parametrize(
  "name, start",
  [
    *itertools.starmap(long, [("run", 3), ("buckets-4", 0), ("ragged-4", 7), ("ragged-64", 7)]),
    # Groups of 1 to 3 rows, several in one HBM tile: most need no load of their own.
    long("buckets-64", 3),
    ("prefix", 0),
  ],
)
def test_the_formula_counts_the_dmas(kernel, name, start, monkeypatch):
  tiling = dataclasses.replace(choose_tiling(128, 4), tile_rows=32)
  layout = make_layout(name, 128, TOTAL_ROWS, start)
  counted = count_dma_rows(layout, kernel, tiling, monkeypatch)
  assert counted == dma_rows(layout, kernel, TOTAL_ROWS, tiling)
  assert min(counted) >= layout.rows


@pytest.mark.parametrize(
  "name", ["prefix", "run", "buckets-8", "buckets-256", "ragged-256", "pages-256"]
)
def test_layouts_fit_and_do_not_overlap(name):
  for occupancy in 0.05, 0.25, 0.5, 1.0:
    rows = int(2**18 * occupancy) // 256 * 256
    layout = make_layout(name, rows, 2**18, 3)
    i = np.arange(layout.groups)
    starts, sizes, tight = layout.wide_rows(i), layout.sizes(i), layout.tight_rows(i)
    assert (sizes > 0).all() and starts[0] >= 0 and starts[-1] + sizes[-1] <= 2**18
    assert (starts[:-1] + sizes[:-1] <= starts[1:]).all()
    assert (tight[:-1] + sizes[:-1] + layout.gap == tight[1:]).all()
    assert sizes.sum() == rows


@pytest.mark.parametrize("width", [7168, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_follow_the_rows(dtype, width):
  """At DeepSeek-V3 size, 25% of the rows routed: a prefix, and one group from an odd row on."""
  total_rows, rows = 2**18, 2**16
  tiling = choose_tiling(width, jnp.dtype(dtype).itemsize)
  for name, start in ("prefix", 0), ("prefix", 5), ("run", 3):
    layout = make_layout(name, rows, total_rows, start)
    read, written = dma_rows(layout, "compact", total_rows, tiling)
    assert read + written <= 1.03 * 2 * rows
    assert 2 * total_rows >= 3.8 * (read + written)
    assert 2 * 1.5 * rows >= 1.45 * (read + written)
    read, written = dma_rows(layout, "expand", total_rows, tiling)
    assert read <= 1.03 * rows and written == total_rows
    read, written = dma_rows(layout, "expand_undefined", total_rows, tiling)
    assert read <= 1.03 * rows and written <= rows + 2 * tiling.row_alignment


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_between_groups_is_not_written_unless_defined(dtype):
  tiling = choose_tiling(2048, jnp.dtype(dtype).itemsize)
  layout = make_layout("ragged-1024", 2**16, 2**18, 3)  # Of 47 or 81 rows, several in a tile.
  assert tiling.tile_rows >= layout.stride
  _, written = dma_rows(layout, "expand_undefined", 2**18, tiling)
  assert written <= layout.rows + 2 * tiling.row_alignment * layout.groups


def row_of(case, cycles, floor):
  found = {"estimated_cycles": cycles, "floor_cycles": floor, "bytes_moved": 1, "vmem_bytes": 1}
  return {key: (case | found)[key] for key in report.KEYS}


class TestFailures:
  prefix = cases.make_case("v5e", "compact")
  ragged = cases.make_case("v5e", "compact", "ragged-256", offset=3)
  stored = (row_of(prefix, 70, 100), row_of(ragged, 120, 100))

  def failures(self, *rows):
    return report.failures(rows, self.stored)

  def test_none(self):
    assert not self.failures(*self.stored)
    assert not self.failures(row_of(self.prefix, 71, 100), row_of(self.ragged, 122, 100))

  @pytest.mark.parametrize("key", ["estimated_cycles", "bytes_moved", "vmem_bytes"])
  def test_a_figure_that_worsened(self, key):
    worse = self.stored[0] | {key: self.stored[0][key] * 1.03}
    (found,) = self.failures(worse, self.stored[1])
    assert key in found and "was" in found

  def test_no_estimate(self):
    (found,) = self.failures(self.stored[0], row_of(self.ragged, None, 100))
    assert "no estimate" in found

  def test_above_the_floor(self):
    assert any("above the floor" in text for text in self.failures(row_of(self.prefix, 101, 100)))

  def test_above_the_prefix_layout(self):
    prefix, ragged = self.stored
    rows = prefix, ragged | {"estimated_cycles": 131}
    (found,) = report.failures(rows, rows)
    assert "1.31 times the prefix layout" in found
    rows = [row | {"chip": "tpu7x"} for row in rows]
    assert not report.failures(rows, rows)

  def test_cases_that_are_not_those_of_the_baseline(self):
    assert "not measured" in self.failures(self.stored[0])[0]
    other = row_of(cases.make_case("v5p", "compact"), 70, 100)
    assert "not in the baseline" in self.failures(*self.stored, other)[0]


class TestCases:
  def test_the_matrix_has_every_value(self):
    found = list(cases.full_cases())
    for key, values in [
      ("chip", cases.BANDWIDTH),
      ("kernel", KERNELS),
      ("layout", cases.LAYOUTS),
      ("occupancy", cases.OCCUPANCIES),
      ("dtype", DTYPES),
      ("offset", (0, 5)),
    ]:
      ours = [case for case in found if case["implementation"] == cases.OURS]
      assert {case[key] for case in ours} == set(values)
    assert {case["implementation"] for case in found} == {cases.OURS, *ALTERNATIVES}
    assert len({str(case) for case in found}) == len(found)

  def test_default_cases_compare_the_same_work(self):
    found = [case for case in cases.default_cases() if case["total_rows"] == cases.FEW_ROWS]
    for chip in cases.BANDWIDTH:
      for kernel in "compact", "expand":
        here = [c for c in found if (c["chip"], c["kernel"]) == (chip, kernel)]
        assert {c["implementation"] for c in here} == {cases.OURS, *ALTERNATIVES}
        assert len({(c["rows"], c["layout"], c["offset"], c["dtype"]) for c in here}) == 1

  def test_every_swept_case_has_its_prefix(self):
    rows = [row_of(case, 1, 1) for case in cases.sweep_cases()]
    assert all(report.prefix_of(row, rows) for row in rows)


def test_rows_print_and_plot(tmp_path):
  rows = [row_of(case, 3, 4) for case in cases.check_cases()]
  rows[0]["estimated_cycles"] = None
  assert all(len(report.describe(row)) == len(report.HEADER) for row in rows)
  report.plot(rows).savefig(tmp_path / "kernels.png")
  assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_the_baseline_is_of_these_cases():
  stored = json.loads((pathlib.Path(cases.__file__).parent / "baseline.json").read_text())
  named = [report.name(row) for row in stored]
  assert named == [report.name(row_of(case, 1, 1)) for case in cases.check_cases()]


@pytest.mark.parametrize("kernel", ["compact", "expand"])
@pytest.mark.parametrize("name", [*ALTERNATIVES])
def test_alternatives_copy_the_rows(name, kernel):
  if ALTERNATIVES[name].is_pallas and not ON_TPU:
    pytest.skip("a plain Pallas TPU kernel, only compiled here")
  rows, total_rows, start = 8, 32, 0
  worst_case = jnp.arange(total_rows * 128, dtype=jnp.float32).reshape(total_rows, 128)
  stash = -jnp.ones((total_rows + 64, 128), jnp.float32).at[:rows].set(worst_case[:rows])
  copy = ALTERNATIVES[name].make(rows, total_rows, kernel)
  source = (worst_case, 0 * stash) if kernel == "compact" else (0 * worst_case, stash)
  out = jax.jit(copy)(*source, jnp.int32(start), jnp.arange(rows, dtype=jnp.int32))
  expected = worst_case if kernel == "compact" else stash
  assert (out[:rows] == expected[:rows]).all()
