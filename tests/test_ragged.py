"""RaggedRows: what it refuses, which layouts are valid, and the copies it asks for."""

import itertools

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import RaggedRows
from tests.helpers import ragged_rows
from tests.helpers.sampling import run_sampled
from tests.helpers.support import as_rows, layouts, start_rows

MOST = 2**31 - 1


@pytest.mark.parametrize(
  "args, message",
  [
    (([1.0], 4), r"group_sizes of dtype float32 must have an integer dtype\."),
    (([True], 4), r"group_sizes of dtype bool must have an integer dtype\."),
    (([[1]], 4), r"group_sizes of shape \(1, 1\) must have rank 1: \[groups\]\."),
    ((np.int32(1), 4), r"group_sizes of shape \(\) must have rank 1: \[groups\]\."),
    (([1], 4, [1.0]), r"group_starts of dtype float32 must have an integer dtype\."),
    (([1], 4, [[1]]), r"group_starts of shape \(1, 1\) must have rank 1: \[groups\]\."),
    (([1, 1], 4, [1]), r"group_starts of shape \(1,\) must .* of group_sizes, of shape \(2,\)\."),
    (([1], 0), r"total_rows=0 must be positive, and below 2\*\*31\."),
    (([1], -4), r"total_rows=-4 must be positive, and below 2\*\*31\."),
    (([1], 2**31), r"total_rows=2147483648 must be positive, and below 2\*\*31\."),
    (([1], 4.0), r"total_rows=4.0 must be a static int: the rows of the worst-case buffer\."),
    (([1], True), r"total_rows=True must be a static int: the rows of the worst-case buffer\."),
    (([1], None), r"total_rows=None must be a static int: the rows of the worst-case buffer\."),
  ],
)
def test_errors_name_the_value(args, message):
  with pytest.raises(ValueError, match=f"^{message}$"):
    RaggedRows(*args)


def test_total_rows_must_be_static():
  with pytest.raises((ValueError, TypeError), match="total_rows|concrete|Concrete|integer"):
    jax.jit(lambda rows: RaggedRows([1], rows).num_rows())(4)
  assert RaggedRows([1], np.int64(4)).total_rows == 4


@pytest.mark.parametrize("stash_rows", [MOST, MOST - 3])
def test_row_numbers_must_fit_int32(stash_rows):
  message = rf"total_rows=4 and stash_rows={stash_rows} must sum to less than 2\*\*31"
  for runs in (RaggedRows([1], 4).compact_runs, RaggedRows([1], 4, [0]).expand_runs):
    with pytest.raises(ValueError, match=message):
      runs(0, stash_rows)


def is_valid(sizes, total_rows, starts):
  """The definition in plain integers. Empty groups may be anywhere."""
  if starts is None:
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
  groups = [(first, first + size) for first, size in zip(starts, sizes, strict=True) if size]
  return (
    all(size >= 0 for size in sizes)
    and all(0 <= first and last <= total_rows for first, last in groups)
    and all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(groups, 2))
  )


@st.composite
def any_groups(draw):
  """Sizes and starts (or None), valid or not, of any integer dtype."""

  def groups():
    dtype = draw(st.sampled_from(["int32", "uint32", "int16", "int8", "uint8"]))
    info = np.iinfo(dtype)
    rows = st.integers(max(info.min, -1), 9)
    if draw(st.booleans()):
      rows |= st.sampled_from([int(info.min), int(info.max), int(info.max) - 1])
    return np.array(draw(st.lists(rows, min_size=4, max_size=4)), dtype)

  return groups(), groups() if draw(st.booleans()) else None


def check_validity(groups, total_rows):
  sizes, starts = groups
  ragged = RaggedRows(sizes, total_rows, starts)
  as_list = lambda groups: None if groups is None else groups.tolist()
  valid = is_valid(as_list(sizes), total_rows, as_list(starts))
  assert ragged.is_valid() == valid
  assert ragged.num_rows() == (sum(as_list(sizes)) if valid else 0)
  assert ragged.num_rows().dtype == jnp.int32
  if not valid:
    assert not np.any(ragged.compact_runs(0, 32).sizes)
    assert not np.any(ragged.expand_runs(0, 32).sizes)
  if total_rows <= 300:
    runs = ragged.compact_runs(0, total_rows)
    expected = np.zeros(total_rows, bool)
    for start, size in zip(np.asarray(runs.sources), np.asarray(runs.sizes), strict=True):
      expected[start : start + size] = True
    np.testing.assert_array_equal(ragged.is_in_group(), expected)


@pytest.mark.once
def test_validity():
  total_rows = st.sampled_from([1, 9, 20, 130, 300, 70_000, MOST - 32])
  run_sampled(check_validity, max_examples=100, groups=any_groups(), total_rows=total_rows)


@pytest.mark.parametrize(
  "sizes, starts, total_rows",
  [
    (np.array([MOST, MOST, 2, 1], np.int32), None, MOST - 32),  # The sum wraps around to 1.
    (np.array([2**31, 2**31, 3, 0], np.uint32), None, 20),
    (np.array([1, 0, 3, 0], np.int32), np.array([0, -9, 1, MOST], np.int32), 4),
    (np.array([2, 3], np.int32), np.array([3, 1], np.int32), 5),
    (np.array([45], np.int8), None, 300),
    (np.array([1], np.int32), np.array([2**32 - 1], np.uint32), 1),
    (np.array([], np.int32), None, 5),
    (np.array([], np.int32), np.array([], np.int32), 5),
  ],
)
def test_validity_at_the_edges(sizes, starts, total_rows):
  check_validity((sizes, starts), total_rows)


@pytest.mark.parametrize("sizes", [[2**32 + 1, 1], [2**33, -(2**33)], [-(2**32), 3], [3, 4]])
@pytest.mark.parametrize("starts", [None, [0, 2**32], [3, 0], [2**32, -(2**32)]])
def test_validity_of_int64(sizes, starts):
  with jax.enable_x64(True):
    check_validity((np.array(sizes), starts if starts is None else np.array(starts)), 7)


ROWS, STASH_ROWS = 96, 80


@jax.jit
def copy_runs(sizes, starts, start):
  ragged = RaggedRows(sizes, ROWS, starts)
  return ragged.compact_runs(start, STASH_ROWS), ragged.expand_runs(start, STASH_ROWS)


def apply(runs, source, destination):
  destination = destination.copy()
  for from_row, to_row, size in zip(*map(np.asarray, runs), strict=True):
    destination[to_row : to_row + size] = source[from_row : from_row + size]
  return destination


def check_runs(layout, start):
  to_stash, from_stash = copy_runs(*map(as_rows, (*layout, start)))
  for runs, source_rows, rows in (to_stash, ROWS, STASH_ROWS), (from_stash, STASH_ROWS, ROWS):
    assert {field.dtype for field in runs} == {jnp.dtype("int32")}
    assert np.min(runs.sizes) >= 0
    row = 0
    for source, destination, size in np.stack(runs, 1)[np.asarray(runs.sizes) > 0]:
      assert 0 <= source <= source_rows - size
      assert row <= destination <= rows - size
      assert runs is from_stash or row in (0, destination)  # A stash slot has no gap.
      row = destination + size

  rows, stash = np.arange(ROWS)[:, None], -1 - np.arange(STASH_ROWS)[:, None]
  compacted = ragged_rows.compact(rows, stash, start, *layout)
  np.testing.assert_array_equal(apply(to_stash, rows, stash), compacted)
  expanded = ragged_rows.expand(stash, start, ROWS, *layout)
  np.testing.assert_array_equal(apply(from_stash, stash, 0 * rows), expanded)


def test_runs():
  start = start_rows(STASH_ROWS) | st.sampled_from([-(2**31), MOST])
  run_sampled(check_runs, max_examples=200, layout=layouts(ROWS), start=start)


def test_a_prefix_is_one_run():
  ragged = RaggedRows([3, 0, 4, 2], 20)
  for runs in ragged.compact_runs(5, 30), ragged.expand_runs(5, 30):
    assert runs.sizes.tolist() == [9]


@pytest.mark.parametrize("starts", [None, np.array([4, 0], np.int32)])
class TestPytree:
  def test_round_trip(self, starts):
    ragged = RaggedRows(np.array([2, 3], np.int32), 7, starts)
    leaves, treedef = jax.tree.flatten(ragged)
    assert len(leaves) == 1 + (starts is not None)
    for copy in treedef.unflatten(leaves), jax.jit(lambda ragged: ragged)(ragged):
      assert jax.tree.structure(copy) == treedef
      assert copy.total_rows == 7
      jax.tree.map(np.testing.assert_array_equal, copy, ragged)
    assert treedef != jax.tree.structure(RaggedRows(ragged.group_sizes, 8, starts))
    jax.tree.map(lambda leaf: object(), ragged)  # Leaves need not be arrays.
    keys = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(ragged)]
    assert keys == [".group_sizes", ".group_starts"][: len(leaves)]
    assert "total_rows=7" in repr(ragged)

  def test_under_transformations(self, starts):
    sizes = np.array([[2, 3], [0, 1], [1, 9]], np.int32)
    num_rows = jax.jit(jax.vmap(lambda sizes: RaggedRows(sizes, 7, starts).num_rows()))
    np.testing.assert_array_equal(num_rows(sizes), [5, 1, 0])
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(RaggedRows(s, 7) for s in sizes))
    np.testing.assert_array_equal(jax.vmap(RaggedRows.num_rows)(batch), [5, 1, 0])
    _, scanned = jax.lax.scan(lambda _, ragged: (None, ragged.is_valid()), None, batch)
    np.testing.assert_array_equal(scanned, [True, True, False])
