"""What the kernels of grouped matmuls have in common: how they are called, and their dots."""

import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels.tiling import LANES
from pallas_stash.kernels.visits import ALIGN, Visits

VMEM_BYTES = 32 * 2**20  # Of a core's 64 MiB or more, unless the tiles need more.


def dot(lhs, rhs, *, columns, dtype, contracting):
  """Returns the product of two tiles, of whose k the first `columns` are there."""

  def of_columns(x, axis):
    if columns == x.shape[axis]:
      return x.astype(dtype)
    is_there = lax.broadcasted_iota(jnp.int32, x.shape, axis) < columns
    return jnp.where(is_there, x.astype(jnp.float32), jnp.float32(0)).astype(x.dtype).astype(dtype)

  return lax.dot_general(
    of_columns(lhs, 1),
    of_columns(rhs, contracting),
    dimension_numbers=(((1,), (contracting,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


def own_rows_to(visits, visit, tile, stash, semaphore, column_tile):
  """Returns the DMA of a push's own rows from a tile to the stash, and whether there are any.

  Args:
    visits, visit: of the tile.
    tile: [tile rows, tile columns], in VMEM. Tiles of columns divide the width of the stash, or
      there is one, which has as many columns or more.
    stash: [stash_rows, width], in HBM.
    semaphore: for it.
    column_tile: which tile along the columns.
  """
  tile_rows, tile_columns = tile.shape
  columns = min(tile_columns, stash.shape[1])
  first, rows = visits.own_rows(visit, tile_rows)
  row = pl.multiple_of(visits.stash_row(visit, tile_rows) + first, ALIGN)
  column = pl.multiple_of(column_tile * tile_columns, LANES)
  to = stash.at[pl.ds(row, rows), pl.ds(column, columns)]
  copy = pltpu.make_async_copy(tile.at[pl.ds(first, rows), pl.ds(0, columns)], to, semaphore)
  return rows > 0, copy


def start(copies):
  for is_due, copy in copies:
    pl.when(is_due)(copy.start)


def wait(copies):
  for is_due, copy in copies:
    pl.when(is_due)(copy.wait)


def call(kernel, visits, grid, *, operands, out_shape, aliases=None, interpret, name, **options):
  """Returns what a kernel of `visits` makes of the operands.

  Args:
    kernel: of (visits, *operands, *results, *scratch).
    visits: `Visits`.
    grid: of three axes, the first of them parallel.
    operands, out_shape: pytrees, of which specs are, too.
    aliases: which leaf of the results is which leaf of the operands.
    interpret: False, or `pltpu.InterpretParams`.
    name: of the kernel.
    **options: specs and scratch, and what else `pl.pallas_call` takes.
  """
  scalars = len(visits)
  specs = {key: options.pop(key) for key in ("in_specs", "out_specs", "scratch_shapes")}
  vmem_bytes = _vmem_bytes(specs, jax.tree.leaves((operands, out_shape)))
  operands = *visits, *operands
  if not interpret:
    # A BlockSpec alone leaves XLA free to put what is small into VMEM, and the kernel reads HBM;
    # of scalars, too, that are copied to scalar memory.
    in_hbm = lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM)
    operands = jax.tree.map(in_hbm, operands)
    out_shape = jax.tree.map(pltpu.HBM.like, out_shape)
  out = pl.pallas_call(
    lambda *refs: kernel(Visits(*refs[:scalars]), *refs[scalars:]),
    grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=scalars, grid=grid, **specs),
    out_shape=out_shape,
    input_output_aliases={scalars + i: out for i, out in (aliases or {}).items()},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary"),
      # What `Visits` says of tiles and groups lies inside.
      disable_bounds_checks=True,
      vmem_limit_bytes=vmem_bytes,
    ),
    interpret=interpret,
    name=name,
    **options,
  )(*operands)
  # The compiler of libtpu 0.0.42 copies, or refuses, a result in HBM that a program just returns.
  return out if interpret else lax.optimization_barrier(out)


def index_map(tile_of):
  """Returns an index map from `tile_of(*step, visits)`."""
  return lambda i, j, k, *visits: tile_of(i, j, k, Visits(*visits))


def cost(shape, *moved):
  """Returns what megablox says of a matmul: as if every row were in a group.

  Args:
    shape: (m, k, n).
    *moved: elements and their dtype.
  """
  num_bytes = sum(elements * jnp.dtype(dtype).itemsize for elements, dtype in moved)
  flops = 2 * math.prod(shape)
  return pl.CostEstimate(flops=flops, bytes_accessed=num_bytes, transcendentals=0)


def _vmem_bytes(specs, arrays):
  """Returns the VMEM that a kernel may take: blocks twice, and as float32 values; and scratch."""
  num_bytes = sum(
    4 * math.prod(getattr(x, "shape", ())) for x in jax.tree.leaves(specs["scratch_shapes"])
  )
  blocks = jax.tree.leaves((specs["in_specs"], specs["out_specs"]))
  for spec, array in zip(blocks, arrays, strict=True):
    if spec.block_shape:
      sizes = (getattr(size, "block_size", size) or 1 for size in spec.block_shape)
      num_bytes += math.prod(sizes) * (2 * array.dtype.itemsize + 4)
  return max(VMEM_BYTES, num_bytes)


def like(array, shape, dtype=None):
  # Of the operand's type, which inside shard_map knows the mesh axes along which it varies.
  dtype = jnp.dtype(array.dtype if dtype is None else dtype)
  return jax.typeof(array).update(shape=shape, dtype=dtype, weak_type=False)
