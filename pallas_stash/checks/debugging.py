"""The debug mode: NaN in rows that hold nothing, a checksum of rows that hold something.

Whether it is on is asked while a program is traced. Off, nothing of it is in the program. What it
says about rows that are not where `RaggedRows` says is in `misplaced_rows`.
"""

from collections.abc import Sequence
import contextlib
import math
import os

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_stash import dtypes
from pallas_stash.arguments import describe
from pallas_stash.ragged import RaggedRows

ENVIRONMENT_VARIABLE = "PALLAS_STASH_DEBUG"

# Part of the key of every cache of traced programs, so that no program outlives its mode.
_mode = jax.make_user_context(os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0"))


def debug(enabled: bool = True) -> contextlib.AbstractContextManager:
  """Returns a context in which programs that use a stash are traced with checks, or without.

  With them,

  - rows of the stash that were never written, and rows that `pop` or `reset` freed, are NaN;
  - `push` keeps a checksum of the rows of each residual in the slot; `restore` and the backward
    pass compare it with that of the rows that come back. Rows that differ, or that come back to
    other places than they were pushed from, are printed and become NaN, all of their residual.
    Rows that a matmul keeps and reads in the stash itself are summed up there.
  - a line is printed, once for each program, where rows outside of the groups are pushed that are
    not constant, or such rows of a function's result have a cotangent. Padding may be like that, so
    no value changes; but if the layout needs `group_starts` that `RaggedRows` was not given, then
    gradients are wrong, and nothing else says so.

  Results are the same otherwise: what comes back is what was pushed. A jitted function is traced
  anew on its first call inside, so a call is checked if and only if it is made inside; of a
  function that is differentiated by `jax.vjp`, what counts is where that is called. Which NaN it
  is that comes back is not checked.

  The environment variable PALLAS_STASH_DEBUG=1, read when the package is imported, turns the mode
  on everywhere outside such contexts.

      with pallas_stash.debug():
        loss, gradients = train_step(params, batch)

  Args:
    enabled: False for a part of the program that is not to be checked.

  Raises:
    ValueError: for anything else, such as the function to check.
  """
  if not isinstance(enabled, bool | np.bool_):
    raise ValueError(f"enabled={describe(enabled)} must be True or False: `with debug():`.")
  return _mode(bool(enabled))


def is_debugging() -> bool:
  """Returns whether what is traced now is to be checked."""
  return _mode.value


def checksums(values: Sequence[jax.Array], ragged: RaggedRows) -> jax.Array:
  """Returns uint32[1, residuals]: a checksum of the rows in groups of each of `values`.

  It is a sum over elements of their bits, times an odd factor that depends on row and column. So
  one element that differs always shows, whichever bits of it do. All NaNs count as the same one:
  XLA on a CPU may rewrite which it is where other operations, such as `vmap`, move small floats.

  Args:
    values: arrays [total_rows, *row_shape] of a floating-point dtype.
    ragged: where the rows are.
  """
  is_in_group = ragged.is_in_group()[:, None]

  def checksum(value):
    flat = value.reshape(ragged.total_rows, math.prod(value.shape[1:]))
    flat = dtypes.select(jnp.isnan(flat), jnp.full((), jnp.nan, flat.dtype), flat)
    # An element of more than 32 bits becomes several columns.
    word = min(flat.dtype.itemsize, 4)
    bits = lax.bitcast_convert_type(flat, f"uint{8 * word}").astype(jnp.uint32)
    bits = bits.reshape(ragged.total_rows, math.prod(bits.shape[1:]))
    return jnp.sum(jnp.where(is_in_group, bits * _factors(bits.shape), 0), dtype=jnp.uint32)

  return jnp.stack(list(map(checksum, values)))[None]


def _factors(shape):
  """Returns odd numbers, uint32[rows, columns], that follow no simple rule along either axis."""
  row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
  mixed = row * jnp.uint32(0x9E3779B1) + column * jnp.uint32(0x85EBCA77)
  mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
  return (mixed ^ (mixed >> 12)) | jnp.uint32(1)


def verify(
  values: tuple[jax.Array, ...], ragged: RaggedRows, expected: jax.Array, is_read: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns rows that came back from a stash, NaN in place of those that are not what was pushed.

  Args:
    values: arrays [total_rows, *row_shape].
    ragged: where the rows are.
    expected: uint32[1, residuals], their checksums when they were pushed.
    is_read: bool[], whether they were read from the stash at all.
  """
  are_intact = check_rows(values, ragged, expected, is_read)
  nan = lambda value: jnp.full((), jnp.nan, value.dtype)
  pairs = zip(are_intact, values, strict=True)
  return tuple(dtypes.select(is_intact, value, nan(value)) for is_intact, value in pairs)


def check_rows(
  values: Sequence[jax.Array], ragged: RaggedRows, expected: jax.Array, is_read: jax.Array
) -> jax.Array:
  """Returns bool[residuals]: whether rows are what was pushed. Of those that are not, it says so.

  Args are those of `verify`.
  """
  are_intact = (checksums(values, ragged) == expected)[0]
  for value, is_intact in zip(values, are_intact, strict=True):
    message = (
      f"{{rows}} rows of the residual {describe_row(value)} came back from the stash other than"
      " they were pushed; they are NaN."
    )
    say_if(is_read & ~is_intact, message, rows=ragged.num_rows())
  return are_intact


def describe_row(rows: jax.Array) -> str:
  """Returns dtype and shape of one of `rows`."""
  return f"{rows.dtype}{list(rows.shape[1:])}"


def say_if(is_so: jax.Array, message: str, once: bool = False, **values: jax.Array) -> None:
  """Prints a line, formatted with `values`, when the program runs and `is_so`, bool[], holds.

  Args:
    is_so: whether to. `vmap` may run what is conditional on it in any case, so it is asked again.
    message: the line.
    once: whether to say it once for each time that the program is traced.
    **values: scalars.
  """
  said = []

  def say(is_so, **values):
    if is_so and not said:
      print("pallas_stash: " + message.format(**values), flush=True)
      said.extend([True] * once)

  report = lambda is_so, values: jax.debug.callback(say, is_so, **values)
  lax.cond(is_so, report, lambda is_so, values: None, is_so, values)


def report_count(
  number: jax.Array,
  found: jax.Array,
  expected: jax.Array,
  is_sealed: jax.Array,
  is_held: jax.Array,
) -> None:
  """Prints which push was handed another stash than its own, or its own when its rows were freed.

  Args:
    number: int32[], of the push.
    found: float32[], the count that the backward pass found. NaN is not printed: a use before has.
    expected: float32[], the count that shows that it is its stash.
    is_sealed: bool[], whether anything was handed over at all.
    is_held: bool[], whether the rows are there that the push stored, if it did.
  """
  is_wrong = (found != expected) & ~jnp.isnan(found)
  where = "the backward pass of push {number} (the first is 0) was handed a stash"
  say_if(
    is_wrong & is_sealed,
    f"{where} of {{found}} pushes, and must be handed one of {{expected}}: it was not sealed last,"
    " sealed twice, scaled or clipped, or a layer was recomputed by what knows no stash. From there"
    " on all is NaN.",
    number=number,
    found=found,
    expected=expected,
  )
  say_if(
    is_wrong & ~is_sealed,
    f"{where} that was not sealed: behind the last layer, `seal(y, stash)` must have the stash that"
    " it returned, and every layer the one of the layer before. From there on all is NaN.",
    number=number,
  )
  say_if(
    (found == expected) & ~is_held,
    f"{where} that has its rows no longer: they were freed, or their backward pass ran before. From"
    " there on all is NaN.",
    number=number,
  )
