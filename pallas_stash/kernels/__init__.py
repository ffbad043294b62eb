"""Compact and expand: one contract, implemented for TPUs (`mosaic_tpu`) and by XLA (`xla`).

The implementation is chosen when the program is lowered, by the platform that it is lowered for,
not by the devices of the host.
"""

from typing import Any, get_args, Literal

import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_stash import dtypes
from pallas_stash.checks import debugging
from pallas_stash.kernels import dispatch
from pallas_stash.ragged import CopyRuns

Implementation = Literal["mosaic", "mosaic_interpret", "xla"]
Padding = Literal["zero", "undefined"]

# Interpreting is for finding faults: memory starts as NaN and every race is reported.
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def check_implementation(implementation: str | None, dtype: Any = None) -> None:
  """Raises a ValueError unless `implementation` is None or the name of one that moves a dtype."""
  names = (None, *get_args(Implementation))
  if implementation not in names:
    raise ValueError(f"{implementation=} must be one of {names}.")
  if dtype is None or implementation in (None, "xla") or dtypes.is_moved_by_mosaic(dtype):
    return
  raise ValueError(f"{implementation=} moves no rows of {dtype}: leave it None, or take 'xla'.")


def check_padding(padding: str) -> None:
  """Raises a ValueError unless `padding` is the name of one."""
  if padding not in get_args(Padding):
    raise ValueError(f"{padding=} must be one of {get_args(Padding)}.")


def compact(
  rows: jax.Array,
  stash: jax.Array,
  runs: CopyRuns,
  implementation: Implementation | None,
  page_rows: int | None = None,
) -> jax.Array:
  """Copies runs of `rows` [total_rows, width] into `stash` [stash_rows, stash_width], in place.

  The destinations leave no gap; or, with `page_rows`, they fill whole pages of so many rows but for
  the last of them, whose other rows are undefined then. All other rows of the stash keep every bit.
  `stash_width >= width`; what columns from `width` on hold in the rows that are written is
  undefined.
  """
  if 0 in stash.shape or 0 in rows.shape:
    return stash
  return _run(dispatch.COMPACT, implementation, (rows, stash, runs), page_rows=page_rows)


def expand(
  stash: jax.Array,
  runs: CopyRuns,
  total_rows: int,
  width: int,
  blank: jax.Array,
  implementation: Implementation | None,
  fill: jax.Array | None = None,
) -> jax.Array:
  """Copies runs of `stash` [stash_rows, stash_width] into a new buffer [total_rows, width].

  Every element outside the runs is `blank`, a scalar of the stash's dtype; or it is undefined, if
  `fill`, bool[], is given and false. `width <= stash_width`.
  """
  if 0 in stash.shape or width == 0:
    return lax.broadcast(blank, (total_rows, width))
  operands = (stash, runs, blank) if fill is None else (stash, runs, blank, fill)
  return _run(dispatch.EXPAND, implementation, operands, total_rows=total_rows, width=width)


def _run(name, implementation, operands, **static):
  check_implementation(implementation, operands[0].dtype)
  # What is asked for here is asked for when the program is traced, not when it is lowered.
  options = {"interpret": INTERPRET, "checks_bounds": debugging.is_debugging()}
  return dispatch.run(name, implementation, operands, **options, **static)
