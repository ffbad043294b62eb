"""Does the model fit? One gradient step at real size, compiled for a TPU topology, each way.

Compiles the gradient step of a model's MoE layers (`gradient_step.py`) once for each way of
keeping residuals,

  remat: nothing is kept, everything is recomputed;
  save: worst-case residuals in HBM;
  offload: worst-case residuals in pinned host memory;
  chunks: fixed chunks of 1.5 times the expected rows (`fixed_chunks.py`);
  stash: a stash of the routed rows;
  stash_host, only if asked (--ways=stash_host): the same in two tiers, part of each layer's rows in
    pinned host memory (--staged);
  grouped_mlp: the same, which the matmuls of gate and up write and read themselves,

and for each choice of residuals. Where "mlpwo" is not among them, the model multiplies the routing
weights in before the down projection, so that nothing needs it; where it is, behind. What does not
fit is compiled once more at a depth where it does.
With --pipeline, the layers are stages of a pipeline instead (`pipeline_step.py`): `save` keeps the
residuals of the passes in flight at worst-case size, `stash` in pages.
Prints a table, and writes fit.json, fit.png (peak HBM) and fit_imbalance.png (how much room a stash
needs where routing is imbalanced). Every figure is the compiler's. No TPU is needed. Fails if a
promise of the README is broken. Run it from the repository root: `python -m bench.fit`.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

from absl import flags

from bench.fit import gradient_step, imbalance, pipeline_step, plot
from bench.fit.model_sizes import ModelSize, PRESETS
from bench.tpu import aot
from bench.tpu.environment import ENVIRONMENT

MODEL = flags.DEFINE_enum("model", "deepseek-v3", PRESETS, "Whose published sizes to take.")
TOPOLOGY = flags.DEFINE_string("topology", "v5p:8x8x4", "As libtpu names it.")
WAYS = flags.DEFINE_list(
  "ways", ["save", "offload", "chunks", "stash", "grouped_mlp"], "Beside remat."
)
RESIDUALS = flags.DEFINE_multi_string(
  "residuals",
  ["mlpwi_0+mlpwi_1", "mlpwo", "mlpwi_0+mlpwi_1+mlpwo"],
  "What to keep: names joined by +. Give the flag once for each choice.",
)
IMBALANCE = flags.DEFINE_float(
  "imbalance", 1.0, "Rows of the busiest device to the mean: what the stash has room for.", 1.0
)
STAGED = flags.DEFINE_float(
  "staged",
  0.45,
  "Of stash_host, the part of a layer's balanced rows that goes to the host. On v5p half of all"
  " three residuals hides behind a layer (docs/host.md). Half of DeepSeek-V3's rows are as many as"
  " the tokens of a ring: copies of those would be counted as copies of the stash's rows.",
  0.0,
  1.0,
)
EXPECTED_ROWS = flags.DEFINE_bool(
  "expected_rows",
  True,
  "Whether the grouped matmuls of stash_host declare the cost of the rows of perfect balance, and"
  " not of the worst case.",
)
SCHEDULER_FEATURES = flags.DEFINE_bool(
  "scheduler_features", False, f"Compile stash_host with {gradient_step.SCHEDULER_FLAG}."
)
PIPELINE = flags.DEFINE_enum(
  "pipeline", None, pipeline_step.SCHEDULES, "A schedule: compile the stages of a pipeline instead."
)
RANKS = flags.DEFINE_integer("ranks", 16, "Of the pipeline.", 1)
MICROBATCHES = flags.DEFINE_integer("microbatches", 32, "Of a step of the pipeline.", 1)
OUTPUT = flags.DEFINE_string("output", "build", "The folder to write to.")
SIZES = {
  field.name: flags.DEFINE_integer(field.name, None, f"Instead of the model's {field.name}.", 1)
  for field in dataclasses.fields(ModelSize)
}

OTHER_WAYS = set(gradient_step.WAYS) - {"remat"}
NAMES = {"mlpwi_0", "mlpwi_1", "mlpwo"}
flags.register_validator(
  TOPOLOGY, lambda name: name.partition(":")[0] in aot.HBM_GIB, f"must be of {list(aot.HBM_GIB)}"
)
flags.register_validator(
  WAYS, lambda ways: set(ways) <= OTHER_WAYS, f"must be of {sorted(OTHER_WAYS)}"
)
flags.register_validator(
  RESIDUALS,
  lambda choices: all(set(choice.split("+")) <= NAMES for choice in choices),
  f"must be of {sorted(NAMES)}, joined by +",
)

KEYS = (
  *("model", "topology", "layers", "weights", "residuals", "way", "fits", "peak_bytes"),
  *("host_bytes", "needed_bytes", "stash_copies", "stage_copies", "flops", "beside"),
  *("trace_seconds", "compile_seconds"),
)
NONE = "none"  # the residuals of remat
GATE_AND_UP = "mlpwi_0+mlpwi_1"  # those of grouped_mlp
WITH_HOST = "stash_host"
STASHES = "stash", WITH_HOST, "grouped_mlp"
BEFORE, BEHIND = "before", "behind"  # where the weights are multiplied in: the down projection
START = time.monotonic()


def main(args):
  del args
  changed = {name: flag.value for name, flag in SIZES.items() if flag.value is not None}
  size = dataclasses.replace(PRESETS[MODEL.value], **changed)
  if PIPELINE.value:
    sys.exit(fit_pipeline(size))
  rows = measure(size)

  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  table = [{key: row[key] for key in KEYS} for row in rows]
  (output / "fit.json").write_text(json.dumps(table, indent=2) + "\n")
  title = f"{MODEL.value}, {size.layers} MoE layers, {TOPOLOGY.value}"
  figure = plot.plot(rows, size.layers, aot.hbm_bytes(TOPOLOGY.value), title)
  figure.savefig(output / "fit.png", dpi=150)
  curves = imbalance.simulate(size)
  imbalance.plot(curves, title).savefig(output / "fit_imbalance.png", dpi=150)
  print_lines(table_of(rows), words=3)
  print(
    "weights: whether routing weights are multiplied in before the down projection or behind it."
  )
  print("FLOPs: relative to the save that replays least.\n")
  if WITH_HOST in WAYS.value:
    print("What a layer runs while the host's part of another one's rows moves: grouped matmuls,")
    print("and collectives.")
    print_lines(beside_of(rows), words=1)
  print("Layers recomputed, by the capacity as a multiple of the rows of perfect balance:")
  print_lines(imbalance.table(curves), words=2)
  log(f"wrote fit.json, fit.png and fit_imbalance.png to {output}")
  # Except there, XLA may hold what is restored beside all that remat holds of a layer.
  behind = 0 if MODEL.value == "deepseek-v3" else 2
  failures = broken_promises(rows, spare_residuals={BEFORE: 2, BEHIND: behind})
  if failures:
    sys.exit("\n".join(["FAILED:", *failures]))
  log("all promises hold")


def log(message):
  print(f"[{time.monotonic() - START:6.1f} s] {message}", file=sys.stderr, flush=True)


def step_of(size, way, residuals, weights):
  names = () if residuals == NONE else tuple(residuals.split("+"))
  of_stash = dict(imbalance=IMBALANCE.value, staged=STAGED.value)
  if way == WITH_HOST:
    of_stash["has_expected_rows"] = EXPECTED_ROWS.value
    of_stash["has_scheduler_flag"] = SCHEDULER_FEATURES.value
  return gradient_step.Step(size, TOPOLOGY.value, way, names, weights == BEFORE, **of_stash)


def weights_of(residuals):
  """Where the weights are multiplied in for a choice of residuals."""
  return BEHIND if "mlpwo" in residuals.split("+") else BEFORE


def measure(size):
  """Compiles every way of keeping every choice of residuals; returns a row for each.

  What does not fit is followed by the same at a depth where it does, beside what it is compared
  with there.
  """
  rows, floors = [], {}
  for residuals in RESIDUALS.value:
    weights = weights_of(residuals)
    if weights not in floors:
      rows.append(compile_row(step_of(size, "remat", NONE, weights)))
      floors[weights] = rows[-1]["peak_bytes"]
    floor = floors[weights]
    ways = [way for way in WAYS.value if way != "grouped_mlp" or residuals == GATE_AND_UP]
    steps = {way: step_of(size, way, residuals, weights) for way in ways}
    found = {way: compile_row(step) for way, step in steps.items()}
    rows += found.values()
    refused = [way for way in found if found[way]["fits"] is False]
    if floor and "save" in refused:
      fewer = shallower(size, floor, steps["save"].worst_case_bytes)
      compared = [way for way in ways if way in (*STASHES, *refused)]
      rows += [compile_row(step_of(fewer, way, residuals, weights)) for way in compared]
    if floor and "stash" in refused:
      fewer = shallower(size, floor, steps["stash"].stash_bytes)
      rows.append(compile_row(step_of(fewer, "remat", NONE, weights)))
      rows.append(compile_row(step_of(fewer, "stash", residuals, weights)))
  return rows


def shallower(size, floor, residual_bytes):
  """The size at a depth where residuals fit that take `residual_bytes` at full depth.

  Args:
    size: a `ModelSize`.
    floor: bytes of HBM that the model takes without any, at full depth.
    residual_bytes: of all layers.
  """
  spare = 0.95 * aot.hbm_bytes(TOPOLOGY.value) - floor  # some working memory is the way's own
  layers = int(spare * size.layers / residual_bytes)
  return dataclasses.replace(size, layers=min(max(layers, 1), size.layers))


def compile_row(step):
  """Compiles a step in a process of its own; returns its row of the table."""
  residuals = "+".join(step.residuals) or NONE
  row = dict.fromkeys(KEYS) | dict(
    model=MODEL.value,
    topology=step.topology,
    layers=step.size.layers,
    weights=BEFORE if step.weights_before_down_projection else BEHIND,
    residuals=residuals,
    way=step.way,
  )
  return row | compile_apart("gradient_step", step, f"{residuals}, {step.size.layers} layers")


def compile_apart(module, step, name):
  """Returns what a module of `bench.fit` says of a step; nothing if the compiler aborts."""
  name = f"{step.way} {name}"
  log(f"compiling {name}")
  command = [sys.executable, "-m", f"bench.fit.{module}", json.dumps(dataclasses.asdict(step))]
  environment = os.environ | ENVIRONMENT
  process = subprocess.run(command, capture_output=True, text=True, env=environment)
  if process.returncode:  # libtpu may abort: that costs this row, not the table
    log(f"{name}: the compiler FAILED with {process.returncode}\n{process.stderr[-2000:]}")
    return {}
  row = json.loads(process.stdout.splitlines()[-1])
  needed = gigabytes(row["needed_bytes"])
  verdict = f"fits, peak {gigabytes(row['peak_bytes'])} GB" if row["fits"] else f"needs {needed} GB"
  log(f"{name}: {verdict}")
  return row


def fit_pipeline(size):
  """Compiles a pipeline with residuals kept in both ways; returns 0, or what is wrong."""
  rows = {}
  lines = [("way", "fits", "peak GB", "needs GB", "GB of rows", "copies of the stash")]
  for way in pipeline_step.WAYS:
    counts = RANKS.value, MICROBATCHES.value
    step = pipeline_step.PipelineStep(
      size, TOPOLOGY.value, PIPELINE.value, *counts, way, IMBALANCE.value
    )
    rows[way] = row = {"fits": None} | compile_apart("pipeline_step", step, PIPELINE.value)
    peak, needed = (gigabytes(row.get(key)) for key in ("peak_bytes", "needed_bytes"))
    kept = step.stash_bytes if way == "stash" else step.worst_case_bytes
    fits = {True: "yes", False: "NO", None: "?"}[row["fits"]]
    lines.append((way, fits, peak, needed, gigabytes(kept), str(row.get("stash_copies", "-"))))
  print(
    f"{MODEL.value}, {size.layers} MoE layers in {RANKS.value} ranks by {PIPELINE.value},"
    f" {MICROBATCHES.value} microbatches, on {TOPOLOGY.value}: {step.stage_layers} layers of the"
    f" largest stage, {step.capacity_rows:,} rows in pages of {step.page_rows}."
  )
  print_lines(lines, words=2)
  needs = {way: row.get("peak_bytes") or row.get("needed_bytes") or 0 for way, row in rows.items()}
  if not rows["stash"]["fits"] or rows["stash"]["stash_copies"]:
    return "FAILED: the stash does not fit, or is copied."
  return 0 if needs["stash"] < needs["save"] else "FAILED: the stash takes no less than saving."


def gigabytes(number):
  return "-" if number is None else f"{number / 1e9:.1f}"


def relative_flops(rows, row):
  """FLOPs of a layer, relative to those of the `save` that replays least; None where not known.

  All layers are alike, and nothing but layers takes FLOPs to speak of, so depths may differ.
  """
  of_layer = lambda row: row["flops"] / row["layers"]
  saves = [of_layer(r) for r in rows if r["way"] == "save" and r["flops"]]
  return of_layer(row) / min(saves) if saves and row["flops"] else None


def table_of(rows):
  """A line for each row."""
  lines = [
    ("weights", "residuals", "way", "layers", "fits", "HBM", "host", "needs")
    + ("FLOPs", "copies of", "trace", "compile"),
    ("", "", "", "", "", *3 * ["GB"], "of save", "the stash", *2 * ["s"]),
  ]
  for row in rows:
    relative = relative_flops(rows, row)
    lines.append(
      (
        row["weights"],
        row["residuals"],
        row["way"],
        str(row["layers"]),
        {True: "yes", False: "NO", None: "?"}[row["fits"]],
        *(gigabytes(row[key]) for key in ("peak_bytes", "host_bytes", "needed_bytes")),
        "-" if relative is None else f"{relative:.3f}",
        "-" if row["stash_copies"] is None else str(row["stash_copies"]),
        *(
          "-" if row[key] is None else f"{row[key]:.1f}"
          for key in ("trace_seconds", "compile_seconds")
        ),
      )
    )
  return lines


def beside_of(rows):
  """A line for each row that fits with host memory."""
  lines = [("residuals", "layers", *("forward", "collectives", "backward", "collectives"))]
  for row in rows:
    if row["beside"]:
      cells = [str(row["layers"])]
      for key in ("forward", "backward"):
        kernels, of, collectives = row["beside"][key]
        cells += f"{kernels} of {of}", str(collectives)
      lines.append((row["residuals"], *cells))
  return lines


def print_lines(lines, words):
  """Prints a table, its first `words` columns left-aligned."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  print()
  for line in lines:
    cells = [f"{cell:{'<' if i < words else '>'}{widths[i]}}" for i, cell in enumerate(line)]
    print("  ".join(cells).rstrip())
  print()


def broken_promises(rows, spare_residuals):
  """Returns how the rows break what the README promises of a stash; nothing if they do not.

  Args:
    rows: as `compile_row` returns them.
    spare_residuals: how often the residuals of one layer, at worst-case size, a stash may take in
      HBM beside its own bytes and all that remat takes; by where the weights are.
  """
  broken = [
    f"{row['way']} {row['residuals']}, {row['layers']} layers: no answer from the compiler"
    for row in rows
    if row["fits"] is None
  ]
  key = lambda row: (row["way"], row["weights"], row["residuals"], row["layers"])
  fitting = {key(row): row for row in rows if row["fits"]}
  for (way, weights, residuals, layers), row in fitting.items():
    name = f"{way} {residuals}, {layers} layers"
    if row["stash_copies"]:
      broken.append(f"{name}: the program copies the stash {row['stash_copies']} times")
    if way not in STASHES:
      continue
    if way == WITH_HOST:
      broken += [f"{name}: {problem}" for problem in broken_at_host(row)]
    remat = fitting.get(("remat", weights, NONE, layers))
    if remat and row["peak_bytes"] is not None:
      extra = row["peak_bytes"] - remat["peak_bytes"]
      if extra > 1.02 * row["stash_bytes"] + spare_residuals[weights] * row["layer_bytes"]:
        broken.append(f"{name}: {extra:,} bytes more than remat for {row['stash_bytes']:,} stashed")
    if save := fitting.get(("save", weights, residuals, layers)):
      if None in (row["flops"], save["flops"]) or row["flops"] > save["flops"]:
        broken.append(f"{name}: {row['flops']} FLOPs, {save['flops']} of save")
      if way != WITH_HOST and row["cpu_seconds"] > 1.25 * save["cpu_seconds"]:
        seconds = f"{row['cpu_seconds']:.1f} s, {save['cpu_seconds']:.1f} s of save"
        broken.append(f"{name}: to trace and compile takes {seconds}")
  return broken


def broken_at_host(row):
  """Returns how a row breaks what is promised of rows in host memory, where it fits."""
  broken = []
  if row["host_bytes"] != row["stash_host_bytes"]:
    sizes = f"{row['host_bytes']:,} bytes of host memory for {row['stash_host_bytes']:,} of rows"
    broken.append(f"{sizes} and a copy behind them")
  if row["stage_copies"] != 0:
    broken.append(f"the program copies staged rows {row['stage_copies']} times")
  return broken
