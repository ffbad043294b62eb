"""Rows between HBM and pinned host memory, by XLA's own slices of a host buffer.

A slice of static size is asynchronous on a TPU: it is started, and waited for, with all that does
not depend on it in between. A number of rows that is known on the device alone is moved by a loop
over chunks, which nothing overlaps. Both move whole chunks: behind the rows of a host buffer has to
be room for one, where what follows the last row of it may land, so that XLA clamps nothing.

First rows in host memory are multiples of a tile: of a 2D array a TPU traps at any other.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.kernels import Implementation, int32
from pallas_stash.ragged import CopyRuns, RaggedRows
from pallas_stash.varying import empty as empty_on_device
from pallas_stash.varying import mesh_alike, vary_alike, vary_over, varying_axes

CHUNK_BYTES = 2**23
TILE_ROWS = 32  # Of any dtype.
MOST_CHUNK_ROWS = 512


def chunk_rows(width: int, itemsize: int) -> int:
  """Returns the rows of a chunk: whole tiles, of about `CHUNK_BYTES`."""
  rows = CHUNK_BYTES // (width * itemsize) // TILE_ROWS * TILE_ROWS
  return max(TILE_ROWS, min(MOST_CHUNK_ROWS, rows))


def empty(rows: int, width: int, dtype: Any) -> jax.Array:
  """Returns a buffer [rows, width] of undefined contents, in pinned host memory."""
  return _to_host(empty_on_device((rows, width), dtype))


def is_on_host(array: jax.Array) -> bool:
  """Returns whether the type of an array says that it is in host memory."""
  return jax.typeof(array).memory_space == jax.memory.Space.Host


def store(rows: jax.Array, host: jax.Array, row: jax.Array) -> jax.Array:
  """Returns `host` with `rows` [static, width] from `row`, int32[], on; asynchronous on a TPU."""
  rows, host, row = vary_alike(rows, host, row)
  rows, host = mesh_alike(_to_host(rows), host)
  return lax.dynamic_update_slice(host, rows, (row, jnp.zeros_like(row)))


def load(host: jax.Array, row: jax.Array, rows: int) -> jax.Array:
  """Returns `rows` rows of `host` from `row`, int32[], on, in HBM; asynchronous on a TPU."""
  host, row = vary_alike(host, row)
  part = lax.dynamic_slice(host, (row, jnp.zeros_like(row)), (rows, host.shape[1]))
  return jax.device_put(part, jax.memory.Space.Device)


class Stretch(NamedTuple):
  """Rows of a push that lie tight in host memory.

  Attributes:
    ragged: where the groups of the push are in its values.
    first, last: int32[], which rows, counted over all groups: [first, last).
    row: int32[], where the first of them is in host memory, a multiple of a tile.
  """

  ragged: RaggedRows
  first: jax.Array
  last: jax.Array
  row: jax.Array

  def chunk(self, index: jax.Array, rows: int) -> tuple[CopyRuns, jax.Array]:
    """Returns the runs that make a chunk of so many rows of them, and its row in host memory."""
    start = self.first + index * rows
    runs = self.ragged.runs_between(start, jnp.minimum(start + rows, self.last), 0)
    return runs, self.row + index * rows

  def num_chunks(self, rows: int) -> jax.Array:
    return _chunks(self.first, self.last, rows)


def store_ragged(
  value: jax.Array, host: jax.Array, stretch: Stretch, implementation: Implementation | None
) -> jax.Array:
  """Returns `host` with rows of `value`.

  Args:
    value: [total_rows, width].
    host: [host_rows, width in whole lanes].
    stretch: which rows, and where to.
    implementation: as of `kernels.compact`.
  """
  value, host, stretch = vary_alike(value, host, stretch)
  rows = chunk_rows(host.shape[1], host.dtype.itemsize)
  blank = vary_over(empty_on_device((rows, host.shape[1]), host.dtype), varying_axes(value))

  def store_chunk(index, carry):
    chunk, host = carry
    runs, row = stretch.chunk(index, rows)
    chunk = kernels.compact(value, chunk, runs, implementation)
    return chunk, store(chunk, host, row)

  return _repeat(stretch.num_chunks(rows), store_chunk, (blank, host))[1]


def load_ragged(
  host: jax.Array, value: jax.Array, stretch: Stretch, implementation: Implementation | None
) -> jax.Array:
  """Returns `value`, in place, with the rows that `store_ragged` stored; arguments as there."""
  host, value, stretch = vary_alike(host, value, stretch)
  rows = chunk_rows(host.shape[1], host.dtype.itemsize)

  def load_chunk(index, value):
    runs, row = stretch.chunk(index, rows)
    return scatter(load(host, row, rows), value, runs, implementation)

  return _repeat(stretch.num_chunks(rows), load_chunk, value)


def scatter(
  rows: jax.Array, value: jax.Array, runs: CopyRuns, implementation: Implementation | None
) -> jax.Array:
  """Returns `value` with tight `rows` where they came from, all its other rows kept, in place.

  Args:
    rows: [any, width in whole lanes].
    value: [total_rows, width].
    runs: that copied from `value` to `rows`.
    implementation: as of `kernels.compact`.
  """
  rows, value, runs = vary_alike(rows, value, runs)
  rows = rows[:, : value.shape[1]]
  back = CopyRuns(runs.destinations, runs.sources, runs.sizes)

  def copy(index, value):
    run = CopyRuns(*(lax.dynamic_slice(field, (index,), (1,)) for field in back))
    return kernels.compact(rows, value, run, implementation)

  count = back.sizes.shape[0]
  if count == 1:
    return kernels.compact(rows, value, back, implementation)
  # Groups may have gaps between them, and be in any order: `compact` takes neither.
  return int32.repeat(jnp.int32(count), copy, value)


def fill(host: jax.Array, first: jax.Array, last: int, value: Any) -> jax.Array:
  """Returns `host` with a scalar in its rows [first, last), which are a chunk or more."""
  rows = chunk_rows(host.shape[1], host.dtype.itemsize)
  chunk = jnp.full((rows, host.shape[1]), value, host.dtype)
  at = lambda index: jnp.minimum(first + index * rows, last - rows)
  fill_chunk = lambda index, host: store(chunk, host, at(index))
  return _repeat(_chunks(first, jnp.int32(last), rows), fill_chunk, host)


def _to_host(array):
  return jax.device_put(array, jax.memory.Space.Host)


def _chunks(first, last, rows):
  return int32.div(jnp.maximum(last - first, 0) + (rows - 1), rows)


def _repeat(times, body, x):
  # XLA's CollectivePipeliner evaluates at compile time what a number of turns is made of: the loop
  # over the layers itself, with its buffers, and of many layers it aborts. It does not look behind
  # a barrier.
  times, x = vary_alike(lax.optimization_barrier(times), x)
  return int32.repeat(times, body, x)
