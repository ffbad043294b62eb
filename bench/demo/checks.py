"""What must be so after the trainings of the demo: a list of what is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.demo.ring import CONFIG, DEVICES, expert_ffn, ring_loss, WORST_CASE_ROWS
from bench.demo.training import batches, Training
import pallas_stash as ps
from reference import ragged_rows

ROUNDING = 1e-5  # relative: XLA may fuse what is recomputed differently, and losses are float32


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


def check_memory(saved: Training, stash: Training, rows_needed: int) -> list[str]:
  """Returns what is wrong with the rows in the stash and with the memory that it takes."""
  failures = []
  if stash.overflowed.any():
    failures.append(f"stash: {stash.overflowed.sum()} pushes overflowed")
  if stash.peak_rows.max() != rows_needed:
    failures.append(f"stash: it held {stash.peak_rows.max()} rows, not {rows_needed}")
  if DEVICES > 1 and stash.temp_bytes >= saved.temp_bytes:
    failures.append("stash: it takes as much memory as saving the residuals")
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

  def ffn(rows, group_sizes, tokens, row_choices, *args):
    del rows
    return expert_ffn(tokens, row_choices, *args), tokens[row_choices // CONFIG.top_k]

  rows = jnp.zeros((DEVICES * WORST_CASE_ROWS, CONFIG.width))
  run = functools.partial(ring_loss, summarize=lambda rows: rows, ffn=ffn)
  _, (rows, sizes) = jax.device_get(jax.jit(run)(params, next(batches(1)), rows))
  # The last layer, on the device that received most rows; earlier layers are in front of it.
  sizes = np.reshape(sizes, (CONFIG.layers, DEVICES, -1))
  device = sizes[-1].sum(-1).argmax()
  rows, group_sizes = np.split(rows, DEVICES)[device], sizes[-1, device]
  start = int(sizes[:-1, device].sum())
  bits = np.random.default_rng(0).integers(2**32, size=(start + len(rows), CONFIG.width))
  stash = bits.astype(np.uint32).view(np.float32)

  options = dict(
    group_sizes=jnp.asarray(group_sizes),
    implementation="mosaic" if jax.default_backend() == "tpu" else "mosaic_interpret",
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
