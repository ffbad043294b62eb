"""What the step of a case of `tests.composition` must compute."""

import functools

import jax
import numpy as np
import optax

from tests.helpers.checks import assert_trees_equal
from tests.helpers.composition import EXAMPLES
from tests.helpers.composition_model import EXPERTS, plain
from tests.helpers.composition_step import arguments, OPTIMIZER, run

TILE = 8  # Rows that a push of float32 is rounded up to.


def of_example(blocks, case, example):
  """Returns those of the blocks, the first axis, that are of one example: [microbatches, ...]."""
  microbatches, examples = case.split
  parts = blocks.reshape(microbatches, examples, -1, *blocks.shape[1:])
  return parts[:, example]


def routed_rows(case):
  """Returns the rows, in whole tiles, of each push: [microbatches, examples, layers, devices]."""
  data, experts = case.mesh_shape
  microbatches, examples = case.split
  rows = []
  for example in range(examples):
    model = example if case.vmap == "models" else 0
    chosen = of_example(plain(case.moe_layers, model)[2], case, example)
    chosen = np.moveaxis(chosen, 1, 2)  # [microbatches, layers, blocks, tokens, top_k]
    chosen = chosen.reshape(*chosen.shape[:2], data, -1)
    counts = (chosen[..., None] // (EXPERTS // experts) == np.arange(experts)).sum(-2)
    rows.append(-(-counts // TILE) * TILE)
  return np.stack(rows, 1).reshape(microbatches, examples, len(counts[0]), -1)


def expected_gradients(case):
  """Returns the loss and the gradients; a stack of them where models are mapped over."""
  if case.vmap != "models":
    return jax.tree.map(lambda blocks: blocks.sum(0), plain(case.moe_layers)[:2])
  found = [plain(case.moe_layers, i)[:2] for i in range(EXAMPLES)]
  found = [
    jax.tree.map(lambda blocks, i=i: of_example(blocks, case, i).sum((0, 1)), values)
    for i, values in enumerate(found)
  ]
  values, gradients = zip(*found, strict=True)
  return sum(values), jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)


def expected_stats(rows, capacity):
  """Returns the pushes that overflow, of all devices and passes together, and the peak rows."""
  overflowed = peak = 0
  for pushes in rows.transpose(0, 1, 3, 2).reshape(-1, rows.shape[2]):
    top = 0
    for push in pushes:
      overflowed += top + push > capacity
      top += push if top + push <= capacity else 0
    peak = max(peak, top)
  return overflowed, peak


def check(case):
  """Runs a case and fails unless loss, gradients and statistics are what they must be."""
  rows = routed_rows(case)
  needed = int(rows.sum(2).max())
  capacity = needed if case.capacity == "ample" else needed // 2 // TILE * TILE
  results = jax.device_get(run(case, capacity))
  value, gradients = expected_gradients(case)
  overflowed, peak = expected_stats(rows, capacity)
  assert (overflowed > 0) == (case.capacity == "half")
  if results["loss"] is not None:
    assert results["loss"] == value
  if results["stats"] is not None:
    stats = results["stats"]
    assert (stats.overflowed_pushes.sum(), stats.peak_rows.max()) == (overflowed, peak)
    assert stats.invalid_pushes.sum() == 0
  if case.result != "adam":
    assert_trees_equal(results["gradients"], gradients)
    return
  params = arguments(case, capacity)[0]
  state = OPTIMIZER.init(params)
  updates, state = OPTIMIZER.update(gradients, state, params)
  # The first moment is half of the gradient, and so exact; the update of a parameter is rounded, in
  # a few operations that may be fused in one program and not in the other.
  assert_trees_equal(results["optimizer_state"][0].mu, state[0].mu)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
  jax.tree.map(close, results["params"], optax.apply_updates(params, updates))
