"""Counts what the DMAs of interpreted kernels move."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp


def count_rows(monkeypatch):
  """Returns a list to which each DMA that is started from now on adds its rows.

  Of programs that are traced from now on; `jax.effects_barrier()` waits for those that run.
  """
  rows, make_async_copy = [], pltpu.make_async_copy

  class CountedCopy:
    def __init__(self, source, destination, semaphore):
      self._copy = make_async_copy(source, destination, semaphore)
      self.wait = self._copy.wait
      self._rows = source.transforms[-1].indices[0].size

    def start(self):
      jax.debug.callback(lambda moved: rows.append(int(moved)), jnp.int32(self._rows))
      self._copy.start()

  monkeypatch.setattr(pltpu, "make_async_copy", CountedCopy)
  return rows
