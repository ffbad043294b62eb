"""What is between the matmuls of an expert MLP: its activation, in chunks that fit registers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels.grouped_call import index_map
from pallas_stash.kernels.tiling import LANES
from pallas_stash.kernels.visits import ALIGN

Activation = Callable[..., jax.Array]
# What of a tile is activated at once: about as much as stays in registers.
CHUNK_ROWS, CHUNK_COLUMNS = 2 * ALIGN, 4 * LANES


class Beside(NamedTuple):
  """What hidden rows are made of beside their products.

  Attributes:
    row_weights: `wide` [m], by which they are multiplied, or None.
    group_rows: a `wide` [groups, n] for each further argument of the activation.
  """

  row_weights: jax.Array | None
  group_rows: tuple[jax.Array, ...]


def wide(*dtypes: Any) -> Any:
  """Returns the dtype to compute in: float32, or float64 if any of `dtypes` is."""
  return jnp.dtype(jnp.float64 if jnp.dtype("float64") in dtypes else jnp.float32)


def activate(
  activation: Activation, gate: jax.Array, up: jax.Array, weights: Any, group_rows: Sequence[Any]
) -> jax.Array:
  """Returns the hidden rows, `wide`, of products; `weights` are broadcast to them, or None."""
  dtype = wide(gate.dtype)
  hidden = activation(*(x.astype(dtype) for x in (gate, up)), *group_rows).astype(dtype)
  return hidden if weights is None else hidden * weights


def activate_backward(
  activation: Activation,
  d_hidden: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  weights: Any,
  group_rows: Sequence[Any],
) -> tuple[Any, ...]:
  """Returns (d_gate, d_up, hidden, d_weights or None, d_group_rows) of each element, `wide`."""
  dtype = wide(gate.dtype)
  d_hidden, gate, up = (x.astype(dtype) for x in (d_hidden, gate, up))
  hidden, vjp = jax.vjp(lambda *args: activation(*args).astype(dtype), gate, up, *group_rows)
  d_weights = None
  if weights is not None:
    d_weights = d_hidden * hidden
    hidden, d_hidden = hidden * weights, d_hidden * weights
  d_gate, d_up, *d_group_rows = vjp(d_hidden)
  return d_gate, d_up, hidden, d_weights, d_group_rows


# Of tiles in VMEM.


def in_chunks(visits, visit, shape, body):
  """Calls `body(at, is_in_group, keeps_others)` for all chunks of a tile.

  `at` is where the chunk is, `is_in_group` which of its rows are of the group of the visit, and
  `keeps_others`, which is static, whether the tile has rows of other groups, to be kept: at its
  first visit it has none.
  """
  first, last = visits.rows_of_group(visit, shape[0])

  def chunks(keeps_others):
    def chunks_of_rows(row):
      row = pl.multiple_of(row, CHUNK_ROWS)
      for column in range(0, shape[1], CHUNK_COLUMNS):
        columns = min(CHUNK_COLUMNS, shape[1] - column)
        at = pl.ds(row, CHUNK_ROWS), pl.ds(column, columns)
        ids = row + lax.broadcasted_iota(jnp.int32, (CHUNK_ROWS, columns), 0)
        body(at, (ids >= first) & (ids < last), keeps_others)
      return row + CHUNK_ROWS

    # Not a `fori_loop`, which counts in int64 under x64.
    lax.while_loop(lambda row: row < shape[0], chunks_of_rows, jnp.int32(0))

  is_first = visits.is_first_of(visits.tiles, visit)
  pl.when(is_first)(lambda: chunks(keeps_others=False))
  pl.when(~is_first)(lambda: chunks(keeps_others=True))


def put(ref, at, values, is_new, keeps_others):
  """Stores a chunk, or of one that others are in the rows that are new."""
  if keeps_others:
    values = jnp.where(is_new, values.astype(jnp.float32), ref[at].astype(jnp.float32))
  ref[at] = values.astype(ref.dtype)


def spread(row_weights, scratch):
  """Returns a function from a chunk to the weights of its elements, or to None."""
  if row_weights is None:
    return lambda at: None
  scratch["weights"][...] = jnp.broadcast_to(row_weights[...], (LANES, row_weights.shape[1])).T

  def of_chunk(at):
    rows, columns = at
    return jnp.concatenate([scratch["weights"][rows, :]] * (columns.size // LANES), axis=1)

  return of_chunk


def as_blocks(beside, tm):
  """Returns `beside` in shapes that blocks are made of: a row for each tile, and for each group."""
  weights = beside.row_weights
  weights = None if weights is None else weights.reshape(-1, 1, tm)
  return Beside(weights, tuple(rows[:, None] for rows in beside.group_rows))


def specs_of(beside, tm, tn):
  """Returns the block specs of `as_blocks`."""
  of_rows = lambda column, visit, k, visits: (visits.tiles[visit], 0, 0)
  of_group = lambda column, visit, k, visits: (visits.groups[visit], 0, column)
  weights = None if beside.row_weights is None else pl.BlockSpec((None, 1, tm), index_map(of_rows))
  return Beside(
    weights, tuple(pl.BlockSpec((None, 1, tn), index_map(of_group)) for _ in beside.group_rows)
  )


def weights_scratch(beside, tm):
  if beside.row_weights is None:
    return {}
  return {"weights": pltpu.VMEM((tm, LANES), jnp.float32)}
