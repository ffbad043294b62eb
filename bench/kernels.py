"""Compact and expand against the bandwidth floor, and against what users would pick instead.

Nothing runs: each case is compiled for a TPU in a process of its own (`bench.static`), and reported
are the compiler's estimated cycles, the bytes that the kernel moves by its plan (`bench.traffic`)
and the floor, the cycles that memory bandwidth alone would take. Run it by `make bench`.

Writes kernels.json, a row for each case, and kernels.png. With `--check` it runs the few cases of
baseline.json instead and fails if one worsened by more than 2%, or is above its floor.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys

from absl import app, flags
import jax.numpy as jnp

from bench.alternatives import ALTERNATIVES
from bench.traffic import dma_rows, make_layout
from pallas_stash.kernels.tiling import choose_tiling

OUTPUT = flags.DEFINE_string("output", "build", "The folder for kernels.json and kernels.png.")
FULL = flags.DEFINE_bool("full", False, "Every case of the matrix, which takes an hour or more.")
CHECK = flags.DEFINE_bool("check", False, "Compare with the stored baseline.")
UPDATE = flags.DEFINE_bool("update_baseline", False, "Store the baseline.")
JOBS = flags.DEFINE_integer("jobs", 2, "Cases to compile at once.")

BASELINE = pathlib.Path(__file__).with_name("baseline.json")
TIMEOUT = 60  # Seconds for a case.
LEAST = 0.01  # An estimate below this part of the floor has not seen the DMAs, and is none.
WORSE = 1.02

# Of one JAX device: bytes a second, as https://cloud.google.com/tpu/docs states them a chip (a
# tpu7x chip is two devices), and cycles a second, commonly quoted and not published as such.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "tpu7x": 7370e9 / 2}
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 1.9e9}

# Worst-case rows and width: DeepSeek-V3, its narrow activations, Mixtral, Qwen3-235B.
SHAPES = {
  "DeepSeek-V3": (262_144, 7168),
  "DeepSeek-V3 ffn": (262_144, 2048),
  "Mixtral": (65_536, 4096),
  "Qwen3-235B": (262_144, 4096),
}
KERNELS = "compact", "expand", "expand_undefined"
LAYOUTS = "prefix", "run", "buckets-8", "buckets-256", "ragged-8", "ragged-256"
DTYPES = "bfloat16", "float32", "float8_e4m3fn", "int8"
KEYS = (
  *("chip", "kernel", "implementation", "layout", "occupancy", "width", "dtype", "rows", "offset"),
  *("estimated_cycles", "floor_cycles", "bytes_moved", "vmem_bytes"),
)


def make_case(chip, kernel, layout="prefix", occupancy=0.25, shape=(262_144, 7168), **options):
  """Returns a case; `rows` are those that are copied."""
  total_rows, width = shape
  rows = int(total_rows * occupancy) // 256 * 256
  case = {"chip": chip, "kernel": kernel, "implementation": "pallas_stash", "layout": layout}
  case |= {"occupancy": occupancy, "width": width, "dtype": "bfloat16", "rows": rows, "offset": 0}
  return case | {"total_rows": total_rows} | options


def default_cases():
  for chip in BANDWIDTH:
    for kernel in KERNELS:
      yield make_case(chip, kernel)
    for implementation in ALTERNATIVES:
      # Of so many rows that XLA's own copies compile in time.
      yield make_case(chip, "compact", implementation=implementation, shape=(32_768, 7168))
    yield make_case(chip, "compact", offset=5)
    yield make_case(chip, "compact", "run", offset=3)
    yield make_case(chip, "compact", "buckets-256")
    for kernel in KERNELS:
      yield make_case(chip, kernel, "ragged-256", offset=3)


def full_cases():
  for chip in BANDWIDTH:
    for kernel in KERNELS:
      for shape in SHAPES.values():
        for occupancy in 0.05, 0.25, 0.5, 1.0:
          for layout in LAYOUTS:
            for dtype in DTYPES:
              for offset in 0, 5:
                options = {"shape": shape, "dtype": dtype, "offset": offset}
                yield make_case(chip, kernel, layout, occupancy, **options)
    for implementation in ALTERNATIVES:
      for kernel in "compact", "expand":
        yield make_case(chip, kernel, implementation=implementation)


def check_cases():
  """At 8192 rows of 7168 bfloat16: groups of 64 rows and the prefix that they are compared with."""
  for chip in BANDWIDTH:
    for kernel in "compact", "expand_undefined":
      for layout, offset in ("prefix", 0), ("ragged-128", 3):
        yield make_case(chip, kernel, layout, shape=(32_768, 7168), offset=offset)


def measure(case):
  """Returns the row of a case, with a null estimate where the compiler gives none."""
  itemsize = jnp.dtype(case["dtype"]).itemsize
  if case["implementation"] == "pallas_stash":
    tiling = choose_tiling(case["width"], itemsize)
    layout = make_layout(case["layout"], case["rows"], case["total_rows"], case["offset"])
    rows_moved = sum(dma_rows(layout, case["kernel"], case["total_rows"], tiling))
    vmem_bytes = tiling.vmem_bytes(itemsize)
  else:
    alternative = ALTERNATIVES[case["implementation"]]
    rows_moved = 2 * alternative.rows_moved(case["rows"], case["total_rows"])
    vmem_bytes = None
  bytes_moved = rows_moved * case["width"] * itemsize
  floor = bytes_moved / BANDWIDTH[case["chip"]] * CLOCK[case["chip"]]
  command = [sys.executable, "-m", "bench.static", json.dumps(case)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    cycles, problem = json.loads(done.stdout.splitlines()[-1])["estimated_cycles"], None
  except subprocess.TimeoutExpired:
    cycles, problem = None, f"no estimate in {TIMEOUT} s"
  except (IndexError, ValueError, KeyError):
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "failed" in line]
    cycles, problem = None, f"no estimate: {lines[-1] if lines else done.returncode}"
  if cycles is not None and cycles < LEAST * floor:
    cycles, problem = None, f"{cycles} cycles are no estimate"
  if problem:
    print(f"{case['chip']} {case['implementation']} {case['kernel']}: {problem}", file=sys.stderr)
  found = {"estimated_cycles": cycles, "floor_cycles": round(floor)}
  found |= {"bytes_moved": bytes_moved, "vmem_bytes": vmem_bytes}
  return {key: (case | found)[key] for key in KEYS}


def bound(row):
  """Returns max(estimate, floor), or None."""
  return row["estimated_cycles"] and max(row["estimated_cycles"], row["floor_cycles"])


def describe(row):
  cycles = bound(row)
  ratio = f"{cycles / row['floor_cycles']:.2f}" if cycles else "-"
  names = f"{row['chip']:6}{row['kernel']:17}{row['implementation']:15}{row['layout']:12}"
  what = f"{row['occupancy']:5.0%} {row['width']:5} {row['dtype']:14}{row['offset']:3}"
  cycles = f"{row['estimated_cycles'] or 0:12,} {row['floor_cycles']:12,} {ratio:>6}"
  return f"{names}{what}{cycles} {row['bytes_moved'] / 1e9:8.2f} GB"


def plot(rows):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 8), layout="constrained")
  for axes, chip in zip(figure.subplots(2, 2).flat, BANDWIDTH, strict=True):
    shown = [row for row in rows if row["chip"] == chip and bound(row)]
    labels = [f"{r['implementation']} {r['kernel']} {r['layout']} +{r['offset']}" for r in shown]
    axes.barh(range(len(shown)), [bound(row) for row in shown], color="#2171b5")
    axes.barh(range(len(shown)), [row["floor_cycles"] for row in shown], color="#9ecae1")
    axes.set_yticks(range(len(shown)), labels, fontsize="x-small")
    axes.set_title(f"{chip}: cycles, and of them the floor of memory bandwidth (light)")
  return figure


def failures(rows, baseline):
  """Returns what is worse than the baseline or than its targets, as text."""
  name = lambda row: " ".join(str(row[key]) for key in ("chip", "kernel", "layout", "offset"))
  stored = {name(row): row for row in baseline}
  found = []
  for row in rows:
    if row["estimated_cycles"] is None:
      found.append(f"{name(row)}: no estimate")
      continue
    for key in "estimated_cycles", "bytes_moved", "vmem_bytes":
      if row[key] > WORSE * stored[name(row)][key]:
        found.append(f"{name(row)}: {key} {row[key]:,} was {stored[name(row)][key]:,}")
    is_prefix = row["layout"] == "prefix"
    if is_prefix and row["estimated_cycles"] > row["floor_cycles"]:
      found.append(f"{name(row)}: {row['estimated_cycles']:,} cycles, above the floor")
    prefix = [
      r for r in rows if all(r[k] == row[k] for k in ("chip", "kernel")) and r["layout"] == "prefix"
    ]
    if row["chip"] != "tpu7x" and bound(prefix[0]) and bound(row) > 1.3 * bound(prefix[0]):
      found.append(f"{name(row)}: more than 1.3 times the prefix layout")
  return found


def main(args):
  del args
  is_check = CHECK.value or UPDATE.value
  cases = list(check_cases() if is_check else full_cases() if FULL.value else default_cases())
  with concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool:
    rows = list(pool.map(measure, cases))
  print(
    "chip  kernel           implementation layout  rows width dtype  offset  cycles  floor  ratio"
  )
  print(*map(describe, rows), sep="\n")
  if UPDATE.value:
    BASELINE.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
  elif CHECK.value:
    worse = failures(rows, json.loads(BASELINE.read_text()))
    if worse:
      sys.exit("\n".join(worse))
  else:
    output = pathlib.Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    (output / "kernels.json").write_text(json.dumps(rows, indent=1))
    plot(rows).savefig(output / "kernels.png", dpi=150)


if __name__ == "__main__":
  app.run(main)
