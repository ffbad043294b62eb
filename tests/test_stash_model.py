"""The stash against a plain Python model of it, under long random sequences of operations.

The model is a list of the slots in use, each with the values that it holds. Memory that holds no
stored row is NaN before every operation, and every stored row is compared bit for bit.
"""

import dataclasses
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
from tests.helpers.checks import long
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
def free(stash, slot):
  return stash.free(slot)


free_again = jax.jit(lambda stash, slot: stash.free(slot))


class BumpModel:
  """Which rows are whose, last in, first out."""

  page_rows, unit = None, 8

  def __init__(self, capacity):
    self.capacity, self.top = capacity, 0

  def empty(self):
    return ps.Stash.empty(self.capacity, SPECS)

  def take(self, rows):
    """Returns the rows that a push takes, or None if it does not fit."""
    if self.top + rows > self.capacity:
      return None
    taken = np.arange(self.top, self.top + units(rows, self.unit))
    self.top += len(taken)
    return taken

  def free(self, taken):
    self.top -= len(taken)


class PagesModel:
  """Which rows are whose, in pages that are freed in any order."""

  page_rows = unit = 32

  def __init__(self, capacity):
    self.capacity = capacity
    self.free_pages = list(range(-(-capacity // self.unit)))

  def empty(self):
    return ps.Stash.empty(self.capacity, SPECS, page_rows=self.unit)

  def take(self, rows):
    count = -(-rows // self.unit)
    if count > len(self.free_pages):
      return None
    pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
    return (np.array(pages, int)[:, None] * self.unit + np.arange(self.unit)).reshape(-1)

  def free(self, taken):
    self.free_pages = sorted([*self.free_pages, *(taken[:: self.unit] // self.unit)])


class HostModel(BumpModel):
  """Rows of HBM and of host memory behind one another: a push fits if both have room for it."""

  host_rows, staging_rows = 104, 16

  def __init__(self, capacity):
    super().__init__(capacity + self.host_rows)
    self.capacity_rows = capacity

  def empty(self):
    sizes = {"host_capacity_rows": self.host_rows, "staging_rows": self.staging_rows}
    return ps.Stash.empty(self.capacity_rows, SPECS, **sizes)


def units(rows, unit):
  return -(-rows // unit) * unit


class StashMachine(RuleBasedStateMachine):
  """Every rule does the same to a stash and to the model."""

  implementation: str
  model = BumpModel
  compares_all = True  # After each operation. Else the last slot, one other, and all in the end.
  compared = 0  # Stored pushes that have rows, of all sequences together.

  @initialize(capacity=st.sampled_from(CAPACITIES))
  def start(self, capacity):
    self.capacity, self.seed = capacity, 0
    self.forget()
    self.stash = self.rows.empty()

  def forget(self):
    """Of the model: nothing is stored."""
    self.slots = []  # of each push: its slot, layout, values, and the rows that it takes, or None
    self.rows = self.model(self.capacity)
    self.used = self.peak = self.wanted = self.sufficient = self.overflowed = self.invalid = 0
    self.freed = []  # slots whose rows are no longer there, with their layouts

  def poison(self):
    """Writes NaN wherever no row is stored."""
    free = np.ones(self.stash.rows_per_shard, bool)
    for _, (sizes, _), _, taken in self.slots:
      if taken is not None:
        free[taken[: sum(sizes)]] = False
    poisoned = lambda buffer: jnp.where(free[:, None], jnp.nan, buffer).astype(buffer.dtype)
    self.stash.buffers = tuple(map(poisoned, self.stash.buffers))

  @rule(layout=layouts(TOTAL_ROWS))
  def push(self, layout):
    self.poison()
    self.seed += 1
    rng = np.random.default_rng(self.seed)
    values = [rng.normal(size=(TOTAL_ROWS, *s.shape)).astype(s.dtype) for s in SPECS]
    self.stash, slot = push(self.stash, values, ragged_of(layout), self.implementation)

    taken = self.rows.take(sum(layout[0]))
    assert bool(slot.is_stored()[0]) == (taken is not None)
    self.slots.append((slot, layout, values, taken))
    self.used += 0 if taken is None else len(taken)
    self.overflowed += taken is None
    self.peak = max(self.peak, self.used)
    self.wanted += units(sum(layout[0]), self.model.unit)
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
  @rule(index=st.integers(0, 99))
  def free(self, index):
    is_any = self.model.page_rows is not None
    slot, layout, _, taken = self.slots.pop(index % len(self.slots) if is_any else -1)
    self.stash = free(self.stash, slot)
    if taken is not None:
      self.rows.free(taken)
      self.used -= len(taken)
    self.wanted -= units(sum(layout[0]), self.model.unit)
    if taken is not None and len(taken):
      # Of a stash without pages others may soon be at the same place.
      self.freed = [*self.freed * is_any, (slot, layout)]
    self.check()
    self.poison()
    for slot, layout in self.freed[-1:] + self.freed[:1]:
      for value in restore(self.stash, slot, ragged_of(layout), self.implementation):
        assert np.isnan(value).all()
    if self.freed and is_any:
      assert np.isnan(free_again(self.stash, slot).canary).all()

  @rule()
  def next_step(self):
    """Another training step, in the memory that the last one left."""
    used = self.stash
    self.forget()
    self.stash = self.rows.empty()
    self.stash.buffers = used.buffers
    if used.host is not None:
      fields = {"buffers": used.host.buffers, "stage": used.host.stage}
      self.stash.host = dataclasses.replace(self.stash.host, **fields)

  def check(self):
    stats = self.stats()
    assert stats == [self.used, self.peak, self.overflowed, self.invalid, self.sufficient]
    assert self.stash.canary[0] == 0
    others = [] if not self.slots else [self.slots[self.seed % len(self.slots)], self.slots[-1]]
    self.compare(self.slots if self.compares_all else others)

  def stats(self):
    return [int(x[0]) for x in self.stash.stats()[:5]]

  def teardown(self):
    self.compare(self.slots)

  def compare(self, slots):
    if slots:
      self.poison()
    for slot, layout, values, taken in slots:
      ragged = ragged_of(layout)
      restored = restore(self.stash, slot, ragged, self.implementation)
      type(self).compared += taken is not None and len(taken) > 0
      for value, actual in zip(values, restored, strict=True):
        if taken is not None:
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


class PagesMachine(XlaMachine):
  model = PagesModel


class HostMachine(XlaMachine):
  """Where rows are of both tiers, is seen by nothing but what comes back."""

  model = HostModel

  def poison(self):
    """Writes NaN to host memory that is free. Of a slot in HBM only the tier knows its rows."""
    tier, top = self.stash.host, int(self.stash.host.top[0])
    free = np.arange(tier.buffers[0].shape[0])[:, None] >= top
    poisoned = lambda b: jax.device_put(
      jnp.where(free, jnp.nan, jax.device_put(b, jax.memory.Space.Device)).astype(b.dtype),
      jax.memory.Space.Host,
    )
    self.stash.host = dataclasses.replace(tier, buffers=tuple(map(poisoned, tier.buffers)))
    free = np.arange(self.stash.rows_per_shard)[:, None] >= int(self.stash.top[0])
    poisoned = lambda buffer: jnp.where(free, jnp.nan, buffer).astype(buffer.dtype)
    self.stash.buffers = tuple(map(poisoned, self.stash.buffers))

  def stats(self):
    """Those of both tiers together: they fill up, and are freed, as one does."""
    stats = self.stash.stats()
    used, peak, overflowed, invalid, sufficient = [int(x[0]) for x in stats[:5]]
    used += int(stats.host_rows_in_use[0])
    assert max(peak, int(stats.host_peak_rows[0])) <= self.peak
    return [used, self.peak, overflowed, invalid, sufficient]


class MosaicPagesMachine(MosaicMachine):
  model = PagesModel


def run(machine, sequences, steps):
  """Runs random sequences of operations. A failing one is printed as a program, to paste here."""
  machine.compared = 0
  options = {"max_examples": sequences, "stateful_step_count": steps}
  run_state_machine_as_test(machine, settings=settings(**options))
  # Hypothesis leaves some operations out of some sequences, so that others come more often.
  assert machine.compared > sequences


@pytest.mark.once
@pytest.mark.parametrize("machine", [XlaMachine, PagesMachine, long(HostMachine)])
def test_stash_is_its_model(machine):
  run(machine, 10, 20)


LONG = [
  *((XlaMachine, 100), (MosaicMachine, 10), (PagesMachine, 100), (MosaicPagesMachine, 10)),
  (HostMachine, 30),
]


@pytest.mark.long
@pytest.mark.parametrize("machine, sequences", LONG)
def test_stash_is_its_model_for_long(machine, sequences):
  run(machine, sequences, 100)
