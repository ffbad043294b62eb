"""The backward kernel of the expert MLP on TPU: it reads gate and up products in the stash.

d_out tile ---dot---> d_hidden ---gradient of the activation---> d_gate, d_up, hidden
             stash ___gate and up, read in place___/
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels import megablox
from pallas_stash.kernels.activation import (
  activate_backward,
  Activation,
  as_blocks,
  Beside,
  CHUNK_ROWS,
  in_chunks,
  put,
  specs_of,
  spread,
  weights_scratch,
)
from pallas_stash.kernels.grouped_call import call, cost, dot, index_map, like
from pallas_stash.kernels.tiling import LANES
from pallas_stash.kernels.visits import ALIGN, Place, Visits


class Gradients(NamedTuple):
  """What the backward pass makes of the rows in groups; outside of them it is undefined.

  Attributes:
    d_gate, d_up, hidden: [m, n].
    of_beside: gradients, as float32; zero of a group without rows.
  """

  d_gate: jax.Array
  d_up: jax.Array
  hidden: jax.Array
  of_beside: Beside


def backward(
  d_out: jax.Array,
  w_down: jax.Array,
  group_sizes: jax.Array,
  beside: Beside,
  stashes: Sequence[jax.Array],
  place: Place,
  *,
  activation: Activation,
  options: megablox.Megablox,
  interpret: Any = False,
) -> Gradients:
  """Returns the gradients of gate and up, which it reads in the stash, and the hidden rows.

  Args:
    d_out: [m, k], the gradient of the hidden rows times `w_down`. Undefined outside of groups.
    w_down: [groups, n, k].
    stashes: [stash_rows, width] with rows of gate, and of up. What all others hold has no
      influence.
    place: where the rows are in `d_out`, and where in the stashes; all results are NaN where it
      says that they are not stored.
    group_sizes, beside, activation, options, interpret: as of `forward`.
  """
  m, k = d_out.shape
  groups, n, _ = w_down.shape
  stash_rows, width = stashes[0].shape
  tm, tk, tn = options.tiles(m, k, n)
  tn = min(tn, width)
  tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)
  visits, number = Visits.of(group_sizes, place, m, tm, jnp.int32(0), groups, False)

  tile = lambda *sizes_and_map: pl.BlockSpec(sizes_and_map[:-1], index_map(sizes_and_map[-1]))
  rows_and_column = lambda column, visit, k, visits: (visits.tiles[visit], column)
  in_stash = tile(
    pl.Element(tm),
    pl.Element(tn),
    lambda column, visit, k, visits: (
      visits.read_row(visit, tm, stash_rows)[0],
      pl.multiple_of(column * tn, LANES),
    ),
  )
  scratch = {"total": pltpu.VMEM((tm, tn), jnp.float32)} | weights_scratch(beside, tm)
  if beside.row_weights is not None:
    scratch["d_weights"] = pltpu.VMEM((tm, LANES), jnp.float32)
  scratch["d_group_rows"] = [pltpu.VMEM((ALIGN, tn), jnp.float32) for _ in beside.group_rows]
  # A row of sums for each column tile: they are added up outside.
  row_sums, sums_spec = None, None
  if beside.row_weights is not None:
    row_sums = like(d_out, (tiles_n, m // tm, 1, tm), jnp.float32)
    of_tile = lambda column, visit, k, visits: (column, visits.tiles[visit], 0, 0)
    sums_spec = tile(None, None, 1, tm, of_tile)
  of_group_rows = [like(d_out, (groups, 1, n), jnp.float32) for _ in beside.group_rows]
  kernel = functools.partial(
    _backward,
    k=k,
    n=n,
    stash_rows=stash_rows,
    activation=activation,
    dtype=megablox.compute_dtype(d_out, w_down),
  )
  *gradients, d_row_weights, d_group_rows = call(
    kernel,
    visits,
    (tiles_n, number, tiles_k),
    operands=(d_out, w_down, as_blocks(beside, tm), list(stashes)),
    in_specs=[
      tile(tm, tk, lambda column, visit, k, visits: (visits.tiles[visit], k)),
      tile(None, tn, tk, lambda column, visit, k, visits: (visits.groups[visit], column, k)),
      specs_of(beside, tm, tn),
      [in_stash, in_stash],
    ],
    out_specs=[
      *[tile(tm, tn, rows_and_column)] * 3,
      sums_spec,
      list(specs_of(beside, tm, tn).group_rows),
    ],
    out_shape=[*[like(d_out, (m, n))] * 3, row_sums, of_group_rows],
    scratch_shapes=[scratch],
    cost_estimate=cost(
      (m, k, n),
      (tiles_n * m * k, d_out.dtype),
      (k * n * visits.tiles.size, w_down.dtype),
      (5 * m * n, d_out.dtype),
    ),
    interpret=interpret,
    name="stash_gate_up_backward",
  )
  if d_row_weights is not None:
    d_row_weights = jnp.sum(d_row_weights, axis=0).reshape(m)
  has_rows = (group_sizes > 0)[:, None]
  d_group_rows = [jnp.where(has_rows, d_rows[:, 0], 0) for d_rows in d_group_rows]
  return Gradients(*gradients, Beside(d_row_weights, tuple(d_group_rows)))


def _backward(
  visits,
  d_out,
  w_down,
  beside,
  stashes,
  d_gate,
  d_up,
  hidden,
  d_row_weights,
  d_group_rows,
  scratch,
  *,
  k,
  n,
  stash_rows,
  activation,
  dtype,
):
  """The kernel of `backward`. A step is a column tile of `hidden`, a visit, and a tile of k."""
  column, visit, k_tile = map(pl.program_id, range(3))
  number, tiles_k = pl.num_programs(1), pl.num_programs(2)
  (tile_rows, tile_columns), tile_k, total = hidden.shape, d_out.shape[1], scratch["total"]
  is_last_k = k_tile == tiles_k - 1
  # Where the tile reaches out of the stash, its rows lie so many further on in what was read.
  shift = visits.stash_row(visit, tile_rows) - visits.read_row(visit, tile_rows, stash_rows)[0]

  @pl.when(k_tile == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  def add(columns):
    total[...] += dot(d_out[...], w_down[...], columns=columns, dtype=dtype, contracting=1)

  pl.when(~is_last_k)(lambda: add(tile_k))

  @pl.when(is_last_k)
  def _():
    add(k % tile_k or tile_k)
    broadcast_weights = spread(beside.row_weights, scratch)
    if d_row_weights is not None:
      scratch["d_weights"][...] = jnp.zeros_like(scratch["d_weights"])
    for sums in scratch["d_group_rows"]:

      @pl.when(visits.is_first_of(visits.groups, visit))
      def _(sums=sums):
        sums[...] = jnp.zeros_like(sums)

    def activate_chunk(at, *of_group):
      is_in_group, _ = of_group
      rows, columns = at
      products = [_read_rows(stash, rows.start + shift, columns) for stash in stashes]
      group_rows = [
        jnp.broadcast_to(row[:, columns], is_in_group.shape) for row in beside.group_rows
      ]
      d_hidden = total[at].astype(hidden.dtype)
      *new, d_weights, d_groups = activate_backward(
        activation, d_hidden, *products, broadcast_weights(at), group_rows
      )
      for ref, rows_of in zip((d_gate, d_up, hidden), new, strict=True):
        put(ref, at, rows_of, *of_group)
      if n % tile_columns:  # The last tile has columns that are not there.
        ids = lax.broadcasted_iota(jnp.int32, is_in_group.shape, 1)
        is_there = ids + columns.start < n - column * tile_columns
        d_weights = None if d_weights is None else jnp.where(is_there, d_weights, 0)
      if d_weights is not None:
        parts = [d_weights[:, i : i + LANES] for i in range(0, columns.size, LANES)]
        scratch["d_weights"][rows, :] += functools.reduce(jnp.add, parts)
      for sums, d_rows in zip(scratch["d_group_rows"], d_groups, strict=True):
        d_rows = jnp.where(is_in_group, d_rows, 0)
        sums[:, columns] += d_rows[:ALIGN] + d_rows[ALIGN:]

    in_chunks(visits, visit, hidden.shape, activate_chunk)
    is_known, nan = visits.is_stored(), jnp.float32(jnp.nan)

    @pl.when(~is_known)  # An activation may hide that what it is given is NaN.
    def _():
      for ref in (d_gate, d_up, hidden):
        ref[...] = jnp.full_like(ref, nan)

    if d_row_weights is not None:
      sums = jnp.sum(scratch["d_weights"][...].T, axis=0, keepdims=True)
      sums = jnp.where(is_known, sums, nan)
      first, last = visits.rows_of_group(visit, tile_rows)
      row = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
      d_row_weights[...] = jnp.where((row >= first) & (row < last), sums, d_row_weights[...])
    for sums, d_rows in zip(scratch["d_group_rows"], d_group_rows, strict=True):

      @pl.when(visits.is_last_of(visits.groups, visit, number))
      def _(sums=sums, d_rows=d_rows):
        d_rows[...] = jnp.where(is_known, jnp.sum(sums[...], axis=0, keepdims=True), nan)


def _read_rows(stash, row, columns):
  """Returns rows from `row` on of what was read of a stash, float32.

  By HBM tiles: one that would lie outside has no rows of the push.
  """
  last = stash.shape[0] - ALIGN
  starts = (jnp.clip(row + i, 0, last) for i in range(0, CHUNK_ROWS, ALIGN))
  tiles = [stash[pl.ds(pl.multiple_of(first, ALIGN), ALIGN), columns] for first in starts]
  return jnp.concatenate([tile.astype(jnp.float32) for tile in tiles], axis=0)
