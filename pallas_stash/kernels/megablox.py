"""What is taken of megablox, in one place for a jax that moves it."""

from collections.abc import Callable
import dataclasses
import functools
import importlib
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.megablox import common, gmm
import jax.numpy as jnp

from pallas_stash.kernels.tiling import LANES, SUBLANES

# The package has a function where its module of that name would be.
_module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

# Megablox adds up numbers of several dtypes. What a strict mode refuses does not change with it.
standard_promotion = functools.partial(jax.numpy_dtype_promotion, "standard")

Tiling = tuple[int, int, int]  # Tiles of rows, of k and of n.


@dataclasses.dataclass(frozen=True)
class Megablox:
  """Megablox `gmm` with its static arguments, which it has the meaning of."""

  preferred_element_type: Any
  tiling: Tiling | Callable[[int, int, int], Tiling | None]
  transpose_rhs: bool
  interpret: bool

  def __call__(
    self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array | None
  ) -> jax.Array:
    """Returns lhs @ rhs[group of the row]; differentiable in both."""
    options = self.preferred_element_type, self.tiling, group_offset, None
    group_sizes = within(group_sizes, lhs.shape[0])
    with standard_promotion():
      # By position: megablox declares its static arguments by their numbers.
      return gmm(lhs, rhs, group_sizes, *options, self.transpose_rhs, self.interpret)

  @functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # Without what is not used.
  def gradient(
    self,
    of: str,
    d_out: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
  ) -> jax.Array:
    """Returns the gradient of "lhs" or "rhs", of which the other alone has an influence."""
    _, vjp = jax.vjp(lambda lhs, rhs: self(lhs, rhs, group_sizes, group_offset), lhs, rhs)
    with standard_promotion():
      return dict(zip(("lhs", "rhs"), vjp(d_out), strict=True))[of]

  def takes(self, shape: tuple[int, int, int], *dtypes: Any) -> bool:
    """Returns whether megablox multiplies (m, k) and (k, n) of these dtypes; all is static."""
    tiles = self.tiles(*shape)
    if tiles is None:  # It says itself that it has none.
      return True
    rows, *columns = tiles
    is_known = all(jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) for dtype in dtypes)
    is_tiled = shape[0] % rows == 0 and rows % SUBLANES == 0
    return is_known and is_tiled and all(size % LANES == 0 for size in columns)

  def tiles(self, m: int, k: int, n: int) -> Tiling | None:
    """Returns the tiles of a matmul of [m, k] and [k, n]; None if there are none for it."""
    tiling = self.tiling(m, k, n) if callable(self.tiling) else self.tiling
    return tiling and tuple(tiling)


def within(group_sizes: jax.Array, total_rows: int) -> jax.Array:
  """Returns int32[groups], the rows of groups that lie inside of a buffer of so many rows.

  Of groups that reach past its end there would be more visits than there are places for in scalar
  memory.
  """
  ends = jnp.cumsum(jnp.clip(group_sizes, 0, total_rows), dtype=jnp.int32)
  ends = jnp.minimum(ends, total_rows)
  return ends - jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])


def group_metadata(
  group_sizes: jax.Array,
  total_rows: int,
  tile_rows: int,
  first_group: jax.Array,
  groups_here: int,
  visit_empty_groups: bool,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Returns which row tiles a grouped matmul visits, as megablox does.

  Args:
    group_sizes: int32[groups].
    total_rows: static, rows of the buffer, a multiple of `tile_rows`.
    tile_rows: static, rows of a tile.
    first_group: int32[], of those to visit.
    groups_here: static, how many those are.
    visit_empty_groups: whether a group without rows is visited once.

  Returns:
    (first row of each group and the end of the last, int32[groups + 1]; group of each visit; tile
    of each visit), and int32[], the number of visits.
  """
  with standard_promotion():
    return _module.make_group_metadata(
      group_sizes=group_sizes,
      m=total_rows,
      tm=tile_rows,
      start_group=first_group,
      num_nonzero_groups=groups_here,
      visit_empty_groups=visit_empty_groups,
    )


def compute_dtype(lhs: jax.Array, rhs: jax.Array) -> Any:
  """Returns the dtype that two operands are multiplied in."""
  return jnp.dtype(common.select_input_dtype(lhs, rhs))
