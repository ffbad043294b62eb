"""How a stash keeps the rows of residuals: flattened, in whole lanes, in dtypes for the kernels."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_stash import dtypes, kernels
from pallas_stash.allocators import Allocator
from pallas_stash.checks import debugging
from pallas_stash.kernels import Implementation
from pallas_stash.kernels.tiling import LANES, round_up
from pallas_stash.ragged import CopyRuns
from pallas_stash.varying import empty

Specs = Sequence[jax.ShapeDtypeStruct]  # The shape of one row and the dtype of each residual.
Buffers = tuple[jax.Array, ...]  # For each, [rows, width].


def empty_buffers(specs: Specs, rows: int) -> Buffers:
  """Returns buffers of undefined contents."""
  # Not zeros: no row is read before it is written, and a TPU would write them all every step.
  return tuple(
    empty((rows, round_up(math.prod(s.shape), LANES)), dtypes.storage(s.dtype)) for s in specs
  )


def store(
  buffers: Buffers,
  values: Sequence[jax.Array],
  order: Sequence[int],
  runs: CopyRuns,
  implementation: Implementation | None,
  page_rows: int | None,
) -> Buffers:
  """Returns `buffers` with runs of rows of `values` [total_rows, *row_shape] compacted into them.

  Args:
    buffers, values, runs, implementation, page_rows: as of `kernels.compact`.
    order: which buffer each of `values` goes to.
  """
  buffers = list(buffers)
  for value, index in zip(values, order, strict=True):
    buffers[index] = kernels.compact(flat(value), buffers[index], runs, implementation, page_rows)
  return tuple(buffers)


def flat(value: jax.Array) -> jax.Array:
  """Returns rows [total_rows, *row_shape] as buffers have them, but for their width in lanes."""
  rows = value if value.ndim == 2 else value.reshape(value.shape[0], -1)
  return dtypes.bit_cast(rows, dtypes.storage(rows.dtype))


def load(
  buffers: Buffers,
  specs: Specs,
  total_rows: int,
  runs: CopyRuns,
  is_blank: jax.Array,
  fill: jax.Array | None,
  implementation: Implementation | None,
) -> tuple[jax.Array, ...]:
  """Returns arrays [total_rows, *row_shape] with runs of rows of `buffers` expanded into them.

  Args:
    buffers, total_rows, runs, fill, implementation: as of `kernels.expand`.
    specs: of the residuals.
    is_blank: bool[], whether the rows outside of the runs are zero; else they are NaN.
  """
  blank_of = functools.cache(functools.partial(dtypes.blank_or_nan, is_blank))

  def load_one(spec, buffer):
    blank = dtypes.bit_cast(blank_of(spec.dtype), buffer.dtype)
    width = math.prod(spec.shape)
    rows = kernels.expand(buffer, runs, total_rows, width, blank, implementation, fill)
    return dtypes.bit_cast(rows, spec.dtype).reshape(total_rows, *spec.shape)

  return tuple(map(load_one, specs, buffers))


def poison_free_rows(buffers: Buffers, allocator: Allocator) -> Buffers:
  """Returns `buffers` with NaN in the rows that are free: in the debug mode. Else as they are."""
  if not debugging.is_debugging():
    return buffers
  is_free = allocator.is_free()[:, None]
  nan = lambda buffer: jnp.full((), jnp.nan, buffer.dtype)
  return tuple(dtypes.select(is_free, nan(buffer), buffer) for buffer in buffers)


def as_kind(residuals: Sequence[Any]) -> tuple[tuple[tuple[int, ...], Any], ...]:
  """Returns what says that residuals have the same rows, in whatever order: shapes and dtypes."""
  return tuple(sorted(((tuple(r.shape), jnp.dtype(r.dtype)) for r in residuals), key=str))


def match_residuals(specs: Specs, found: Sequence[tuple[Any, Any]]) -> list[int]:
  """Returns which of `specs` each of `found`, pairs of row shape and dtype, is.

  Equal ones are taken in order.

  Raises:
    ValueError: unless each of `specs` is found exactly once.
  """
  free = list(range(len(specs)))
  order = []
  for shape, dtype in found:
    matches = [i for i in free if specs[i].shape == tuple(shape) and specs[i].dtype == dtype]
    if matches:
      order.append(matches[0])
      free.remove(matches[0])
  if free or len(order) != len(found):
    describe = lambda pairs: sorted(f"{jnp.dtype(dtype)}{list(shape)}" for shape, dtype in pairs)
    raise ValueError(
      f"The rows to store, {describe(found)}, must be those that the stash was made for,"
      f" {describe((s.shape, s.dtype) for s in specs)}. `f.residuals` gives what `Stash.empty`"
      " wants."
    )
  return order
