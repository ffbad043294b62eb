"""The demo's model, trained through pipeline schedules on real text.

Two stages on two devices each, over which the experts of a layer are spread (virtual CPU devices).
The residuals of the experts are kept in three ways:

  worst case: in the ring of what forward passes save, at worst-case size;
  stash: in pages, of which there are enough for every routed row;
  halves: in the same pages, with what late gradients of weights need beside them, where a schedule
    has such passes;
  half: in half as many pages, so that some layers are recomputed.

Prints a table and writes pipeline.json and pipeline.png, a drawing of each schedule with the rows
in flight under it. Fails unless losses of `stash`, and gradients of its first step, equal those of
`worst case` in every bit, and all equal those of the program without a pipeline to rounding.
"""

import json
import pathlib
import sys

from absl import flags
import jax

from bench.pipeline import drawing, stages, training
from bench.pipeline.training import JOB, log, MICROBATCHES, SCHEDULES
from pallas_stash import pipeline

STEPS = flags.DEFINE_integer("steps", 6, "Optimiser steps of each training.", lower_bound=1)
OUTPUT = flags.DEFINE_string("output", "build", "The folder for pipeline.json and the drawing.")


def main(args):
  del args
  steps = STEPS.value
  log(
    f"{JOB.ranks} stages of {JOB.experts} devices, {MICROBATCHES} microbatches, jax"
    f" {jax.__version__}"
  )
  plain = training.train("without a pipeline", stages.in_one_piece(JOB), steps)
  runs = {schedule: training.train_schedule(schedule, steps) for schedule in SCHEDULES}
  header = (
    f"{'schedule':12} {'residuals':10} {'ticks':>5} {'idle':>5} {'MB':>6} {'rows of stash':>13}"
  )
  header += f" {'peak':>6} {'wanted':>6} {'not stored':>10} {'first loss':>10} {'last loss':>9}"
  header += f" {'of plain':>8} {'s a step':>8}"
  log(f"\n{header}")
  results, failures = [], []
  for schedule, (trainings, capacities) in runs.items():
    ticks = len(pipeline.tabulate(schedule).columns["f"])
    for name, t in trainings.items():
      far = training.distance(t.gradients, plain.gradients)
      capacity = capacities[name]
      log(
        f"{schedule.name:12} {name:10} {ticks:5} {pipeline.idle_share(schedule):5.0%}"
        f" {t.temp_bytes / 1e6:6.1f} {'-' if capacity is None else f'{capacity:,}':>13}"
        f" {t.peak_rows:6,} {t.wanted_rows:6,} {t.overflowed:10} {t.losses[0]:10.4f}"
        f" {t.losses[-1]:9.4f} {far:8.0e} {t.seconds:8.2f}"
      )
      measured = {"schedule": schedule.name, "residuals": name, "capacity_rows": capacity}
      measured |= {"losses": t.losses.tolist(), "temp_bytes": t.temp_bytes, "of_plain": far}
      results.append(measured | {"peak_rows": t.peak_rows, "not_stored": t.overflowed})
    failures += training.check(schedule, trainings, plain)
  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  (output / "pipeline.json").write_text(json.dumps(results, indent=2) + "\n")
  rows = {schedule: trainings["stash"].rows for schedule, (trainings, _) in runs.items()}
  drawing.draw(rows, JOB.experts).savefig(output / "pipeline.png", dpi=150)
  log(f"wrote pipeline.json and pipeline.png to {output}")
  if failures:
    sys.exit("\n".join(["The pipeline FAILED:", *failures]))
  log("all checks passed")
