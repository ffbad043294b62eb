"""Trains the model of the demo through schedules, on its text."""

import dataclasses
import time

import jax
import numpy as np

from bench.demo.ring import CONFIG
from bench.demo.training import excerpts, initial_params, optimizer, update
from bench.pipeline import stages
import pallas_stash as ps
from pallas_stash import pipeline

RANKS, MICROBATCHES, PAGE_ROWS = 2, 8, 32
JOB = stages.Job(CONFIG, ranks=RANKS, experts=2, microbatches=MICROBATCHES, batch=2, seq=128)
SCHEDULES = (
  pipeline.one_f_one_b(RANKS, MICROBATCHES),
  pipeline.interleaved(RANKS, 2, MICROBATCHES),
  pipeline.dual_pipe_v(RANKS, MICROBATCHES),
)
MARGIN = 1.5  # Of the rows of perfect balance: what is wanted is found with it, and then half.
ROUNDING = 1e-4  # Of what XLA compiles in another way, and Adam makes larger from step to step.


@dataclasses.dataclass(frozen=True)
class Training:
  """What one training measured.

  Attributes:
    losses: float32[steps].
    gradients: of the first step.
    temp_bytes: of the compiled step, on each device.
    peak_rows, wanted_rows, overflowed: the most of any device and step: rows in the stash, rows
      that would have been, and pushes that did not fit.
    rows: int32[ticks, devices], of the last step, the rows in flight behind each tick.
    seconds: of the quickest step.
  """

  losses: np.ndarray
  gradients: dict
  temp_bytes: int
  peak_rows: int = 0
  wanted_rows: int = 0
  overflowed: int = 0
  rows: np.ndarray | None = None
  seconds: float = 0.0


def train(name, step, steps):
  """Trains with `step`: `(params, tokens) -> (loss, gradients, *observed)`."""
  params = initial_params()
  optimizer_state = optimizer.init(params)
  batches = list(excerpts(steps, (JOB.microbatches, JOB.batch), JOB.seq + 1))
  compiled = jax.jit(step).lower(params, batches[0]).compile()
  history, first, seconds = [], None, []
  for tokens in batches:
    start = time.perf_counter()
    loss, gradients, *observed = jax.device_get(compiled(params, tokens))
    seconds.append(time.perf_counter() - start)
    first = gradients if first is None else first
    params, optimizer_state = jax.device_get(update(params, optimizer_state, gradients))
    history.append((loss, *observed))
  losses, *observed = zip(*history, strict=True)
  temp_bytes = compiled.memory_analysis().temp_size_in_bytes
  training = Training(np.array(losses), first, temp_bytes, seconds=min(seconds))
  if observed:
    stats, rows = observed
    most = lambda field: int(max(getattr(of_step, field).max() for of_step in stats))
    training = dataclasses.replace(
      training,
      peak_rows=most("peak_rows"),
      wanted_rows=most("sufficient_rows"),
      overflowed=most("overflowed_pushes"),
      rows=rows[-1],
    )
  log(f"{name}: {temp_bytes / 1e6:.1f} MB, losses {losses[0]:.4f} to {losses[-1]:.4f}")
  return training


def train_schedule(schedule, steps):
  """Returns the trainings of a schedule by name, and the rows of each stash."""
  layers = CONFIG.layers // len(schedule.placement)
  expected = ps.sizing.expected_rows(*JOB.routing)
  ample = pipeline.capacity_rows(
    schedule, None, expected, pushes=layers, margin=MARGIN, page_rows=PAGE_ROWS
  )
  capacities, trainings = {"worst case": None, "stash": ample, "halves": ample}, {}
  has_halves = any(one.kind == "W" for steps in schedule.programs for step in steps for one in step)
  for name in "worst case", "stash", *["halves"] * has_halves, "half":
    if name == "half":
      pages = trainings["stash"].peak_rows // PAGE_ROWS
      capacities[name] = max(1, pages // 2) * PAGE_ROWS
    late = ("experts",) if name == "halves" else ()
    way = stages.Way(capacities[name], PAGE_ROWS, late)
    step = stages.pipelined(JOB, schedule, way)
    trainings[name] = train(f"{schedule.name}, {name}", step, steps)
  return trainings, capacities


def check(schedule, trainings, plain):
  """Returns what is wrong."""
  failures = []
  worst, stash, half = (trainings[name] for name in ("worst case", "stash", "half"))
  if "halves" in trainings and trainings["halves"].overflowed:
    failures.append(f"pushes overflowed: {trainings['halves'].overflowed} of passes in two halves")
  if stash.overflowed or not half.overflowed:
    failures.append(
      f"pushes overflowed: {stash.overflowed} with enough, {half.overflowed} with half"
    )
  if not np.array_equal(stash.losses, worst.losses):
    failures.append(f"losses {stash.losses} differ from {worst.losses}")
  if not distance(stash.gradients, worst.gradients) == 0:
    failures.append("gradients differ from those of the worst case")
  for name, training in trainings.items():
    if not np.allclose(training.losses, plain.losses, rtol=ROUNDING):
      failures.append(f"losses of {name}, {training.losses}, are not {plain.losses}")
    if not distance(training.gradients, plain.gradients) < ROUNDING:
      failures.append(f"gradients of {name} are not those without a pipeline")
  if not stash.temp_bytes < worst.temp_bytes:
    failures.append(f"the stash takes {stash.temp_bytes} bytes, the worst case {worst.temp_bytes}")
  return [f"{schedule.name}: {failure}" for failure in failures]


def distance(tree, other):
  """Returns the largest difference of two trees, as a part of the largest value of its leaf."""
  of_leaf = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
  return max(jax.tree.leaves(jax.tree.map(of_leaf, tree, other)))


def log(line):
  print(line, flush=True)
