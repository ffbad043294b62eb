"""What it costs a layer to keep its residuals, each way, beside the time of its matmuls.

For a model and a chip, prints the bytes that each way moves (`account.py`), the time that they take
at the published bandwidth, and what part that is of the time of the layer's nine grouped matmuls:
megablox's, as the compiler estimates them (`bench.kernels`); for kernels that move rows themselves
also what they cost more than the matmuls that they replace. Nothing runs, and no TPU is needed, but
the environment of `make bench`: `make traffic`.
"""

import concurrent.futures
import json
import pathlib
import sys

from absl import flags

from bench.fit.model_sizes import PRESETS
from bench.kernels import cases
from bench.kernels.estimates import cycles_of
from bench.traffic import account
from pallas_stash import sizing

MODEL = flags.DEFINE_enum("model", "deepseek-v3", PRESETS, "Whose published sizes to take.")
CHIP = flags.DEFINE_enum("chip", "v5p", list(cases.BANDWIDTH), "Whose bandwidth and estimates.")
OUTPUT = flags.DEFINE_string("output", "build", "The folder for traffic.json.")
JOBS = flags.DEFINE_integer("jobs", 2, "Cases to compile at once.", lower_bound=1)

# Bytes a second between a device and its host, in one direction, as users report them: they are not
# published.
HOST_BANDWIDTH = {"v5p": 15e9, "v6e": 32e9}


def layer_of(size):
  """Returns the `account.Layer` of a `ModelSize`, of balanced routing."""
  routing = size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts
  rows = sizing.expected_rows(*routing), sizing.worst_case_rows(*routing)
  return account.Layer(*rows, size.width, size.hidden)


def case_of(chip, layer, implementation, kernel, is_from_width):
  """Returns the case of `bench.kernels` of one kernel, of a part of the rows."""
  k, n = (layer.width, layer.hidden) if is_from_width else (layer.hidden, layer.width)
  case = {"chip": chip, "kernel": kernel, "k": k, "n": n, "rows": cases.FEW_ROWS}
  return case | {"implementation": implementation}


def needed_cases(chip, layer):
  """Returns {(implementation, kernel, is_from_width): case}, of all that `rows_of` asks for."""
  keys = [("megablox", kernel, is_from_width) for kernel, is_from_width, _ in account.MATMULS]
  for line in account.lines_of(layer):
    keys += [(cases.OURS, kernel, True) for kernel in line.kernels]
  return {key: case_of(chip, layer, *key) for key in keys}


def rows_of(chip, layer, cycles):
  """Returns a row for each line of the account, and the milliseconds of a layer's matmuls.

  Args:
    chip: the name of one.
    layer: an `account.Layer`.
    cycles: of each key of `needed_cases`.
  """
  milliseconds = lambda number: 1e3 * number * layer.rows / cases.FEW_ROWS / cases.CLOCK[chip]
  matmul = lambda kernel, is_from_width=True: cycles["megablox", kernel, is_from_width]
  total = milliseconds(sum(matmul(kernel, way) * many for kernel, way, many in account.MATMULS))
  rows = []
  for line in account.lines_of(layer):
    extra = sum(
      cycles[cases.OURS, kernel, True] - many * matmul(replaced)
      for kernel, (replaced, many) in line.kernels.items()
    )
    moved = 1e3 * line.hbm_bytes / cases.BANDWIDTH[chip]
    in_kernels = max(milliseconds(extra), 0)
    replayed = milliseconds(line.replayed * matmul("gmm"))
    # What a kernel moves is hidden behind its matmuls, but for what the estimate says.
    cost = max(moved, in_kernels) if line.kernels else moved
    host = HOST_BANDWIDTH.get(chip)
    rows.append(
      {
        "keeps": line.keeps,
        "way": line.way,
        "hbm_bytes": line.hbm_bytes,
        "hbm_milliseconds": moved,
        "in_kernels_milliseconds": in_kernels if line.kernels else None,
        "replayed_milliseconds": replayed,
        "host_bytes": line.host_bytes,
        "host_milliseconds": 1e3 * line.host_bytes / 2 / host if host else None,
        "part_of_matmuls": (cost + replayed) / total,
      }
    )
  return rows, total


def table_of(rows):
  """Returns the lines of the table."""
  head = f"{'keeps':12} {'way':30} {'GB':>6} {'ms':>6} {'of matmuls':>10}"
  lines = [f"{head} {'in kernels':>10} {'replayed':>8} {'host GB':>7} {'ms each way':>11}"]
  number = lambda value: "-" if not value else f"{value:.2f}"
  for row in rows:
    lines.append(
      f"{row['keeps']:12} {row['way']:30} {row['hbm_bytes'] / 1e9:6.2f}"
      f" {row['hbm_milliseconds']:6.2f} {row['part_of_matmuls']:10.1%}"
      f" {number(row['in_kernels_milliseconds']):>10} {number(row['replayed_milliseconds']):>8}"
      f" {number(row['host_bytes'] / 1e9):>7} {number(row['host_milliseconds']):>11}"
    )
  return lines


def estimates(needed):
  """Returns the cycles of each case."""
  with concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool:
    found = list(pool.map(lambda case: cycles_of(case, "grouped_static"), needed.values()))
  if problems := [problem for _, problem in found if problem]:
    sys.exit("\n".join(problems))
  return dict(zip(needed, (cycles for cycles, _ in found), strict=True))


def main(args):
  del args
  size, chip = PRESETS[MODEL.value], CHIP.value
  layer = layer_of(size)
  rows, total = rows_of(chip, layer, estimates(needed_cases(chip, layer)))
  print(
    f"{MODEL.value}, {chip}: {layer.rows:,} rows of {layer.worst_case_rows:,} in a layer, whose"
    f" matmuls take {total:.1f} ms as the compiler estimates megablox;"
    f" {cases.BANDWIDTH[chip] / 1e9:,.0f} GB/s.\n"
  )
  print(*table_of(rows), sep="\n")
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  (output / "traffic.json").write_text(json.dumps(rows, indent=1) + "\n")
