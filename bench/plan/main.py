"""What to keep, and where: every choice for a model on a mesh, and the lines to paste for the best.

For each group of names (results of the experts' matmuls, and their sorted rows), each placement of
`ps.policy_by_name`, and each capacity of a stash as a multiple of the rows of balanced routing:
peak HBM and host memory of a device, FLOPs of matmuls as a multiple of replaying none, and what
keeping moves, as a part of the time of a layer's nine matmuls at peak. Prints those that fit, the
quickest first, then those that do not; writes plan.json and plan.png.

Nothing is compiled: it is arithmetic (`memory.py`, `choices.py`), of the step that `make fit`
compiles and with its rows, checked against what that says. Run it from the repository root:
`python -m bench.plan`.
"""

import dataclasses
import json
import pathlib
import sys

from absl import flags

from bench.fit.model_sizes import ModelSize, PRESETS
from bench.kernels import cases
from bench.plan import plot, setup, table
from bench.plan.choices import choices_of, useful
from bench.tpu import aot

# GB of memory for a device, of machine types with 4 chips, as
# https://cloud.google.com/tpu/docs/tpu7x states it of all but v5e, whose is commonly quoted; a
# tpu7x is two devices.
HOST_GB = {"v5e": 192 / 4, "v5p": 448 / 4, "v6e": 720 / 4, "tpu7x": 960 / 8}

MODEL = flags.DEFINE_enum("model", "deepseek-v3", PRESETS, "Whose published sizes to take.")
CHIP = flags.DEFINE_enum("chip", "v5p", list(cases.BANDWIDTH), "Of which kind.")
DEVICES = flags.DEFINE_integer("devices", 256, "Of the mesh.", 1)
ROUTING_WEIGHTS = flags.DEFINE_enum(
  "routing_weights",
  setup.BEFORE,
  [setup.BEFORE, setup.BEHIND],
  "Whether they are multiplied in before the down projection, and nothing needs mlpwo, or behind.",
)
GROUPS = flags.DEFINE_multi_string(
  "group",
  ["mlpwi_0+mlpwi_1", "mlpwo", "x_sorted"],
  f"Names that are kept alike, of {', '.join(setup.NAMES)}, joined by +. Once for each group.",
)
MARGINS = flags.DEFINE_list(
  "margins", ["1", "1.1", "1.25", "1.5"], "Rows of a stash, as a multiple of balanced routing."
)
BUSIEST = flags.DEFINE_float(
  "busiest", 1.1, "Rows of the busiest device of a layer to the mean, the same experts in all.", 1.0
)
PARAMETER_BYTES = flags.DEFINE_integer("parameter_bytes", 2, "Of a parameter.", 1)
GRADIENT_BYTES = flags.DEFINE_integer("gradient_bytes", 2, "Of a gradient.", 1)
OPTIMIZER_BYTES = flags.DEFINE_integer(
  "optimizer_bytes", 8, "Of what the optimizer has of a parameter: AdamW, two of float32.", 0
)
OTHER_GB = flags.DEFINE_float(
  "other_gb", 0.0, "HBM of a device that all but the MoE layers takes: attention, vocabulary.", 0.0
)
HBM_GB = flags.DEFINE_float("hbm_gb", None, "HBM of a device, instead of the chip's.", 0.0)
HOST_MEMORY_GB = flags.DEFINE_float(
  "host_gb", None, "Host memory for a device, instead of its part of a host's.", 0.0
)
HOST_GB_PER_SECOND = flags.DEFINE_float(
  "host_gb_per_second", None, "To the host in one direction, of a device.", 0.001
)
FORWARD_MS = flags.DEFINE_float(
  "forward_ms",
  None,
  "Of a layer's forward pass, attention and all, behind which transfers hide; not given, that of"
  " its three matmuls at peak, the least that it can be.",
  0.001,
)
ONLY_BEST = flags.DEFINE_bool(
  "only_best", False, "Leave out what another choice beats in memory, host memory and time."
)
OUTPUT = flags.DEFINE_string("output", "build", "The folder to write to.")
SIZES = {
  field.name: flags.DEFINE_integer(field.name, None, f"Instead of the model's {field.name}.", 1)
  for field in dataclasses.fields(ModelSize)
}


def _are_groups(groups):
  names = [name for group in groups for name in group.split("+")]
  return set(names) <= set(setup.NAMES) and len(names) == len(set(names))


def _are_margins(margins):
  try:
    return bool(margins) and all(0 < float(margin) < float("inf") for margin in margins)
  except ValueError:
    return False


flags.register_validator(
  GROUPS, _are_groups, f"must be of {list(setup.NAMES)}, joined by +, and each at most once"
)
flags.register_validator(MARGINS, _are_margins, "must be numbers above zero, joined by commas")


def main(args):
  del args
  try:
    planned = setup_of_flags()
  except ValueError as error:
    sys.exit(f"plan: {error}")
  groups = useful(planned, [group.split("+") for group in GROUPS.value])
  choices = list(choices_of(planned, groups, [float(margin) for margin in MARGINS.value]))
  rows = table.rows_of(planned, choices)
  shown = table.not_beaten(rows) if ONLY_BEST.value else rows
  title = (
    f"{MODEL.value}, {planned.size.layers} MoE layers, {DEVICES.value} devices of {CHIP.value}"
  )
  print(title, "", *table.report(planned, shown, groups), sep="\n")
  if not planned.host_bandwidth:
    print(f"Without offload: give --host_gb_per_second, which is not known of {CHIP.value}.")
  elif any(row.host_bytes for row in shown) and _is_assumed():
    speed = f"{planned.host_bandwidth / 1e9:g} GB/s"
    print(f"Assumed: {speed} to the host, which is not published of {CHIP.value}.")
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  (output / "plan.json").write_text(
    json.dumps(list(map(dataclasses.asdict, rows)), indent=1) + "\n"
  )
  plot.plot(rows, planned.hbm_bytes, title).savefig(output / "plan.png", dpi=150)
  print(f"plan: wrote plan.json and plan.png to {output}", file=sys.stderr)


def _is_assumed():
  return HOST_GB_PER_SECOND.value is None and cases.HOST_LINKS[CHIP.value].is_assumed


def setup_of_flags() -> setup.Setup:
  """Returns what the flags say.

  Raises:
    ValueError: where they do not go together.
  """
  changed = {name: flag.value for name, flag in SIZES.items() if flag.value is not None}
  chip, given = CHIP.value, lambda flag, default: default if flag.value is None else flag.value
  link = cases.HOST_LINKS.get(chip)
  host_bandwidth = given(HOST_GB_PER_SECOND, link.bytes_per_second / 1e9 if link else 0)
  return setup.Setup(
    size=dataclasses.replace(PRESETS[MODEL.value], **changed),
    devices=DEVICES.value,
    routing_weights=ROUTING_WEIGHTS.value,
    parameter_bytes=PARAMETER_BYTES.value,
    gradient_bytes=GRADIENT_BYTES.value,
    optimizer_bytes=OPTIMIZER_BYTES.value,
    other_bytes=round(1e9 * OTHER_GB.value),
    hbm_bytes=round(1e9 * given(HBM_GB, aot.hbm_bytes(chip) / 1e9)),
    host_bytes=round(1e9 * given(HOST_MEMORY_GB, HOST_GB[chip])),
    hbm_bandwidth=cases.BANDWIDTH[chip],
    host_bandwidth=1e9 * host_bandwidth,
    peak_flops=cases.PEAK_FLOPS[chip],
    busiest=BUSIEST.value,
    forward_seconds=None if FORWARD_MS.value is None else FORWARD_MS.value / 1e3,
  )
