"""Compact and expand against the bandwidth floor, and against what users would pick instead.

First nothing runs: each case is compiled for a TPU in a process of its own (`static.py`), and
reported are the compiler's estimated cycles, the bytes that the kernel moves by its plan
(`traffic.py`) and the floor, the cycles that memory bandwidth alone would take. This needs the
environment of `make bench`. Then they run on the device that is here (`wall.py`), for which any
environment will do: `python -m bench.kernels --noestimate`.

Writes kernels.json, a row for each case, and kernels.png; and measured.json. With `--check` it
estimates the few cases of baseline.json instead and fails if one worsened by more than 2%, or is
above its floor. With `--sweep` it compares layouts, dtypes and widths with the prefix layout, and
fails above 1.3. With `--grouped` it compares the grouped matmuls that write and read the stash in
place, and the kernels of an expert MLP, with megablox's and with copies beside those, and fails
above 1.02, or what `report.MOST_OF_MEGABLOX` says. With `--pages` it compares rows in pages of 512
with those of a stash without, and fails where a kernel takes more than 1.01 of its cycles, or the
table more than 3% of the floor of a push of gate and up of DeepSeek-V3.
"""
# ruff: noqa: E402  The environment must be set before jax is imported.

import os

from bench.tpu.environment import ENVIRONMENT, has_accelerator

if not has_accelerator():  # Else what is measured is to run on it.
  os.environ.update(ENVIRONMENT)

import concurrent.futures
import json
import pathlib
import sys

from absl import flags

from bench.kernels import cases, report, wall
from bench.kernels.alternatives import ALTERNATIVES
from bench.kernels.estimates import cycles_of
from bench.kernels.traffic import dma_rows, make_layout
from pallas_stash.kernels.tiling import choose_tiling

OUTPUT = flags.DEFINE_string("output", "build", "The folder for kernels.json and kernels.png.")
FULL = flags.DEFINE_bool("full", False, "Every case of the matrix, which takes hours.")
SWEEP = flags.DEFINE_bool("sweep", False, "Every layout against the prefix layout: 13 minutes.")
GROUPED = flags.DEFINE_bool("grouped", False, "Grouped matmuls beside megablox's: 25 minutes.")
PAGES = flags.DEFINE_bool("pages", False, "Rows in pages beside rows that are contiguous.")
CHECK = flags.DEFINE_bool("check", False, "Compare with the stored baseline.")
UPDATE = flags.DEFINE_bool("update_baseline", False, "Store the baseline.")
ESTIMATE = flags.DEFINE_bool("estimate", True, "Compile for TPUs that need not be here.")
MEASURE = flags.DEFINE_bool("measure", True, "Run on the device that is here.")
CALLS = flags.DEFINE_integer("calls", 11, "Of each candidate that is measured.", lower_bound=2)
MEGABYTES = flags.DEFINE_integer("megabytes", None, "Of a measured worst case; by the device.")
WIDTHS = flags.DEFINE_multi_integer("width", [7168, 2048], "Of a row that is measured.")
DTYPES = flags.DEFINE_multi_string("dtype", ["bfloat16"], "Of a row that is measured.")
JOBS = flags.DEFINE_integer("jobs", 2, "Cases to compile at once.", lower_bound=1)

BASELINE = pathlib.Path(__file__).with_name("baseline.json")
LEAST = 0.01  # An estimate below this part of the floor has not seen the DMAs, and is none.


def estimate_case(case):
  """Returns the row of a case, with a null estimate where the compiler gives none."""
  itemsize = cases.itemsize(case)
  if case["implementation"] == cases.OURS:
    tiling = choose_tiling(case["width"], itemsize)
    layout = make_layout(case["layout"], case["rows"], case["total_rows"], case["offset"])
    rows_moved = sum(dma_rows(layout, case["kernel"], case["total_rows"], tiling))
    vmem_bytes = tiling.vmem_bytes(itemsize)
  else:
    alternative = ALTERNATIVES[case["implementation"]]
    rows_moved = 2 * alternative.rows_moved(case["rows"], case["total_rows"])
    vmem_bytes = None
  bytes_moved = rows_moved * case["width"] * itemsize
  floor = cases.floor_cycles(case["chip"], bytes_moved)
  cycles, problem = cycles_of(case)
  if cycles is not None and cycles < LEAST * floor:
    cycles, problem = None, f"{cycles} cycles are no estimate"
  if problem:
    print(f"{case['chip']} {case['implementation']} {case['kernel']}: {problem}", file=sys.stderr)
  found = {"estimated_cycles": cycles, "floor_cycles": round(floor)}
  found |= {"bytes_moved": bytes_moved, "vmem_bytes": vmem_bytes}
  return {key: (case | found)[key] for key in report.KEYS}


def estimates(chosen):
  """Prints and returns the rows of the chosen cases."""
  print(report.HEADER, flush=True)
  rows = []
  with concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool:
    for row in pool.map(estimate_case, chosen):
      print(report.describe(row), flush=True)
      rows.append(row)
  return rows


def compare_grouped():
  """Prints the grouped matmuls in place beside megablox's; returns which cost too much."""
  print(report.GROUPED_HEADER, flush=True)
  failures = []
  with concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool:
    every = list(cases.grouped_cases())
    for case, (cycles, problem) in zip(
      every, pool.map(lambda case: cycles_of(case, "grouped_static"), every), strict=True
    ):
      if problem:
        failures.append(f"{case}: {problem}")
      elif case["implementation"] == "megablox":
        one = cycles
      else:
        _, matmuls = cases.MLP_KERNELS.get(case["kernel"], (None, 1))
        print(report.describe_grouped(case, cycles, matmuls * one), flush=True)
        most = report.MOST_OF_MEGABLOX.get(case["kernel"], report.WORSE)
        if cycles > most * matmuls * one:
          failures.append(f"{case}: {cycles:,} cycles, megablox {matmuls * one:,}")
  return failures


def compare_pages():
  """Prints what pages cost, in the kernels and beside them; returns what costs too much."""
  failures = []
  print("Cycles of kernels, a prefix and in every other page of 512 rows:", flush=True)
  for chip in cases.BANDWIDTH:
    for kernel in cases.KERNELS:
      layouts = "prefix", f"pages-{cases.PAGE_ROWS}"
      pair = [cases.make_case(chip, kernel, layout, shape=cases.FEWER) for layout in layouts]
      without, paged = (estimate_case(case)["estimated_cycles"] for case in pair)
      print(f"{chip:6} {kernel:16} {without:9,} {paged:9,} {paged / without:.4f}", flush=True)
      if paged > report.MOST_OF_CONTIGUOUS * without:
        failures.append(f"{chip} {kernel}: {paged:,} cycles in pages, {without:,} without")
  print(
    "Cycles beside the kernels, without pages and with, and of the floor of a push:", flush=True
  )
  push_bytes = 2 * cases.TOTAL_ROWS // 4 * 2 * 2048 * 2  # In and out, gate and up.
  for chip in cases.BANDWIDTH:
    floor = cases.floor_cycles(chip, push_bytes)
    for pair in cases.page_cases(chip):
      found = [cycles_of(case, "pages_static") for case in pair]
      if problems := [problem for _, problem in found if problem]:
        failures += problems
        continue
      (without, _), (paged, _) = found
      share = (paged - without) / floor
      kernel = pair[0]["kernel"]
      print(f"{chip:6} {kernel:16} {without:9,} {paged:9,} {share:.2%}", flush=True)
      if share > report.MOST_OF_A_PUSH:
        failures.append(f"{chip} {kernel}: the table takes {share:.2%} of a push")
  return failures


def measurements():
  """Prints and returns the rows of what runs here."""
  print(wall.describe_device(), wall.HEADER, sep="\n", flush=True)
  rows = []
  for found in wall.measure_all(WIDTHS.value, DTYPES.value, CALLS.value, MEGABYTES.value):
    print(*map(wall.describe, found), sep="\n", flush=True)
    rows += found
  return rows


def main(args):
  del args
  if UPDATE.value:
    rows = estimates(cases.check_cases())
    BASELINE.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
    return
  if CHECK.value:
    rows = estimates(cases.check_cases())
    sys.exit("\n".join(report.failures(rows, json.loads(BASELINE.read_text()))) or 0)
  if PAGES.value:
    sys.exit("\n".join(compare_pages()) or 0)
  if GROUPED.value:
    sys.exit("\n".join(compare_grouped()) or 0)
  if SWEEP.value:
    rows = estimates(cases.sweep_cases())
    ratios = {report.name(row): report.of_prefix(row, rows) for row in rows}
    print("Of the prefix layout:", json.dumps(ratios, indent=1), sep="\n")
    sys.exit("\n".join(report.above_prefix(rows)) or 0)
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  if ESTIMATE.value:
    rows = estimates(cases.full_cases() if FULL.value else cases.default_cases())
    (output / "kernels.json").write_text(json.dumps(rows, indent=1))
    report.plot(rows).savefig(output / "kernels.png", dpi=150)
  if MEASURE.value:
    (output / "measured.json").write_text(json.dumps(measurements(), indent=1))
