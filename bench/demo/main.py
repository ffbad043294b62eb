"""The main job: a ring-of-experts language model learns real text, with and without a stash.

A byte-level model of a few decoder layers, its experts spread over four devices (virtual CPU
devices, unless the host has TPUs), is trained on the English text that every CPython ships. It is
trained three times from the same seed. The residuals of its expert layers are

  saved: kept by JAX at worst-case size;
  stash: kept in a stash that has room for every routed row;
  half: kept in a stash that has room for half of them, so that some layers are recomputed.

Prints a table and writes demo.json and demo.png, a plot of the routed rows. Fails unless the losses
of `stash` equal those of `saved` in every bit, those of `half` equal them to rounding, and they all
fall. Run it from the repository root: `python -m bench.demo`.
"""
# ruff: noqa: E402  The environment must be set before jax is imported.

import glob
import os

ON_TPU = bool(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"))
if not ON_TPU:
  xla_flags = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" not in xla_flags:
    xla_flags += " --xla_force_host_platform_device_count=4"
  os.environ.update(XLA_FLAGS=xla_flags.strip(), JAX_PLATFORMS="cpu")

from collections.abc import Callable
import dataclasses
import functools
import json
import math
import pathlib
from pydoc_data import topics
import sys
import time

from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from bench.demo import plot
import pallas_stash as ps
from reference import model, moe, ragged_rows

STEPS = flags.DEFINE_integer("steps", 24, "Optimiser steps of each training.", lower_bound=2)
OUTPUT = flags.DEFINE_string("output", "build", "The folder for demo.json and demo.png.")

CONFIG = model.Config(
  vocab=256, width=128, hidden=256, num_experts=8, top_k=2, layers=8, num_heads=2
)
BATCH, SEQ = 8, 128  # of all devices together
NAMES = ("mlpwi_0", "mlpwi_1", "mlpwo")  # the residuals: what the grouped matmuls return
HEADROOM = 1.1  # what the stash has room for, as a multiple of the rows really needed
ROUNDING = 1e-5  # relative: XLA may fuse what is recomputed differently, and losses are float32

DEVICES = max(n for n in (1, 2, 4) if n <= jax.device_count())
MESH = Mesh(np.array(jax.devices()[:DEVICES]), (CONFIG.expert_axis,))
BY_DEVICE = P(CONFIG.expert_axis)
ROUTING = (BATCH // DEVICES, SEQ, CONFIG.top_k, DEVICES, CONFIG.num_experts)
WORST_CASE_ROWS = ps.sizing.worst_case_rows(*ROUTING)  # of one layer on one device, like the next
EXPECTED_ROWS = ps.sizing.expected_rows(*ROUTING)

START = time.monotonic()
optimizer = optax.adam(3e-3)
save_only = jax.checkpoint_policies.save_only_these_names
expert_ffn = functools.partial(moe.expert_ffn, grouped_matmul=CONFIG.grouped_matmul)
stashed_ffn = ps.checkpoint(expert_ffn, policy=save_only(*NAMES))


@dataclasses.dataclass(frozen=True)
class Training:
  """What one training measured.

  Attributes:
    losses: float32[steps].
    rows: int[steps, layers, devices], the rows that were routed to each device.
    peak_rows: int[steps, devices], the rows that were in the stash at once.
    overflowed: int[steps, devices], the pushes that did not fit.
    temp_bytes: of the compiled gradient, on each device.
    params: after the last step, in host memory.
  """

  losses: np.ndarray
  rows: np.ndarray
  peak_rows: np.ndarray
  overflowed: np.ndarray
  temp_bytes: int
  params: dict


def main(args):
  del args
  log(f"{DEVICES} devices, {jax.devices()[0].device_kind}, jax {jax.__version__}")
  saved = train("saved", saving_loss)
  # Every push starts on a tile boundary, so each layer is rounded up before they are added.
  rows_needed = int((-(-saved.rows // 8) * 8).sum(1).max())
  margin = math.ceil(10 * HEADROOM * rows_needed / (CONFIG.layers * EXPECTED_ROWS)) / 10
  capacity = ps.sizing.capacity_rows(*ROUTING, layers=CONFIG.layers, margin=margin)
  log(f"the fullest device needs {rows_needed:,} rows; a margin of {margin} is {capacity:,} rows")
  stash = train("stash", functools.partial(stashing_loss, capacity))
  half = train("half", functools.partial(stashing_loss, rows_needed // 2))
  capacities = {"stash": capacity, "half": rows_needed // 2}
  log("copying the routed rows with the TPU kernels")
  copy_failures = check_copies(saved.params)

  output = pathlib.Path(OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  plot.plot(saved.rows, WORST_CASE_ROWS, EXPECTED_ROWS, capacities).savefig(
    output / "demo.png", dpi=150
  )
  results = {
    "steps": STEPS.value,
    "loss_saved": saved.losses.tolist(),
    "loss_stash": stash.losses.tolist(),
    "loss_stash_half": half.losses.tolist(),
    "temp_bytes_saved": saved.temp_bytes,
    "temp_bytes_stash": stash.temp_bytes,
    "rows_peak": int(stash.peak_rows.max()),
    "rows_worst_case": CONFIG.layers * WORST_CASE_ROWS,
    "overflowed_pushes_half": int(half.overflowed.sum()),
  }
  (output / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
  log(f"wrote {output / 'demo.json'} and {output / 'demo.png'}")
  print_table(saved, stash, half)
  for name, training in {"stash": stash, "half": half}.items():
    log(f"{name}: the trained parameters differ from saved's by {distance(training, saved):g}")
  failures = [*check_losses(saved, stash, half), *copy_failures]
  if stash.overflowed.any():
    failures.append(f"stash: {stash.overflowed.sum()} pushes overflowed")
  if stash.peak_rows.max() != rows_needed:
    failures.append(f"stash: it held {stash.peak_rows.max()} rows, not {rows_needed}")
  if DEVICES > 1 and stash.temp_bytes >= saved.temp_bytes:
    failures.append("stash: it takes as much memory as saving the residuals")
  if failures:
    sys.exit("\n".join(["The demo FAILED:", *failures]))
  log("all checks passed")


def log(message):
  print(f"[{time.monotonic() - START:5.1f} s] {message}", flush=True)


def batches():
  """Yields int32[BATCH, SEQ + 1] for each step: random places in the text, the same every time."""
  text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
  rng = np.random.default_rng(0)
  for _ in range(STEPS.value):
    starts = rng.integers(0, len(text) - SEQ, BATCH)
    tokens = text[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
    yield jax.device_put(tokens, NamedSharding(MESH, BY_DEVICE))


@functools.cache
def initial_params():
  return jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(0))


def ring_loss(params, tokens, state, summarize, **options):
  """The loss of all devices, the whole model inside one `shard_map`.

  Args:
    params: as `model.init` makes them.
    tokens: int32[BATCH, SEQ + 1].
    state: a pytree whose leaves have one block for each device.
    summarize: what to return of the state after the last layer.
    **options: keyword arguments of `model.loss`.

  Returns:
    A float32 scalar, and (what `summarize` returned, group sizes int32[layers, experts]).
  """

  def device_loss(params, tokens, state):
    loss, (state, sizes) = model.loss(params, tokens, config=CONFIG, state=state, **options)
    return lax.pmean(loss, CONFIG.expert_axis), (summarize(state), sizes)

  return jax.shard_map(
    device_loss,
    mesh=MESH,
    in_specs=(model.param_specs(CONFIG), BY_DEVICE, BY_DEVICE),
    out_specs=(P(), (BY_DEVICE, P(None, CONFIG.expert_axis))),
  )(params, tokens, state)


def saving_loss(params, tokens):
  """The loss of a model whose residuals JAX keeps: a row for every row of the worst case."""

  def ffn(state, group_sizes, *args):
    del group_sizes
    return jax.checkpoint(expert_ffn, policy=save_only(*NAMES))(*args), state

  return ring_loss(params, tokens, None, lambda state: state, ffn=ffn, policy=save_only(*NAMES))


def stashing_loss(capacity_rows, params, tokens):
  """The loss of the same model with a stash of `capacity_rows` on each device."""

  def ffn(stash, group_sizes, *args):
    return stashed_ffn(stash, ps.RaggedRows(group_sizes, WORST_CASE_ROWS), *args)

  array = jax.ShapeDtypeStruct
  local_experts = CONFIG.num_experts // DEVICES
  group_sizes = array((local_experts,), jnp.int32)
  residuals = stashed_ffn.residuals(
    ps.RaggedRows(group_sizes, WORST_CASE_ROWS),
    array((BATCH * SEQ, CONFIG.width), CONFIG.dtype),
    array((WORST_CASE_ROWS,), jnp.int32),
    array((BATCH * SEQ, CONFIG.top_k), jnp.int32),
    array((BATCH * SEQ, CONFIG.top_k), jnp.float32),
    group_sizes,
    jax.tree.map(
      lambda stacked: array((local_experts, *stacked.shape[2:]), stacked.dtype),
      params["layers"]["moe"]["experts"],
    ),
  )
  stash = ps.Stash.empty(capacity_rows, residuals, num_shards=DEVICES)
  options = dict(ffn=ffn, policy=save_only(ps.SLOT_NAME), finish=ps.seal)
  return ring_loss(params, tokens, stash, ps.Stash.stats, **options)


def train(name: str, loss: Callable) -> Training:
  """Trains with `loss`: `(params, tokens) -> (scalar, (StashStats or None, group sizes))`."""
  specs = model.param_specs(CONFIG)
  shardings = jax.tree.map(
    functools.partial(NamedSharding, MESH), specs, is_leaf=lambda spec: isinstance(spec, P)
  )
  params = jax.device_put(initial_params(), shardings)
  optimizer_state = jax.jit(optimizer.init)(params)
  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, shardings))
  log(f"{name}: compiling")
  gradient = gradient.lower(params, next(batches())).compile()
  temp_bytes = gradient.memory_analysis().temp_size_in_bytes
  log(f"{name}: compiled, {temp_bytes:,} temp bytes on each device")

  history = []
  for step, tokens in enumerate(batches(), 1):
    (value, aux), d_params = gradient(params, tokens)
    params, optimizer_state = update(params, optimizer_state, d_params)
    history.append(jax.device_get((value, *aux)))
    if step % 4 == 0 or step in (1, STEPS.value):
      log(f"{name}: step {step:2}, loss {value:.4f}")
  losses, stats, sizes = zip(*history, strict=True)
  nothing = np.zeros((STEPS.value, DEVICES), int)
  return Training(
    losses=np.array(losses),
    rows=np.reshape(sizes, (STEPS.value, CONFIG.layers, DEVICES, -1)).sum(-1),
    peak_rows=np.array([s.peak_rows for s in stats]) if stats[0] else nothing,
    overflowed=np.array([s.overflowed_pushes for s in stats]) if stats[0] else nothing,
    temp_bytes=temp_bytes,
    params=jax.device_get(params),
  )


@jax.jit
def update(params, optimizer_state, gradient):
  """The optimiser step, apart from the gradient: one and the same program for every training."""
  updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
  return optax.apply_updates(params, updates), optimizer_state


def check_losses(saved: Training, stash: Training, half: Training) -> list[str]:
  """Returns what is wrong with the losses, nothing if all is well."""
  failures = []
  bits = [training.losses.view(np.uint32) for training in (saved, stash)]
  if not np.array_equal(*bits):
    step = np.flatnonzero(bits[0] != bits[1])[0]
    actual, expected = stash.losses[step], saved.losses[step]
    failures.append(f"stash: the loss of step {step + 1} is {actual:.9g}, not {expected:.9g}")
  error = np.max(np.abs(half.losses / saved.losses - 1))
  if not error <= ROUNDING:  # NaN fails
    failures.append(f"half: a loss differs by {error:.1e} relative, more than {ROUNDING:.0e}")
  if not half.overflowed.any():
    failures.append("half: nothing overflowed")
  for name, training in {"saved": saved, "stash": stash, "half": half}.items():
    if not training.losses[-1] < training.losses[0]:
      failures.append(f"{name}: the loss does not fall")
  return failures


def distance(one: Training, other: Training) -> float:
  """Returns the largest difference of any parameter after the last step."""
  differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), one.params, other.params)
  return max(jax.tree.leaves(differences))


def check_copies(params) -> list[str]:
  """Copies the rows that one device's experts read with the TPU kernels, there and back.

  Returns:
    How compact and expand differ from the reference, nothing if they do not.
  """

  def ffn(rows, group_sizes, tokens, row_tokens, *args):
    del rows
    return expert_ffn(tokens, row_tokens, *args), tokens[row_tokens]

  rows = jnp.zeros((DEVICES * WORST_CASE_ROWS, CONFIG.width))
  run = functools.partial(ring_loss, summarize=lambda rows: rows, ffn=ffn)
  _, (rows, sizes) = jax.device_get(jax.jit(run)(params, next(batches()), rows))
  # The last layer, on the device that received most rows; earlier layers are in front of it.
  sizes = np.reshape(sizes, (CONFIG.layers, DEVICES, -1))
  device = sizes[-1].sum(-1).argmax()
  rows, group_sizes = np.split(rows, DEVICES)[device], sizes[-1, device]
  start = int(sizes[:-1, device].sum())
  bits = np.random.default_rng(0).integers(2**32, size=(start + len(rows), CONFIG.width))
  stash = bits.astype(np.uint32).view(np.float32)

  options = dict(
    group_sizes=jnp.asarray(group_sizes),
    implementation="mosaic" if ON_TPU else "mosaic_interpret",
  )
  compacted = ps.dynamic_update_slice(stash, rows, (start, 0), **options)
  expected = ragged_rows.compact(rows, stash, start, group_sizes)
  expanded = ps.dynamic_slice(expected, (start, 0), rows.shape, **options)
  pairs = {
    "compact": (compacted, expected),
    "expand": (expanded, ragged_rows.expand(expected, start, len(rows), group_sizes)),
  }
  return [
    f"{name} of groups {group_sizes} at stash row {start} differs from the reference"
    for name, pair in pairs.items()
    if not np.array_equal(*(np.asarray(array).view(np.uint32) for array in pair))
  ]


def print_table(saved: Training, stash: Training, half: Training):
  """Prints a line for each training."""
  worst_case = CONFIG.layers * WORST_CASE_ROWS
  pushes = STEPS.value * CONFIG.layers * DEVICES
  table = [
    ("", "loss,", "loss,", "compiled", "rows kept of worst case,", "overflowed"),
    ("residuals", "step 1", f"step {STEPS.value}", "temp bytes", "peak", "pushes"),
  ]
  for name, training in {"saved": saved, "stash": stash, "half": half}.items():
    rows = worst_case if training is saved else training.peak_rows.max()
    table.append(
      (
        name,
        f"{training.losses[0]:.6f}",
        f"{training.losses[-1]:.6f}",
        f"{training.temp_bytes:,}",
        f"{rows:,} of {worst_case:,}, {rows / worst_case:.1%}",
        "-" if training is saved else f"{training.overflowed.sum()} of {pushes}",
      )
    )
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  print()
  for first, *cells in table:
    cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
    print("   ".join([first.ljust(widths[0]), *cells]))
  print()
