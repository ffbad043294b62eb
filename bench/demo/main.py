"""The main job: a ring-of-experts language model learns real text, with and without a stash.

A byte-level model of a few decoder layers, its experts spread over four devices (virtual CPU
devices, unless the host has TPUs), is trained on the English text that every CPython ships. It is
trained three times from the same seed. The residuals of its expert layers are

  saved: kept by JAX at worst-case size;
  stash: kept in a stash that has room for every routed row;
  half: kept in a stash that has room for half of them, so that some layers are recomputed.

The routing weights are multiplied in before the down projection, so that the backward pass repeats
no matmul with the results of the gate and up projections alone.

Prints a table and writes demo.json, demo.png, a plot of the routed rows, and demo_memory.png, one
of the memory of a step over time. Fails unless the losses of `stash` equal those of `saved` in
every bit, those of `half` equal them to rounding, and they all fall. Run it from the repository
root: `python -m bench.demo`.
"""

import functools
import json
import math
import pathlib
import sys

from absl import flags
import jax

from bench.demo import checks, plot, report, ring
from bench.demo.report import log
from bench.demo.training import train
import pallas_stash as ps

STEPS = flags.DEFINE_integer("steps", 24, "Optimiser steps of each training.", lower_bound=2)
OUTPUT = flags.DEFINE_string("output", "build", "The folder for demo.json and the plots.")

HEADROOM = 1.1  # what the stash has room for, as a multiple of the rows really needed
# To compile and check, and a step of all three trainings: 70 and 9 seconds of CPU time, measured,
# of which the steps use both of two cores.
SECONDS, SECONDS_A_STEP = 70, 6


def main(args):
  del args
  steps, layers = STEPS.value, ring.CONFIG.layers
  log(f"{ring.DEVICES} devices, {jax.devices()[0].device_kind}, jax {jax.__version__}")
  minutes = (SECONDS + SECONDS_A_STEP * steps) / 60
  log(f"{steps} steps of three trainings take about {minutes:.0f} minutes on two idle cores")
  saved = train("saved", ring.saving_loss, steps)
  # Every push starts on a tile boundary, so each layer is rounded up before they are added.
  rows_needed = int((-(-saved.rows // 8) * 8).sum(1).max())
  margin = math.ceil(10 * HEADROOM * rows_needed / (layers * ring.EXPECTED_ROWS)) / 10
  capacity = ps.sizing.capacity_rows(*ring.ROUTING, layers=layers, margin=margin)
  log(f"the fullest device needs {rows_needed:,} rows; a margin of {margin} is {capacity:,} rows")
  stash = train("stash", functools.partial(ring.stashing_loss, capacity), steps)
  half = train("half", functools.partial(ring.stashing_loss, rows_needed // 2), steps)
  trainings = {"saved": saved, "stash": stash, "half": half}
  log("copying the routed rows with the TPU kernels")
  copy_failures = checks.check_copies(saved.params)

  write(trainings, {"stash": capacity, "half": rows_needed // 2})
  report.print_table(trainings, layers * ring.WORST_CASE_ROWS)
  for name in "stash", "half":
    distance = checks.distance(trainings[name], saved)
    log(f"{name}: the trained parameters differ from saved's by {distance:g}")
  failures = checks.check_losses(saved, stash, half) + copy_failures
  failures += checks.check_memory(saved, stash, rows_needed)
  if failures:
    sys.exit("\n".join(["The demo FAILED:", *failures]))
  log("all checks passed")


def write(trainings, capacities):
  """Writes the figures and the plots."""
  saved, stash, half = (trainings[name] for name in ("saved", "stash", "half"))
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  rows = plot.plot_rows(saved.rows, ring.WORST_CASE_ROWS, ring.EXPECTED_ROWS, capacities)
  rows.savefig(output / "demo.png", dpi=150)
  written = ["demo.json", "demo.png"]
  live_bytes = {name: trainings[name].live_bytes for name in ("saved", "stash")}
  if all(live_bytes.values()):
    plot.plot_memory(live_bytes).savefig(output / "demo_memory.png", dpi=150)
    written.append("demo_memory.png")
  results = {
    "steps": STEPS.value,
    "loss_saved": saved.losses.tolist(),
    "loss_stash": stash.losses.tolist(),
    "loss_stash_half": half.losses.tolist(),
    "temp_bytes_saved": saved.temp_bytes,
    "temp_bytes_stash": stash.temp_bytes,
    "rows_peak": int(stash.peak_rows.max()),
    "rows_worst_case": ring.CONFIG.layers * ring.WORST_CASE_ROWS,
    "overflowed_pushes_half": int(half.overflowed.sum()),
  }
  (output / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
  log(f"wrote {', '.join(written)} to {output}")
