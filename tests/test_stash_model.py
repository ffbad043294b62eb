"""The stash against a plain Python model of it, under long random sequences of operations.

The model is a list of the slots in use, each with the values that it holds. Memory that holds no
stored row is NaN before every operation, and every stored row is compared bit for bit.
"""

import functools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  initialize,
  precondition,
  rule,
  RuleBasedStateMachine,
  run_state_machine_as_test,
)
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.support import as_rows, assert_same_bits, IMPLEMENTATIONS, layouts

TOTAL_ROWS = 96
CAPACITIES = (0, 8, 104, 256)
XLA, MOSAIC = IMPLEMENTATIONS
SPECS = (
  jax.ShapeDtypeStruct((128,), jnp.bfloat16),
  jax.ShapeDtypeStruct((3, 5), jnp.float32),
)


def ragged_of(layout):
  return ps.RaggedRows(*map(as_rows, layout[:1]), TOTAL_ROWS, as_rows(layout[1]))


def without_padding(value, sizes, starts):
  expected = np.zeros_like(value)
  starts = np.cumsum(sizes) - sizes if starts is None else starts
  for start, size in zip(starts, sizes, strict=True):
    expected[start : start + size] = value[start : start + size]
  return expected


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
def push(stash, values, ragged, implementation):
  return stash.push(values, ragged, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def restore(stash, slot, ragged, implementation):
  return stash.restore(slot, ragged, implementation=implementation)


@functools.partial(jax.jit, donate_argnums=0)
def pop(stash, slot):
  return stash.pop(slot)


class StashMachine(RuleBasedStateMachine):
  """Every rule does the same to a stash and to the model."""

  implementation: str
  compares_all = True  # After each operation. Else the last slot, one other, and all in the end.
  compared = 0  # Stored pushes that have rows, of all sequences together.

  @initialize(capacity=st.sampled_from(CAPACITIES))
  def start(self, capacity):
    self.capacity, self.seed = capacity, 0
    self.stash = ps.Stash.empty(capacity, SPECS)
    self.forget()

  def forget(self):
    """Of the model: nothing is stored."""
    self.slots = []  # of each push: its slot, layout, values, and the rows that it takes
    self.top = self.peak = self.wanted = self.sufficient = self.overflowed = self.invalid = 0

  def poison(self):
    """Writes NaN wherever no row is stored."""
    free = np.ones(self.stash.rows_per_shard, bool)
    top = 0
    for _, (sizes, _), _, taken in self.slots:
      free[top : top + (sum(sizes) if taken else 0)] = False
      top += taken
    poisoned = lambda buffer: jnp.where(free[:, None], jnp.nan, buffer).astype(buffer.dtype)
    self.stash.buffers = tuple(map(poisoned, self.stash.buffers))

  @rule(layout=layouts(TOTAL_ROWS))
  def push(self, layout):
    self.poison()
    self.seed += 1
    rng = np.random.default_rng(self.seed)
    values = [rng.normal(size=(TOTAL_ROWS, *s.shape)).astype(s.dtype) for s in SPECS]
    self.stash, slot = push(self.stash, values, ragged_of(layout), self.implementation)

    rows = sum(layout[0])
    taken = -(-rows // 8) * 8
    fits = self.top + rows <= self.capacity
    assert bool(slot.is_stored()[0]) == fits
    self.slots.append((slot, layout, values, taken if fits else 0))
    self.top += taken if fits else 0
    self.overflowed += not fits
    self.peak = max(self.peak, self.top)
    self.wanted += taken
    self.sufficient = max(self.sufficient, self.wanted)
    self.check()

  @rule(sizes=st.sampled_from([[-1, 3], [97, 0], [50, 50], [2**31 - 1, 1]]))
  def push_invalid(self, sizes):
    values = [np.ones((TOTAL_ROWS, *s.shape), s.dtype) for s in SPECS]
    layout = (sizes + [0] * 6, None)
    self.stash, slot = push(self.stash, values, ragged_of(layout), self.implementation)
    self.invalid += 1
    assert not slot.is_stored()[0]
    self.check()

  @precondition(lambda self: self.slots)
  @rule()
  def pop(self):
    slot, layout, _, taken = self.slots.pop()
    self.stash = pop(self.stash, slot)
    self.top -= taken
    self.wanted -= -(-sum(layout[0]) // 8) * 8
    self.poison()
    if taken:  # The rows are no longer there, and whoever reads them is told.
      for value in restore(self.stash, slot, ragged_of(layout), self.implementation):
        assert np.isnan(value).all()
    self.check()

  @rule()
  def next_step(self):
    """Another training step, in the memory that the last one left."""
    empty = ps.Stash.empty(self.capacity, SPECS)
    empty.buffers = self.stash.buffers
    self.stash = empty
    self.forget()

  def check(self):
    stats = [int(x[0]) for x in self.stash.stats()]
    assert stats == [self.top, self.peak, self.overflowed, self.invalid, self.sufficient]
    others = [] if not self.slots else [self.slots[self.seed % len(self.slots)], self.slots[-1]]
    self.compare(self.slots if self.compares_all else others)

  def teardown(self):
    self.compare(self.slots)

  def compare(self, slots):
    if slots:
      self.poison()
    for slot, layout, values, taken in slots:
      ragged = ragged_of(layout)
      restored = restore(self.stash, slot, ragged, self.implementation)
      type(self).compared += taken > 0
      for value, actual in zip(values, restored, strict=True):
        if taken or not sum(layout[0]):
          assert_same_bits(actual, without_padding(value, *layout))
        else:
          assert np.isnan(actual).all()


class XlaMachine(StashMachine):
  implementation = XLA


class MosaicMachine(StashMachine):
  """To compile and to run an interpreted kernel takes long."""

  implementation = MOSAIC
  compares_all = False

  @initialize()
  def start(self):
    super().start(104)


def run(machine, sequences, steps):
  """Runs random sequences of operations. A failing one is printed as a program, to paste here."""
  machine.compared = 0
  options = {"max_examples": sequences, "stateful_step_count": steps}
  run_state_machine_as_test(machine, settings=settings(**options))
  # Hypothesis leaves some operations out of some sequences, so that others come more often.
  assert machine.compared > sequences


@pytest.mark.once
def test_stash_is_its_model():
  run(XlaMachine, 25, 20)


@pytest.mark.long
@pytest.mark.parametrize("machine, sequences", [(XlaMachine, 100), (MosaicMachine, 10)])
def test_stash_is_its_model_for_long(machine, sequences):
  run(machine, sequences, 100)
