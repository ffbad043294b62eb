"""Rows to expert order and back: layouts by a judge in Python lists, gradients by dense sums."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import permute
from reference.permute import layout, scaled_sum
from tests.helpers.checks import assert_trees_equal, long, once
from tests.helpers.permuting import choose, experts_of, operands_of, value_and_gradients
from tests.helpers.support import assert_same_bits, random_bits

# Tokens, width, experts, alignment.
SIZES = [
  (64, 256, 8, 128),
  (32, 1024, 4, 128),
  (48, 128, 6, 1),
  (20, 300, 4, 128),
  (16, 7, 4, 128),
  (128, 256, 32, 128),
  (1, 128, 4, 128),
  (16, 1, 4, 8),  # Width 1.
  (0, 16, 4, 8),  # No tokens.
  (0, 16, 1, 128),
  (9, 4, 1, 1),  # As many choices as experts.
]


@functools.partial(jax.jit, static_argnames=("local_experts", "align_groups_to", "distinct"))
def sort_rows(*args, **options):
  permutation = permute.sort_rows(*args, **options)
  return permutation, permutation.group_starts, permutation.ragged.is_in_group()


def check_layout(expert_ids, experts, alignment=1, first=0, **options):
  options |= {"align_groups_to": alignment, "first_expert": first, "local_experts": experts}
  permutation, group_starts, is_in_group = sort_rows(expert_ids, **options)
  row_choices, sizes, starts = layout(expert_ids, first, experts, alignment)
  choices, (total_rows,) = expert_ids.size, permutation.row_choices.shape
  choice_rows = np.full(choices, total_rows)
  for row, choice in enumerate(row_choices):
    if choice is not None:
      choice_rows[choice] = row
  row_choices += [None] * (total_rows - len(row_choices))
  row_choices = np.array([choices if choice is None else choice for choice in row_choices])
  np.testing.assert_array_equal(permutation.row_choices, row_choices)
  np.testing.assert_array_equal(permutation.choice_rows, choice_rows.reshape(expert_ids.shape))
  np.testing.assert_array_equal(permutation.group_sizes, sizes)
  np.testing.assert_array_equal(group_starts, starts)
  padded = [-(-size // alignment) * alignment for size in sizes]
  np.testing.assert_array_equal(permutation.padded_group_sizes, padded)
  np.testing.assert_array_equal(is_in_group, row_choices < choices)
  assert {leaf.dtype for leaf in jax.tree.leaves(permutation)} == {jnp.dtype("int32")}
  assert permutation.ragged.total_rows == total_rows > 0 and total_rows % alignment == 0
  assert (permutation.ragged.group_starts is None) == (alignment == 1)
  return permutation


@pytest.mark.parametrize("to_one", [False, long(True)])
@pytest.mark.parametrize("tokens, width, experts, alignment", SIZES)
def test_layout(tokens, width, experts, alignment, to_one):
  del width
  check_layout(choose(tokens, min(2, experts), experts, to_one), experts, alignment)


@pytest.mark.parametrize("local, alignment", [(1, 1), (2, 4), once(8, 1)])
def test_layout_on_one_of_several_devices(local, alignment):
  ids = choose(24, 3, 8)
  ids[5], ids[7, 1] = -1, 8  # Of no expert at all.
  for first in range(0, 8, local):
    permutation = check_layout(ids, local, alignment, first)
  assert alignment > 1 or permutation.ragged.total_rows == 24 * min(3, local)


def test_layout_of_int64():
  ids = choose(24, 3, 8).astype(np.int64)
  ids[3] = 2**32 + 1, -(2**32), 1
  with jax.enable_x64(True):
    check_layout(ids, 8, 8)


@pytest.mark.once
def test_total_rows_is_the_worst_case():
  for groups, choices, alignment in itertools.product((1, 2, 3), range(8), (1, 2, 4)):
    sizes = [s for s in itertools.product(range(choices + 1), repeat=groups) if sum(s) == choices]
    most = max(sum(-(-size // alignment) * alignment for size in s) for s in sizes)
    ids = np.zeros((choices, 1), np.int32)
    sort = functools.partial(permute.sort_rows, align_groups_to=alignment, distinct=False)
    permutation = jax.eval_shape(lambda ids, sort=sort, groups=groups: sort(ids, groups), ids)
    assert permutation.ragged.total_rows == max(most, alignment)


def test_experts_that_a_token_chose_twice():
  ids, x = np.array([[1, 1, 1], [1, 0, 1]], np.int32), jnp.array([[1.0], [2.0]])
  there_and_back = jax.jit(lambda p: permute.to_tokens(permute.to_experts(x, p), p))
  permutation = check_layout(ids, 2, distinct=False)
  np.testing.assert_array_equal(there_and_back(permutation), 3 * x)
  permutation, *_ = sort_rows(ids, local_experts=2)  # The last two rows have no room.
  assert not permutation.ragged.is_valid()
  np.testing.assert_array_equal(there_and_back(permutation), [[3], [np.nan]])


@pytest.mark.parametrize(
  "case, options",
  [
    *((case, {}) for case in SIZES),
    (SIZES[0], {"to_one": True}),
    (SIZES[0], {"dtype": "bfloat16"}),
    (SIZES[2], {"before": True}),
    once(SIZES[3], {"before": True}),
    once(SIZES[5], {"top_k": 5}),
    once(SIZES[7], {"dtype": "bfloat16", "to_one": True}),
  ],
)
def test_rows_go_there_and_back(case, options):
  tokens, width, experts, alignment = case
  before = options.pop("before", False) if (options := dict(options)) else False
  operands = operands_of(tokens, width, experts, **options)
  run = functools.partial(experts_of, alignment=alignment, before=before)
  actual = value_and_gradients(run, *operands)
  assert_trees_equal(actual, value_and_gradients(scaled_sum, *operands))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "bool"])
def test_rows_are_copied_bit_for_bit(dtype):
  rng = np.random.default_rng(0)
  x = rng.random((12, 5)) < 0.5 if dtype == "bool" else random_bits(rng, (12, 5), dtype)
  permutation, *_ = sort_rows(choose(12, 2, 4), local_experts=4, align_groups_to=8)
  tokens = np.asarray(permutation.row_choices) // 2
  expected = x[np.minimum(tokens, 11)]
  expected.view(np.uint8)[tokens == 12] = 0
  gathers = lambda x, p: (permute.to_experts(x, p), permute.gather_rows(x, tokens))
  for rows in jax.jit(gathers)(x, permutation):
    assert_same_bits(rows, expected)


@pytest.mark.parametrize("multiple, total", [(1, 9), (9, 9), (8, 16), (128, 128)])
@pytest.mark.parametrize("rows, dtype", [(6, "bfloat16"), once(6, "float32"), once(0, "float32")])
def test_the_padded_tail(rows, dtype, multiple, total):
  """As the module says: how many rows, zero, and nothing comes of their cotangents."""
  index = np.array([2, 5, -1, 2, 6, 0, 2**31 - 1, -(2**31), 2], np.int32)
  is_row = np.pad((index >= 0) & (index < rows), (0, total - 9))
  x = jnp.arange(1, 2 * rows + 1, dtype=dtype).reshape(rows, 2)
  gather = functools.partial(permute.gather_rows, index=index, pad_to_multiple=multiple)
  expected = np.zeros((total, 2), dtype)
  expected[is_row] = x[index[is_row[:9]]]
  d_out = np.where(is_row[:, None], np.arange(total)[:, None] * [[1, -1]], np.nan).astype(dtype)
  d_x = np.zeros((rows, 2), dtype)
  np.add.at(d_x, index[is_row[:9]], d_out[is_row])
  out, (actual_d_x,) = jax.jit(lambda x, d: (gather(x), jax.vjp(gather, x)[1](d)))(x, d_out)
  assert_same_bits(out, expected)
  np.testing.assert_array_equal(actual_d_x, d_x)


def test_gradients_add_up_in_float32():
  @jax.jit
  def gradients(x, d_rows):
    p = permute.sort_rows(np.arange(300)[None], 300)
    by_index = lambda x: permute.gather_rows(x, np.zeros(300, np.int32))
    gathers = by_index, lambda x: permute.to_experts(x, p)
    return [jax.vjp(gather, x)[1](d_rows)[0] for gather in gathers]

  for d_x in gradients(jnp.ones((1, 1), jnp.bfloat16), jnp.ones((300, 1), jnp.bfloat16)):
    assert d_x.dtype == jnp.bfloat16 and d_x == 300  # One by one in bfloat16, 256.


def test_products_with_weights_are_not_rounded_before_they_are_summed():
  ids, weights = np.array([[0, 1]]), jnp.array([[1, -0.999]])
  total = lambda rows: permute.to_tokens(rows, permute.sort_rows(ids, 2), weights)
  expected = (weights[:, 0] + weights[:, 1]).astype(jnp.bfloat16)
  np.testing.assert_array_equal(jax.jit(total)(jnp.ones((2, 1), jnp.bfloat16)), expected[None])


IDS, X = np.zeros((4, 2), np.int32), jnp.ones((4, 3))
PERMUTED = permute.sort_rows(IDS, 2)


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: permute.sort_rows(X, 2), r"expert_ids of dtype float32 must have an integer dtype"),
    (lambda: permute.sort_rows(IDS[0], 2), r"expert_ids of shape \(2,\) must have rank 2: \[tok"),
    (lambda: permute.sort_rows(IDS[:, :0], 2), r"expert_ids of shape \(4, 0\) must have a column"),
    (lambda: permute.sort_rows(IDS, 0), "local_experts=0 must be positive"),
    (lambda: permute.sort_rows(IDS, 2.0), "local_experts=2.0 must be a static int"),
    (lambda: permute.sort_rows(IDS, 2, align_groups_to=-8), "align_groups_to=-8 must be positive"),
    (lambda: permute.sort_rows(IDS, 2, align_groups_to=2**30), r"must sum to less than 2\*\*31"),
    (lambda: permute.sort_rows(IDS, 2, first_expert=IDS), "first_expert .* an integer scalar"),
    (lambda: permute.sort_rows(IDS, 2, distinct=1), "distinct=1 must be True or False"),
    (lambda: permute.to_experts(X[:3], PERMUTED), r"x of shape \(3, 3\) must have 4 rows"),
    (lambda: permute.to_experts(X, IDS), r"permutation=int32\[4, 2\] must be a Permutation"),
    (lambda: permute.to_tokens(X, PERMUTED), r"rows of shape \(4, 3\) must have 8 rows"),
    (lambda: permute.to_tokens(np.zeros(8, int), PERMUTED), "rows of dtype int.* must have a fl"),
    (lambda: permute.row_weights(X, PERMUTED), r"weights.shape=\(4, 3\) must be \(4, 2\)"),
    (lambda: permute.row_weights(IDS, PERMUTED), "weights of dtype int32 must have a floating"),
    (lambda: permute.gather_rows(1.0, IDS[0]), r"x of shape \(\) must have rows"),
    (lambda: permute.gather_rows(X, IDS), r"index of shape \(4, 2\) must have rank 1: \[n\]"),
    (lambda: permute.gather_rows(X, IDS[0], pad_to_multiple=0), "pad_to_multiple=0 must be pos"),
  ],
)
def test_errors_name_the_value(call, message):
  with pytest.raises(ValueError, match=message):
    call()
