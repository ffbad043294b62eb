"""Grouped matmuls on TPU that write rows to a stash on their way, or read them there in place.

They are megablox's, with its row tiles, and the same bits come out. The rows of a push lie in the
stash as in `lhs`, so many rows further on, and that is a multiple of an HBM tile: so a row tile can
be read where it lies, and written by a DMA of just the HBM tiles that are the push's own.

    gmm:   lhs tile in VMEM --dot--> accumulator          tgmm:  row tile of the stash --dot-->
                   \\___DMA, once for each tile___> stash                 d_out tile ___/
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels import megablox
from pallas_stash.kernels.grouped_call import (
  call,
  cost,
  dot,
  index_map,
  like,
  own_rows_to,
  start,
  wait,
)
from pallas_stash.kernels.tiling import LANES
from pallas_stash.kernels.visits import ALIGN, Place, Visits


def fits(shape: tuple[int, int, int], stash: Any, dtypes: Any, tiles: megablox.Tiling) -> bool:
  """Returns whether the kernels here take a matmul; all arguments are static.

  Args:
    shape: (m, k, n) of the matmul.
    stash: [stash_rows, width], array or shape, for rows of k elements.
    dtypes: of all operands and results.
    tiles: rows of a tile, and its columns along k and n.
  """
  tile_rows, tile_k, _ = tiles
  stash_rows, width = stash.shape
  is_known = all(jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) for dtype in dtypes)
  # A register holds two HBM tiles of two bytes an element.
  is_tiled = shape[0] % tile_rows == 0 and tile_rows % (2 * ALIGN) == 0
  is_split = tile_k % LANES == 0 and width % min(tile_k, width or 1) == 0
  return is_known and is_tiled and is_split and stash_rows >= tile_rows and width > 0


def gmm_and_keep(
  lhs: jax.Array,
  rhs: jax.Array,
  stash: jax.Array,
  group_sizes: jax.Array,
  group_offset: jax.Array,
  place: Place,
  *,
  options: megablox.Megablox,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Multiplies the rows of each group with its matrix, and stores them in the stash, in place.

  Args:
    lhs: [m, k]. What it holds outside of groups has no influence.
    rhs: [groups here, k, n], or [groups here, n, k] if it is transposed.
    stash: [stash_rows, width], `width` at least k.
    group_sizes: int32[groups].
    group_offset: int32[], the first group that `rhs` has.
    place: where the rows of those groups are in `lhs`, and where in the stash they go to.
    options: static; `fits` says which.
    interpret: False, or `pltpu.InterpretParams`.

  Returns:
    out: [m, n], as megablox has it.
    stash: with the rows. Columns from k on are undefined in them, as are those up to seven rows
      that the push owns at either end; all others keep every bit.
  """
  groups_here, *matrix = rhs.shape
  k, n = matrix[::-1] if options.transpose_rhs else matrix
  m = lhs.shape[0]
  tm, tk, tn = options.tiles(m, k, n)
  visits, number = Visits.of(group_sizes, place, m, tm, group_offset, groups_here, False)
  tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)

  def rhs_tile(column, visit, k_tile, visits):
    tile = (column, k_tile) if options.transpose_rhs else (k_tile, column)
    return visits.group_here(visit), *tile

  rhs_shape = (None, tn, tk) if options.transpose_rhs else (None, tk, tn)
  of_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
  kernel = functools.partial(
    _gmm_and_keep,
    k=k,
    dtype=megablox.compute_dtype(lhs, rhs),
    contracting=int(options.transpose_rhs),
  )
  out, stash = call(
    kernel,
    visits,
    (tiles_n, number, tiles_k),
    operands=(lhs, rhs, stash),
    in_specs=[
      pl.BlockSpec(
        (tm, tk), index_map(lambda column, visit, k_tile, visits: (visits.tiles[visit], k_tile))
      ),
      pl.BlockSpec(rhs_shape, index_map(rhs_tile)),
      of_hbm,
    ],
    out_specs=[
      pl.BlockSpec(
        (tm, tn), index_map(lambda column, visit, k_tile, visits: (visits.tiles[visit], column))
      ),
      of_hbm,
    ],
    out_shape=[like(lhs, (m, n), options.preferred_element_type), like(stash, stash.shape)],
    scratch_shapes=[pltpu.VMEM((tm, tn), jnp.float32), pltpu.SemaphoreType.DMA],
    aliases={2: 1},
    cost_estimate=cost(
      (m, k, n),
      (tiles_n * m * k, lhs.dtype),
      (k * n * visits.tiles.size, rhs.dtype),
      (m * n, options.preferred_element_type),
    ),
    interpret=interpret,
    name="stash_gmm",
  )
  if groups_here < group_sizes.shape[0]:  # As megablox leaves the rows of other groups.
    row = jnp.arange(m, dtype=jnp.int32)
    is_here = (row >= place.first) & (row < place.first + place.rows)
    out = jnp.where(is_here[:, None], out, jnp.zeros_like(out))
  return out, stash


def _gmm_and_keep(visits, lhs, rhs, _, out, stash, total, semaphore, *, k, **static):
  """The kernel of `gmm_and_keep`. A step is a column tile of `out`, a visit, and a tile of k."""
  visit, k_tile, tiles_k = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
  is_last = k_tile == tiles_k - 1
  tile_k = lhs.shape[1]

  is_turn = (pl.program_id(0) == 0) & visits.is_first_of(visits.tiles, visit)
  has_rows, copy = own_rows_to(visits, visit, lhs, stash, semaphore, k_tile)
  stores = [(is_turn & has_rows, copy)]
  start(stores)

  @pl.when(k_tile == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  def add(columns):
    total[...] += dot(lhs[...], rhs[...], columns=columns, **static)

  pl.when(~is_last)(lambda: add(tile_k))

  @pl.when(is_last)
  def _():
    add(k % tile_k or tile_k)
    # Other rows of the tile are of other groups, or padding.
    is_in_group = visits.is_in_group(visit, total.shape)
    out[...] = jnp.where(is_in_group, total[...], out[...].astype(jnp.float32)).astype(out.dtype)

  wait(stores)


def tgmm(
  stash: jax.Array,
  d_out: jax.Array,
  group_sizes: jax.Array,
  group_offset: jax.Array,
  place: Place,
  *,
  k: int,
  dtype: Any,
  groups_here: int,
  options: megablox.Megablox,
  interpret: Any = False,
) -> jax.Array:
  """Returns lhs[rows of each group].T @ d_out[rows of the group], `lhs` read in the stash.

  Args:
    stash: [stash_rows, width], with rows of `lhs`. What all others hold has no influence.
    d_out: [m, n]. What it holds outside of groups has no influence.
    group_sizes, group_offset, options, interpret: as of `gmm_and_keep`.
    place: where the rows of the groups here are in `lhs`, and where in the stash.
    k: static, columns of `lhs`.
    dtype: of the result.
    groups_here: static, how many groups, from `group_offset` on.

  Returns:
    [groups here, k, n]; zero of a group without rows, NaN of the others where the rows were not
    stored.
  """
  m, n = d_out.shape
  stash_rows, width = stash.shape
  tm, tk, tn = options.tiles(m, k, n)
  tk = min(tk, width)
  visits, number = Visits.of(group_sizes, place, m, tm, group_offset, groups_here, True)

  def stash_tile(column, k_tile, visit, visits):
    del column
    return visits.read_row(visit, tm, stash_rows)[0], pl.multiple_of(k_tile * tk, LANES)

  kernel = functools.partial(
    _tgmm, stash_rows=stash_rows, dtype=megablox.compute_dtype(stash, d_out)
  )
  return call(
    kernel,
    visits,
    (pl.cdiv(n, tn), pl.cdiv(k, tk), number),
    operands=(stash, d_out),
    in_specs=[
      pl.BlockSpec((pl.Element(tm), pl.Element(tk)), index_map(stash_tile)),
      pl.BlockSpec(
        (tm, tn), index_map(lambda column, k_tile, visit, visits: (visits.tiles[visit], column))
      ),
    ],
    out_specs=pl.BlockSpec(
      (None, tk, tn),
      index_map(lambda column, k_tile, visit, visits: (visits.group_here(visit), k_tile, column)),
    ),
    out_shape=like(d_out, (groups_here, k, n), dtype),
    scratch_shapes=[pltpu.VMEM((tk, tn), jnp.float32)],
    cost_estimate=cost(
      (m, k, n),
      (pl.cdiv(n, tn) * m * k, stash.dtype),
      (pl.cdiv(k, tk) * m * n, d_out.dtype),
      (groups_here * k * n, dtype),
    ),
    interpret=interpret,
    name="stash_tgmm",
  )


def _tgmm(visits, rows, d_out, out, total, *, stash_rows, dtype):
  """The kernel of `tgmm`. A step is a column tile of `out`, one of its row tiles, and a visit."""
  visit, number = pl.program_id(2), pl.num_programs(2)
  tile_rows = d_out.shape[0]
  _, roll_by = visits.read_row(visit, tile_rows, stash_rows)
  is_used = visits.is_stored() & ~visits.is_empty(visit)

  @pl.when(visits.is_first_of(visits.groups, visit))
  def _():
    total[...] = jnp.zeros_like(total)

  def add(rows):
    in_group = lambda x: jnp.where(visits.is_in_group(visit, x.shape), x, jnp.zeros_like(x))
    left = in_group(rows).swapaxes(0, 1).astype(dtype)
    right = in_group(d_out[...].astype(jnp.float32)).astype(dtype)
    total[...] += lax.dot(left, right, preferred_element_type=jnp.float32)

  @pl.when(is_used & (roll_by == 0))
  def _():
    add(rows[...].astype(jnp.float32))

  @pl.when(is_used & (roll_by != 0))
  def _():
    add(pltpu.roll(rows[...].astype(jnp.float32), roll_by, 0))

  @pl.when(visits.is_last_of(visits.groups, visit, number))
  def _():
    is_known = visits.is_stored() | visits.is_empty(visit)
    out[...] = jnp.where(is_known, total[...], jnp.float32(jnp.nan)).astype(out.dtype)
