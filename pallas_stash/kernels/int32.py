"""Arithmetic and loops of int32 that are not negative.

`//` and `%` would lower to code for signs, too, and Python's integers are int64 under x64.
"""

from jax import lax
import jax.numpy as jnp
import numpy as np


def div(x, divisor: int):
  """Returns `x // divisor` for int32 `x >= 0`."""
  if divisor & (divisor - 1) == 0:  # The compiler does not know that `x` is not negative.
    return lax.shift_right_logical(x, np.int32(divisor.bit_length() - 1))
  return lax.div(x, np.int32(divisor))


def rem(x, divisor: int):
  """Returns `x % divisor` for int32 `x >= 0`."""
  if divisor & (divisor - 1) == 0:
    return x & np.int32(divisor - 1)
  return lax.rem(x, np.int32(divisor))


def add(count, more):
  """Returns `count + more`, or 2**31 - 1 where that is less."""
  return count + jnp.minimum(more, jnp.iinfo(jnp.int32).max - count)


def repeat(times, body, x):
  """Returns `x` after `x = body(i, x)` for each int32 `i` from 0 to `times`, int32[]."""
  return lax.fori_loop(np.int32(0), times, body, x)
