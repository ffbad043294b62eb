"""Grouped matmuls in place: the bits of megablox, and no row of the stash but their own."""

import functools

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import kernels
from pallas_stash.kernels import grouped, megablox
from pallas_stash.kernels.visits import Place
from tests.helpers.checks import assert_trees_equal, long, once
from tests.helpers.counting import count_rows
from tests.helpers.sampling import run_sampled
from tests.helpers.support import assert_same_bits, ON_TPU

M, N, TILE_ROWS, TILE = 256, 256, 64, 128
INTERPRET = False if ON_TPU else kernels.INTERPRET


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run(k, options, groups_here, operands, place, is_stored, sizes, offset):
  """Returns what the kernels make of a matmul, and what megablox does."""
  lhs, rhs, stash, d_out = operands
  kernel = {"options": options, "interpret": INTERPRET}
  stored = place._replace(start=jnp.where(is_stored, place.start, -1))
  out, kept = grouped.gmm_and_keep(lhs, rhs, stash, sizes, offset, stored, **kernel)
  # What other rows of the stash hold has no influence.
  row = jnp.arange(stash.shape[0])
  is_own = (row >= place.start) & (row < place.start + place.rows)
  poisoned = jnp.where(is_own[:, None], kept, jnp.nan)
  of_rhs = {"k": k, "dtype": rhs.dtype, "groups_here": groups_here}
  d_rhs = grouped.tgmm(poisoned, d_out, sizes, offset, stored, **of_rhs, **kernel)
  if options.transpose_rhs:
    d_rhs = d_rhs.swapaxes(1, 2)
  expected = options(lhs, rhs, sizes, offset)
  expected_d_rhs = options.gradient("rhs", d_out, lhs, rhs, sizes, offset)
  return out, kept, d_rhs, expected, expected_d_rhs


def check(
  sizes,
  dtype="float32",
  *,
  start=24,
  rows_behind=TILE_ROWS + 8,
  offset=0,
  groups_here=None,
  k=256,
  transpose_rhs=False,
  is_stored=True,
):
  """Checks one matmul.

  Args:
    sizes: rows of each group, M at most together.
    dtype: of everything.
    start: stash row of the tile that the push starts in.
    rows_behind: of the stash, behind the push.
    offset, groups_here: which groups `rhs` has; by default all.
    k, transpose_rhs: of the matmul.
    is_stored: whether the rows are.
  """
  groups_here = len(sizes) if groups_here is None else groups_here
  first, last = sum(sizes[:offset]), sum(sizes[: offset + groups_here])
  start += first % 8
  owned = slice(start // 8 * 8, -(-(start + last - first) // 8) * 8)
  stash_rows = max(TILE_ROWS, owned.stop + rows_behind)
  keys = jax.random.split(jax.random.key(1), 3)
  normal = lambda key, shape: jax.random.normal(key, shape).astype(dtype)
  is_in_group = (np.arange(M) >= first) & (np.arange(M) < last)
  operands = (
    jnp.where(is_in_group[:, None], normal(keys[0], (M, k)), jnp.nan),
    normal(keys[1], (groups_here, N, k) if transpose_rhs else (groups_here, k, N)),
    jnp.full((stash_rows, -(-k // 128) * 128), -7, dtype),
    normal(keys[2], (M, N)),
  )
  options = megablox.Megablox(dtype, (TILE_ROWS, TILE, TILE), transpose_rhs, not ON_TPU)
  assert grouped.fits((M, k, N), operands[2], (dtype,), options.tiling)
  place = Place(*map(jnp.int32, (first, last - first, start)))
  scalars = place, is_stored, jnp.array(sizes, jnp.int32), jnp.int32(offset)
  out, kept, d_rhs, expected, expected_d_rhs = run(k, options, groups_here, operands, *scalars)
  assert_same_bits(out[is_in_group], expected[is_in_group])
  own = slice(start, start + last - first)
  if is_stored:
    assert_same_bits(kept[own, :k], operands[0][is_in_group])
    assert_same_bits(d_rhs, expected_d_rhs)
  else:
    assert_same_bits(kept, operands[2])
    has_rows = np.array(sizes[offset : offset + groups_here]) > 0
    assert bool(jnp.isnan(d_rhs[has_rows]).all())
    assert_trees_equal(d_rhs[~has_rows], jnp.zeros_like(d_rhs[~has_rows]))
  for others in slice(owned.start), slice(owned.stop, None):
    assert_same_bits(kept[others], operands[2][others])


RAGGED = [50, 0, 71, 30]
AT_THE_END = {"start": 64, "rows_behind": 0}
FILLS_IT = {"start": 0, "rows_behind": 0}


@pytest.mark.parametrize(
  "sizes, options",
  [
    long(RAGGED, {}),
    once(RAGGED, {"dtype": "bfloat16"} | AT_THE_END),
    long([3, 1, 0, 2], AT_THE_END),  # Fewer than a tile: it reaches out of the stash.
    once([50, 5, 71, 30], {"offset": 1, "groups_here": 2} | FILLS_IT),  # At both of its ends.
    long(RAGGED, {"k": 192, "transpose_rhs": True}),
    long(RAGGED, {"is_stored": False}),
    *(long(sizes, {}) for sizes in ([64, 64], [0, 0, 0], [3, 1, 0, 2], [0, 17, 0, 128, 0])),
    *(long(sizes, AT_THE_END) for sizes in (RAGGED, [0, 0, 0], [100, 156])),
    *(long(sizes, FILLS_IT) for sizes in (RAGGED, [3, 1, 0, 2], [100, 156])),
    *(long(RAGGED, {"dtype": "bfloat16", "transpose_rhs": t}) for t in (False, True)),
    *(
      long([50, 5, 71, 30], {"offset": offset, "groups_here": here, "dtype": dtype} | place)
      for offset, here in ((0, 2), (2, 2), (3, 1))
      for dtype, place in (("float32", {}), ("bfloat16", FILLS_IT))
    ),
  ],
)
def test_bits_are_those_of_megablox(sizes, options):
  check(sizes, **options)


@pytest.mark.long
def test_sampled():
  def check_sample(sizes, offset, here, start, rows_behind):
    offset = min(offset, len(sizes) - 1)
    groups = {"offset": offset, "groups_here": min(here, len(sizes) - offset)}
    check(sizes, start=8 * start, rows_behind=8 * rows_behind, **groups)

  few = st.integers(0, 10)
  sizes = st.lists(st.sampled_from([0, 1, 7, 8, 40, 63, 64, 65]), min_size=1, max_size=3)
  sampled = {"sizes": sizes, "offset": st.integers(0, 2), "here": st.integers(1, 3)}
  run_sampled(check_sample, max_examples=15, start=few, rows_behind=few, **sampled)


@pytest.mark.once
@pytest.mark.skipif(ON_TPU, reason="counts the DMAs of interpreted kernels")
def test_each_row_is_stored_once(monkeypatch):
  """However many groups share its tile, and column tiles the result has."""
  rows = count_rows(monkeypatch)
  run.clear_cache()
  check(RAGGED, k=256)
  jax.effects_barrier()
  run.clear_cache()
  assert sum(rows) == 152 * 2 and len(rows) == 3 * 2  # Three tiles of rows, two of k.


@pytest.mark.parametrize(
  "change",
  [
    {"stash_rows": TILE_ROWS - 8},  # A tile does not fit into the stash,
    {"tiles": (TILE_ROWS, 192, TILE)},  # columns are no multiple of 128,
    {"width": 384, "tiles": (TILE_ROWS, 256, TILE)},  # or do not divide it;
    {"tiles": (TILE_ROWS + 8, TILE, TILE)},  # a tile of rows is not of HBM tiles;
    {"m": M + 8},  # rows are no multiple of it;
    {"dtype": "float8_e4m3fn"},  # of bytes.
  ],
)
def test_what_does_not_fit(change):
  case = {"m": M, "width": 256, "stash_rows": 128, "dtype": "float32"} | change
  stash = jax.ShapeDtypeStruct((case["stash_rows"], case["width"]), case["dtype"])
  tiles = case.get("tiles", (TILE_ROWS, TILE, TILE))
  fits = lambda m, stash, tiles: grouped.fits((m, 256, N), stash, (stash.dtype,), tiles)
  assert not fits(case["m"], stash, tiles)
  assert fits(M, jax.ShapeDtypeStruct((128, 256), "float32"), (TILE_ROWS, TILE, TILE))
