"""Division of int32 that are not negative: `//` and `%` would lower to code for signs, too."""

from jax import lax
import numpy as np


def div(x, divisor: int):
  """Returns `x // divisor` for int32 `x >= 0`."""
  return lax.div(x, np.int32(divisor))


def rem(x, divisor: int):
  """Returns `x % divisor` for int32 `x >= 0`."""
  return lax.rem(x, np.int32(divisor))
