"""One MoE layer spread over devices in five ways, each with its residuals saved and in a stash.

    make parity

A small language model is trained for 20 steps on eight virtual CPU devices in each mode of
`reference/modes.py`, from the same parameters on the same batches: once with the residuals of its
expert layers saved by JAX, once in a stash that has room for all rows that the router sends.

Prints one table of losses. Fails unless the losses with the stash are those without it in every
bit, in each mode; the losses of the modes are the same to rounding; the router sends as many rows
to each expert in the first step; every residual was stashed; and losses fall.
"""

import functools
import sys
import time
from typing import NamedTuple

from absl import flags
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from bench.parity import losses
from reference import model
from reference.modes import MODES

STEPS = flags.DEFINE_integer("steps", 20, "Optimiser steps of each training.", lower_bound=2)

CONFIG = model.Config(
  vocab=64,
  width=32,
  hidden=48,
  num_experts=16,
  top_k=3,  # More than the two experts of a device: a worst-case buffer is less than all choices.
  layers=3,
  num_heads=2,
  fsdp_axis="fsdp",
)
BATCH, SEQ = 8, 32  # Of all devices together.

# Relative, of a loss. Modes add the same terms in other orders, which changes the last bit of a
# float32, 1.2e-7 of it; twenty steps, each from the parameters of the last, may change four bits.
ROUNDING = 2e-6

# Plain gradient descent: Adam would divide a gradient that is all rounding by its own size.
optimizer = optax.sgd(0.3, momentum=0.9)


class Training(NamedTuple):
  """What a training measured.

  Attributes:
    losses: float32[steps].
    sizes: int[steps, layers, experts], the rows that the router sent to each expert.
    peak_rows: int[steps, devices], the rows that were in the stash at once; None without one.
    lost_pushes: int[steps, devices], those that were not stored; None without a stash.
  """

  losses: np.ndarray
  sizes: np.ndarray
  peak_rows: np.ndarray | None
  lost_pushes: np.ndarray | None


def batches(steps):
  """Yields int32[BATCH, SEQ + 1] for each step: sequences that count, by one to four, in a ring."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    start, stride = rng.integers(CONFIG.vocab, size=(BATCH, 1)), rng.integers(1, 5, (BATCH, 1))
    yield ((start + stride * np.arange(SEQ + 1)) % CONFIG.vocab).astype(np.int32)


@functools.cache
def initial_params():
  return jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(0))


@jax.jit
def update(params, optimizer_state, gradient):
  """The optimiser step, apart from the gradient: the same program with the stash and without."""
  updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
  return optax.apply_updates(params, updates), optimizer_state


def train(mode, capacity_rows, steps):
  """Trains in a mode, without a stash where `capacity_rows` is None."""
  mesh = losses.mesh_of(mode)
  specs = model.param_specs(CONFIG)
  is_spec = lambda spec: isinstance(spec, P)
  shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=is_spec)
  params = jax.device_put(initial_params(), shardings)
  optimizer_state = jax.jit(optimizer.init)(params)
  loss = losses.loss_of(mode, CONFIG, capacity_rows)
  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, shardings))
  history = []
  for tokens in batches(steps):
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(losses.AXES)))
    (value, (stats, sizes)), d_params = gradient(params, tokens)
    params, optimizer_state = update(params, optimizer_state, d_params)
    history.append(jax.device_get((value, stats, sizes)))
  values, stats, sizes = zip(*history, strict=True)
  of_stash = None, None
  if capacity_rows is not None:
    lost = [s.overflowed_pushes + s.invalid_pushes for s in stats]
    of_stash = np.array([s.peak_rows for s in stats]), np.array(lost)
  return Training(np.array(values), np.array(sizes), *of_stash)


def check(saved, stashed):
  """Returns what is wrong with the trainings, each `{mode: Training}`: nothing if all is well."""
  failures = []
  first, *others = saved
  for mode, training in stashed.items():
    if wrong := different_steps(saved[mode], training):
      failures.append(f"{mode}: the losses of steps {wrong} with the stash are not those without")
    rows = training.peak_rows.sum(1).min()  # Of all devices.
    if training.lost_pushes.any() or rows < CONFIG.layers * BATCH * SEQ * CONFIG.top_k:
      failures.append(f"{mode}: {training.lost_pushes.sum()} pushes lost, {rows} rows stored")
    if not training.losses[-1] < training.losses[0]:
      failures.append(f"{mode}: the loss does not fall")
  for mode in others:
    error = distance(saved[first], saved[mode])
    if not error <= ROUNDING:  # NaN fails.
      failures.append(f"{mode}: a loss differs by {error:.1e} of {first}'s, more than {ROUNDING}")
    if not np.array_equal(saved[mode].sizes[0], saved[first].sizes[0]):
      failures.append(f"{mode}: other rows than {first}'s are sent to the experts in step 1")
  return failures


def different_steps(one, other):
  """Returns the steps whose losses differ in any bit."""
  bits = [training.losses.view(np.uint32) for training in (one, other)]
  return [int(step) + 1 for step in np.flatnonzero(bits[0] != bits[1])]


def distance(one, other):
  """Returns the largest difference of the losses of a step, relative."""
  return np.max(np.abs(other.losses / one.losses - 1))


def table_of(saved, stashed):
  """Returns the lines of the table."""
  modes = list(saved)
  lines = [["step", *modes, "with the stash", "modes apart"]]
  for step in range(len(saved[modes[0]].losses)):
    found = [saved[mode].losses[step] for mode in modes]
    wrong = [mode for mode in modes if step + 1 in different_steps(saved[mode], stashed[mode])]
    mark = f"NOT identical: {', '.join(wrong)}" if wrong else "identical"
    apart = f"{(max(found) - min(found)) / min(found):.1e}"
    lines.append([str(step + 1), *(f"{loss:.7f}" for loss in found), mark, apart])
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  cells = (map(str.rjust, line, widths) for line in lines)
  return ["  ".join(line) for line in cells]


def main(args):
  del args
  start = time.monotonic()
  print(f"{losses.DEVICES} {jax.devices()[0].device_kind} devices, jax {jax.__version__}")
  saved, stashed = {}, {}
  for mode in MODES:
    capacity = losses.sufficient_rows(mode, CONFIG, BATCH * SEQ // losses.DEVICES)
    saved[mode] = train(mode, None, STEPS.value)
    stashed[mode] = train(mode, capacity, STEPS.value)
    rows = f"{stashed[mode].peak_rows.max():,} of {capacity:,} worst-case rows in the stash"
    print(f"[{time.monotonic() - start:5.1f} s] {mode}: {rows} of the fullest device", flush=True)
  print("", *table_of(saved, stashed), "", sep="\n")
  if failures := check(saved, stashed):
    sys.exit("\n".join(["parity FAILED:", *failures]))
  print("all checks passed")
