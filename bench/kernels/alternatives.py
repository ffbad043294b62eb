"""What users would pick instead of compact and expand, on the same rows of a prefix layout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

MARGIN = 1.5  # Of a fixed chunk: rows that it holds as a multiple of those that are there.


class Alternative(NamedTuple):
  """A way to copy rows of one buffer [rows, width] to another.

  Attributes:
    rows_moved: `(rows, total_rows)` to the rows that it reads, and as many that it writes.
    is_pallas: whether it is a Pallas TPU kernel.
    make: `(rows, total_rows, kernel)` to a function `(worst_case, stash, start, row_numbers)` that
      returns the stash with the rows for "compact", and the worst case with them for "expand".
  """

  rows_moved: Callable[[int, int], int]
  make: Callable[[int, int, str], Any]
  is_pallas: bool = False


def slices(count):
  """A maker of a `lax.dynamic_update_slice` of `count(rows, total_rows)` rows."""

  def make(rows, total_rows, kernel):
    static_rows = count(rows, total_rows)

    def compact(worst_case, stash, start, row_numbers):
      del row_numbers
      return lax.dynamic_update_slice(stash, worst_case[:static_rows], (start, jnp.int32(0)))

    def expand(worst_case, stash, start, row_numbers):
      del row_numbers
      chunk = lax.dynamic_slice(stash, (start, jnp.int32(0)), (static_rows, stash.shape[1]))
      return lax.dynamic_update_slice(worst_case, chunk, (0, 0))

    return compact if kernel == "compact" else expand

  return make


def _chunk_rows(rows, total_rows):
  return min(int(MARGIN * rows), total_rows)


def _gather(rows, total_rows, kernel):
  del rows, total_rows

  def compact(worst_case, stash, start, row_numbers):
    taken = jnp.take(worst_case, row_numbers, axis=0, mode="clip")
    return lax.dynamic_update_slice(stash, taken, (start, jnp.int32(0)))

  def expand(worst_case, stash, start, row_numbers):
    place = start + jnp.arange(row_numbers.shape[0], dtype=jnp.int32)
    return worst_case.at[row_numbers].set(stash[place], unique_indices=True, mode="drop")

  return compact if kernel == "compact" else expand


def _kernel_call(body, grid, spec, name):
  """A Pallas copy of the whole worst case, from a fixed place to the start of the other buffer."""

  def make(rows, total_rows, kernel):
    del rows

    def copy(worst_case, stash, start, row_numbers):
      del start, row_numbers
      source, destination = (worst_case, stash) if kernel == "compact" else (stash, worst_case)
      return pl.pallas_call(
        body(total_rows),
        grid=grid(total_rows),
        in_specs=[spec(source.shape[1]), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=spec(source.shape[1]),
        out_shape=jax.ShapeDtypeStruct(destination.shape, destination.dtype),
        input_output_aliases={1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name=name,
      )(source, destination)

    return copy

  return make


TILE_ROWS = 256


def _tile_body(total_rows):
  del total_rows

  def body(source, _, out):
    out[...] = source[...]

  return body


def _dma_body(total_rows):
  def body(source, _, out):
    rows = pl.ds(0, total_rows)
    pltpu.sync_copy(source.at[rows], out.at[rows])

  return body


_whole = lambda rows, total_rows: total_rows
ALTERNATIVES = {
  "dus_chunk": Alternative(_chunk_rows, slices(_chunk_rows)),
  "dus_worst_case": Alternative(_whole, slices(_whole)),
  "take_scatter": Alternative(lambda rows, total_rows: rows, _gather),
  "grid_copy": Alternative(
    _whole,
    _kernel_call(
      _tile_body,
      lambda total_rows: (total_rows // TILE_ROWS,),
      lambda width: pl.BlockSpec((TILE_ROWS, width), lambda i: (i, 0)),
      "grid_copy",
    ),
    is_pallas=True,
  ),
  "hbm_dma": Alternative(
    _whole,
    _kernel_call(
      _dma_body, lambda total_rows: (1,), lambda width: pl.BlockSpec(memory_space=pl.ANY), "hbm_dma"
    ),
    is_pallas=True,
  ),
}
