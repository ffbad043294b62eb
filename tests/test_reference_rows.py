"""The reference of compact and expand, and of grouped matmuls, is judged itself."""

import jax
from jax import lax
import numpy as np
import pytest

from reference import grouped_matmul, ragged_rows
from tests.helpers import ragged_rows as followed
from tests.helpers.sampling import run_sampled
from tests.helpers.support import (
  as_rows,
  assert_same_bits,
  DTYPES,
  integers,
  layouts,
  nan_of,
  random_bits,
  start_rows,
)

pytestmark = pytest.mark.once


compact = jax.jit(ragged_rows.compact)
expand = jax.jit(ragged_rows.expand, static_argnums=2)


def as_layout(*layout):
  return map(as_rows, layout)


def column(*values):
  return np.array(values, np.float32)[:, None]


@pytest.mark.parametrize(
  "start, group_sizes, group_starts, expected",
  [
    (2, [2, 0, 1], None, [-1, -1, 0, 1, 2, -1]),
    (1, [1, 2, 0], [4, 1, 0], [-1, 4, 1, 2, -1, -1]),
    (0, [0, 0], None, [-1] * 6),
    (0, [5], None, [0, 1, 2, 3, 4, -1]),
    (4, [2, 1], [0, 3], [-1, -1, -1, -1, 0, 1]),  # the last row falls past the end
    (-2, [2, 1], [0, 3], [3, -1, -1, -1, -1, -1]),  # the first two fall before the start
    (9, [2], None, [-1] * 6),
  ],
)
def test_compact(start, group_sizes, group_starts, expected):
  rows, stash = column(0, 1, 2, 3, 4), column(*[-1] * 6)
  actual = compact(rows, stash, start, *as_layout(group_sizes, group_starts))
  np.testing.assert_array_equal(actual, column(*expected))
  np.testing.assert_array_equal(stash, column(*[-1] * 6))


@pytest.mark.parametrize(
  "start, group_sizes, group_starts, expected",
  [
    (2, [2, 0, 1], None, [12, 13, 14, 0, 0]),
    (1, [1, 2, 0], [4, 1, 0], [0, 12, 13, 0, 11]),
    (0, [0, 0], None, [0] * 5),
    (0, [5], None, [10, 11, 12, 13, 14]),
    (4, [2, 1], [0, 3], [14, 15, 0, 0, 0]),
    (-2, [2, 1], [0, 3], [0, 0, 0, 10, 0]),
    (9, [2], None, [0] * 5),
  ],
)
def test_expand(start, group_sizes, group_starts, expected):
  stash = column(10, 11, 12, 13, 14, 15)
  actual = expand(stash, start, 5, *as_layout(group_sizes, group_starts))
  np.testing.assert_array_equal(actual, column(*expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_bit_for_bit(dtype):
  rows, stash = random_bits(np.random.default_rng(0), (2, 64, 8), dtype)
  rows[30] = stash[9] = nan_of(dtype)
  sizes, starts = np.array([3, 0, 20]), np.array([1, 7, 30])
  expected = np.concatenate([stash[:5], rows[1:4], rows[30:50], stash[28:]])
  assert_same_bits(compact(rows, stash, 5, sizes, starts), expected)
  there_and_back = np.zeros_like(rows)
  there_and_back[1:4], there_and_back[30:50] = rows[1:4], rows[30:50]
  assert_same_bits(expand(expected, 5, 64, sizes, starts), there_and_back)


def test_compact_does_not_convert():
  with pytest.raises(ValueError, match="rows.dtype=.*float32.* must be stash.dtype=.*int32"):
    ragged_rows.compact(column(1), np.zeros((2, 1), np.int32), 0, [1])


TOTAL_ROWS, STASH_ROWS = 101, 69


def row_by_row(rows, stash, start, group_sizes, group_starts):
  """Compact and expand in loops over rows."""
  compacted, expanded = stash.copy(), np.zeros_like(rows)
  for group, size in enumerate(group_sizes):
    for i in range(size):
      row = i + (group_starts[group] if group_starts else sum(group_sizes[:group]))
      stash_row = start + sum(group_sizes[:group]) + i
      if 0 <= stash_row < len(stash):
        compacted[stash_row] = rows[row]
        expanded[row] = stash[stash_row]
  return compacted, expanded


def check_row_by_row(layout, start):
  """Judges the reference, and the helper whose rows follow it."""
  rng = np.random.default_rng(start + 100)
  rows, stash = (random_bits(rng, (n, 3), "bfloat16") for n in (TOTAL_ROWS, STASH_ROWS))
  compacted, expanded = row_by_row(rows, stash, start, *layout)
  traced = np.int32(start), *as_layout(*layout)
  assert_same_bits(compact(rows, stash, *traced), compacted)
  assert_same_bits(expand(stash, traced[0], TOTAL_ROWS, *traced[1:]), expanded)
  assert_same_bits(followed.compact(rows, stash, start, *layout), compacted)
  assert_same_bits(followed.expand(stash, start, TOTAL_ROWS, *layout), expanded)


def test_row_by_row():
  sampled = {"layout": layouts(TOTAL_ROWS), "start": start_rows(STASH_ROWS)}
  run_sampled(check_row_by_row, max_examples=60, **sampled)


@pytest.mark.parametrize(
  "start", [2**32 + 5, -(2**32) + 5, 2**63 - 1, -(2**63), 2**31 - 1, -(2**31)]
)
def test_rows_far_outside_of_the_stash(start):
  rows, stash = integers(0, 8, 3), integers(1, 6, 3)
  assert_same_bits(followed.compact(rows, stash, start, [5]), stash)
  assert_same_bits(followed.expand(stash, start, 8, [5]), np.zeros_like(rows))


def test_gradients_of_copies():
  """Each is the other's: what is not copied has none, whatever it holds."""
  groups = np.array([2, 0, 1]), np.array([4, 1, 0])
  rows, d_rows = integers(0, 8, 3), integers(1, 8, 3)
  stash, d_stash = integers(2, 6, 3), integers(3, 6, 3)
  rows[[1, 2, 3, 6, 7]] = d_rows[[1, 2, 3, 6, 7]] = np.nan
  start = 4  # The last row falls past the end.
  d_of = lambda f, cotangent, *args: jax.jit(lambda *args: jax.vjp(f, *args)[1](cotangent))(*args)
  of_compact = lambda rows, stash: ragged_rows.compact(rows, stash, start, *groups)
  of_rows, of_stash = d_of(of_compact, d_stash, rows, stash)
  assert_same_bits(of_rows, ragged_rows.expand(d_stash, start, 8, *groups))
  assert_same_bits(of_stash, np.where(np.arange(6)[:, None] < start, d_stash, 0))
  (of_stash,) = d_of(lambda s: ragged_rows.expand(s, start, 8, *groups), d_rows, stash)
  assert_same_bits(of_stash, ragged_rows.compact(d_rows, np.zeros_like(stash), start, *groups))


# Grouped matmuls.


@pytest.mark.parametrize("group_sizes", [[5, 0, 7], [0, 0, 0], [12, 4, 0]])
def test_grouped_matmul(group_sizes):
  """Those of XLA where padding is zero, exact in small integers; and padding may hold NaN."""
  lhs, d_out, rhs = integers(0, 16, 4), integers(1, 16, 6), integers(2, 3, 4, 6)
  group_sizes = np.array(group_sizes, np.int32)
  is_padding = np.arange(16)[:, None] >= sum(group_sizes)
  zero_in = lambda rows: np.where(is_padding, 0, rows).astype(np.float32)
  out, vjp = jax.vjp(lambda *args: lax.ragged_dot(*args, group_sizes), zero_in(lhs), rhs)
  d_lhs, d_rhs = vjp(zero_in(d_out))
  lhs, d_out = (np.where(is_padding, nan_of("float32"), rows) for rows in (lhs, d_out))
  assert_equal = np.testing.assert_array_equal
  assert_equal(grouped_matmul.gmm(lhs, rhs, group_sizes), zero_in(out))
  assert_equal(grouped_matmul.gradient_of_lhs(d_out, rhs, group_sizes), zero_in(d_lhs))
  assert_equal(grouped_matmul.gradient_of_rhs(lhs, d_out, group_sizes), d_rhs)


def test_gradients_of_a_grouped_matmul_are_those_of_autodiff():
  lhs, d_out, rhs = integers(0, 16, 4), integers(1, 16, 6), integers(2, 3, 4, 6)
  sizes = np.array([5, 0, 7])
  _, vjp = jax.vjp(lambda *args: grouped_matmul.gmm(*args, sizes), lhs, rhs)
  d_lhs, d_rhs = vjp(d_out)
  np.testing.assert_array_equal(grouped_matmul.gradient_of_lhs(d_out, rhs, sizes), d_lhs)
  np.testing.assert_array_equal(grouped_matmul.gradient_of_rhs(lhs, d_out, sizes), d_rhs)
