"""The forward kernel of the expert MLP on TPU: gate and up products go straight to the stash.

    x tile ---two dots---> accumulators ---activation---> hidden
                                \\___DMA, once for each tile___> stash

So neither product ever exists at worst-case size. Rows lie in the stash as `grouped` says.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels import grouped, megablox
from pallas_stash.kernels.activation import (
  activate,
  Activation,
  as_blocks,
  Beside,
  in_chunks,
  put,
  specs_of,
  spread,
  weights_scratch,
)
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
from pallas_stash.kernels.tiling import LANES, round_up
from pallas_stash.kernels.visits import ALIGN, Place, Visits


def fits(
  shape: tuple[int, int, int], stashes: Sequence[Any], dtypes: Any, options: megablox.Megablox
) -> bool:
  """Returns whether the kernels here take an MLP; all arguments are static.

  Args:
    shape: (m, k, n) of the gate and the up product.
    stashes: of gate, of up, and perhaps of x: [stash_rows, width], arrays or shapes.
    dtypes: of all operands and results.
    options: of the products.
  """
  tiles = options.tiles(*shape)
  if tiles is None:
    return False
  (m, k, n), (tile_rows, tile_k, tile_n) = shape, tiles
  gate, _, *of_x = stashes
  # Read as the left-hand side of a matmul is; rows of x are stored by whatever tiles there are.
  is_read = grouped.fits((m, n, k), gate, dtypes, (tile_rows, tile_n, tile_k))
  return (
    is_read and tile_k % LANES == 0 and all(grouped.fits(shape, x, dtypes, tiles) for x in of_x)
  )


def forward(
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  group_sizes: jax.Array,
  beside: Beside,
  stashes: Sequence[jax.Array],
  place: Place | None,
  *,
  activation: Activation,
  options: megablox.Megablox,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:
  """Returns `activate` of the products of x with both matrices of each group, and stores those.

  Args:
    x: [m, k]. What it holds outside of groups has no influence.
    w_gate, w_up: [groups, k, n].
    group_sizes: int32[groups]; they are a prefix of the rows.
    beside: for `activate`.
    stashes: [stash_rows, width] for gate, for up, and for x where it is to be stored too; or none.
    place: where the rows are in `x`, and where in the stashes they go to; None without those.
    activation: static, an elementwise function of gate and up, float32, and of `group_rows`.
    options: static; `fits` says which.
    interpret: False, or `pltpu.InterpretParams`.

  Returns:
    hidden: [m, n] of the dtype of `x`; undefined outside of groups.
    *stashes: with the rows, as `grouped.gmm_and_keep` leaves them.
  """
  m, k = x.shape
  groups, _, n = w_gate.shape
  tm, tk, tn = options.tiles(m, k, n)
  tn = min(tn, round_up(n, LANES))
  tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)
  place = Place(*[jnp.int32(0)] * 3) if place is None else place
  visits, number = Visits.of(group_sizes, place, m, tm, jnp.int32(0), groups, False)

  tile = lambda *sizes_and_map: pl.BlockSpec(sizes_and_map[:-1], index_map(sizes_and_map[-1]))
  weights = tile(None, tk, tn, lambda column, visit, k, visits: (visits.groups[visit], k, column))
  of_hbm = [pl.BlockSpec(memory_space=pltpu.HBM) for _ in stashes]
  scratch = {"totals": [pltpu.VMEM((tm, tn), jnp.float32)] * 2} | weights_scratch(beside, tm)
  if stashes:
    # In VMEM as in HBM, by tiles of eight rows, of which a DMA takes some. What is interpreted has
    # no tiles, and could not be seen as rows.
    staged = pltpu.VMEM((tm, tn) if interpret else (tm // ALIGN, ALIGN, tn), x.dtype)
    scratch |= {"staged": [staged] * 2, "semaphores": [pltpu.SemaphoreType.DMA] * len(stashes)}
  kernel = functools.partial(
    _forward,
    k=k,
    activation=activation,
    dtypes=[megablox.compute_dtype(x, weights) for weights in (w_gate, w_up)],
  )
  operands = x, w_gate, w_up, as_blocks(beside, tm), list(stashes)
  aliased = len(jax.tree.leaves(operands)) - len(stashes)
  hidden, stashes = call(
    kernel,
    visits,
    (tiles_n, number, tiles_k),
    operands=operands,
    in_specs=[
      tile(tm, tk, lambda column, visit, k, visits: (visits.tiles[visit], k)),
      weights,
      weights,
      specs_of(beside, tm, tn),
      of_hbm,
    ],
    out_specs=[
      tile(tm, tn, lambda column, visit, k, visits: (visits.tiles[visit], column)),
      of_hbm,
    ],
    out_shape=[like(x, (m, n)), [like(stash, stash.shape) for stash in stashes]],
    scratch_shapes=[scratch],
    aliases={aliased + i: 1 + i for i in range(len(stashes))},
    cost_estimate=cost(
      (m, k, 2 * n),
      (tiles_n * m * k, x.dtype),
      (2 * k * n * visits.tiles.size, w_gate.dtype),
      (m * n, x.dtype),
    ),
    interpret=interpret,
    name="stash_gate_up",
  )
  return hidden, *stashes


def _forward(
  visits,
  x,
  w_gate,
  w_up,
  beside,
  _,
  hidden,
  stashes,
  scratch,
  *,
  k,
  activation,
  dtypes,
):
  """The kernel of `forward`. A step is a column tile of `hidden`, a visit, and a tile of k."""
  column, visit, k_tile = map(pl.program_id, range(3))
  number, tiles_k = pl.num_programs(1), pl.num_programs(2)
  is_last_k, is_first_of_tile = k_tile == tiles_k - 1, visits.is_first_of(visits.tiles, visit)
  tile_k, totals = x.shape[1], scratch["totals"]
  # As rows, what lies in tiles of eight of them.
  as_rows = lambda ref: ref if len(ref.shape) == 2 else ref.reshape(hidden.shape)
  staged = list(map(as_rows, scratch.get("staged", ())))

  def stores_of(at_visit):
    """Returns the DMAs of both products, of the tile of a visit, each with whether it is due."""
    to = zip(staged, stashes, scratch.get("semaphores", ()), strict=False)
    return [own_rows_to(visits, at_visit, *refs, column) for refs in to]

  stores_of_x = []
  for stash in stashes[2:]:
    has_rows, copy = own_rows_to(visits, visit, x, stash, scratch["semaphores"][2], k_tile)
    stores_of_x = [((column == 0) & is_first_of_tile & has_rows, copy)]
  start(stores_of_x)

  @pl.when(k_tile == 0)
  def _():
    for total in totals:
      total[...] = jnp.zeros_like(total)

  def add(columns):
    for weights, total, dtype in zip((w_gate, w_up), totals, dtypes, strict=True):
      total[...] += dot(x[...], weights[...], columns=columns, dtype=dtype, contracting=0)

  pl.when(~is_last_k)(lambda: add(tile_k))

  @pl.when(is_last_k)
  def _():
    add(k % tile_k or tile_k)
    if staged:
      # The stores of a tile are started behind its last visit, and the next one needs their room.
      before = stores_of(jnp.maximum(visit - 1, 0))
      wait([((visit > 0) & is_first_of_tile & is_due, dma) for is_due, dma in before])
    broadcast_weights = spread(beside.row_weights, scratch)

    def activate_chunk(at, *of_group):
      is_in_group, _ = of_group
      products = [total[at].astype(hidden.dtype) for total in totals]
      group_rows = [jnp.broadcast_to(row[:, at[1]], is_in_group.shape) for row in beside.group_rows]
      weights = broadcast_weights(at)
      new = activate(activation, *products, weights, group_rows)
      # Other rows of the tile are of other groups, or padding.
      for ref, rows in zip((hidden, *staged), (new, *products[: len(staged)]), strict=True):
        put(ref, at, rows, *of_group)

    in_chunks(visits, visit, hidden.shape, activate_chunk)
    if staged:
      is_last_of_tile = visits.is_last_of(visits.tiles, visit, number)
      stores = [(is_last_of_tile & is_due, dma) for is_due, dma in stores_of(visit)]
      start(stores)
      wait([((visit == number - 1) & is_due, dma) for is_due, dma in stores])

  wait(stores_of_x)
