"""Sizes and groups of the tests of `dynamic_update_slice` and `dynamic_slice`."""

import dataclasses
from unittest import mock

import numpy as np

from pallas_stash.kernels import dispatch
from pallas_stash.kernels.tiling import choose_tiling

OPERAND_ROWS, TOTAL_ROWS, WIDTH = 41, 34, 100
SIZES, STARTS = np.array([5, 0, 9, 2]), np.array([28, 9, 11, 20])


def with_small_tiles():
  """Returns a context of several tiles in each operand: to interpret large ones takes long."""
  tiling = lambda *args: dataclasses.replace(choose_tiling(*args), tile_rows=32)
  return mock.patch.object(dispatch, "choose_tiling", tiling)
