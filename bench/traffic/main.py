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
from bench.traffic import table

MODEL = flags.DEFINE_enum("model", "deepseek-v3", PRESETS, "Whose published sizes to take.")
CHIP = flags.DEFINE_enum("chip", "v5p", list(cases.BANDWIDTH), "Whose bandwidth and estimates.")
OUTPUT = flags.DEFINE_string("output", "build", "The folder for traffic.json.")
JOBS = flags.DEFINE_integer("jobs", 2, "Cases to compile at once.", lower_bound=1)


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
  layer = table.layer_of(size)
  rows, total = table.rows_of(chip, layer, estimates(table.needed_cases(chip, layer)))
  print(
    f"{MODEL.value}, {chip}: {layer.rows:,} rows of {layer.worst_case_rows:,} in a layer, whose"
    f" matmuls take {total:.1f} ms as the compiler estimates megablox;"
    f" {cases.BANDWIDTH[chip] / 1e9:,.0f} GB/s.\n"
  )
  print(*table.lines_of(rows), sep="\n")
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  (output / "traffic.json").write_text(json.dumps(rows, indent=1) + "\n")
