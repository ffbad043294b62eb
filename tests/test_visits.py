"""Which row tiles a grouped matmul visits, and where their rows lie: scalar arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash.kernels import megablox
from pallas_stash.kernels.visits import ALIGN, Place, Visits

M, TILE_ROWS = 256, 64


@pytest.mark.parametrize(
  "sizes, first, here, place",
  [
    ([50, 0, 71, 30], 1, 1, (50, 0, 152)),  # A push of no rows starts anywhere.
    ([200, 200, 200], 0, 3, (0, 0, -1)),  # Groups that reach past the end,
    ([200, 200, 200], 2, 1, (400, 0, -1)),
    ([64, 64], 1, 2, (64, 64, 8)),  # and more groups here than there are.
  ],
)
def test_visits_stay_inside(sizes, first, here, place):
  place = Place(*map(jnp.int32, place))
  args = jnp.array(sizes, jnp.int32), place, M, TILE_ROWS, jnp.int32(first), here
  for with_empty in False, True:
    visits, number = Visits.of(*args, with_empty)
    assert 0 <= number <= visits.tiles.shape[0]
    groups_here, read_rows, own_rows = (of[:number] for of in walk(visits))
    assert (0 <= groups_here).all() and (groups_here < here).all()
    assert (0 <= visits.tiles[:number]).all() and (visits.tiles[:number] < M // TILE_ROWS).all()
    assert (visits.groups[:number] < len(sizes)).all()
    assert (read_rows % ALIGN == 0).all()
    assert (own_rows == 0).all() or place.rows > 0


@jax.jit
def walk(visits):
  """Returns of each visit its group here, the row to read, and how many are its own."""

  def of_visit(visit):
    read_row, _ = visits.read_row(visit, TILE_ROWS, 256)
    return visits.group_here(visit), read_row, visits.own_rows(visit, TILE_ROWS)[1]

  return jax.lax.map(of_visit, jnp.arange(visits.tiles.shape[0]))


@pytest.mark.parametrize("with_empty", [False, True])
@pytest.mark.parametrize("sizes", [[50, 0, 71, 30], [0, 0], [64, 64, 128], [1], [0, 256, 0]])
@pytest.mark.parametrize("first, here", [(0, None), (1, 1)])
def test_megablox_visits_each_tile_of_a_group(sizes, first, here, with_empty):
  """What the kernels count on, in this jax."""
  here = here or len(sizes)
  args = jnp.array(sizes, jnp.int32), M, TILE_ROWS, jnp.int32(first), here, with_empty
  (starts, groups, tiles), number = megablox.group_metadata(*args)
  ends = np.cumsum(sizes)
  np.testing.assert_array_equal(starts, [0, *ends])
  expected = []
  for group in range(first, min(first + here, len(sizes))):
    start, end = ends[group] - sizes[group], ends[group]
    tiles_of_it = range(start // TILE_ROWS, -(-end // TILE_ROWS)) if sizes[group] else ()
    expected += [(group, tile) for tile in tiles_of_it]
    if with_empty and not sizes[group]:
      expected.append((group, None))
  visits = list(zip(groups.tolist(), tiles.tolist(), strict=True))[: int(number)]
  assert [(g, t if sizes[g] else None) for g, t in visits] == expected
