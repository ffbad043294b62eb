"""VMEM tiles that take turns: one is loaded, another is worked on, a third is stored."""

import math
from typing import Any, NamedTuple

from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp


class Slots(NamedTuple):
  """VMEM tiles with the semaphores of their DMAs.

  Attributes:
    tiles: VMEM [slots, rows, columns]; or [1, rows, columns], from which all slots store.
    loads: DMA semaphore [slots], HBM to tile.
    stores: DMA semaphore [slots], tile to HBM.
    rows_leaving: SMEM int32[slots], rows of the stores in flight, which share a semaphore.
  """

  tiles: Any
  loads: Any
  stores: Any
  rows_leaving: Any

  @classmethod
  def scratch_shapes(cls, slots, tiles, rows, columns, dtype, alignment):
    """Returns what to allocate; `tiles` with an axis of HBM tiles, unless `alignment` is None.

    VMEM is then tiled as HBM is, and a DMA is a plain copy. The compiler for tpu7x otherwise tiles
    twice as many rows of two bytes, and a DMA gathers and scatters: four times the cycles.
    """
    semaphores = pltpu.SemaphoreType.DMA((slots,))
    rows = (rows,) if alignment is None else (rows // alignment, alignment)
    return cls(
      pltpu.VMEM((tiles, *rows, columns), dtype),
      semaphores,
      semaphores,
      pltpu.SMEM((slots,), jnp.int32),
    )

  def as_rows(self):
    """Returns the slots, from what was allocated."""
    tiles, *rows, columns = self.tiles.shape
    if len(rows) == 1:
      return self
    return self._replace(tiles=self.tiles.reshape(tiles, math.prod(rows), columns))

  @property
  def number(self):
    return self.stores.shape[0]

  def before(self, slot, by=1):
    """Returns the slot whose turn was `by` turns before that of `slot`."""
    return jnp.where(slot < by, slot + self.number - by, slot - by)
