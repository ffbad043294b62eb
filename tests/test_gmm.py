"""`gmm` has the gradients of the grouped matmul that it wraps, and zero in padding."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from pallas_stash import kernels
from tests.helpers.checks import assert_trees_equal, is_any_nan, long, once
from tests.helpers.grouped_matmuls import (
  assert_same,
  differentiate,
  K,
  M,
  megablox,
  N,
  operands,
  plain,
  rows_in_groups,
  SIZES,
  stashed,
  TILING,
)
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted, ON_TPU

XLA, MOSAIC = IMPLEMENTATIONS


def few_of_each():
  """Parameters: both of each option, but for the kernels, which `test_grouped` has."""
  every = itertools.product([jnp.float32, jnp.bfloat16], [False, True], [None, *IMPLEMENTATIONS])
  marked = {
    (jnp.float32, False, None): pytest.param,
    (jnp.bfloat16, True, XLA): long,
  }
  return [marked.get(case, long)(*case) for case in every]


@pytest.mark.parametrize("dtype, transpose_rhs, implementation", few_of_each())
def test_gradients_are_those_of_megablox(dtype, transpose_rhs, implementation):
  args, live = operands(dtype, transpose_rhs=transpose_rhs), rows_in_groups()
  options = {"preferred_element_type": dtype, "transpose_rhs": transpose_rhs}
  options |= {"tiling": TILING, "interpret": not ON_TPU, "implementation": implementation}
  actual = differentiate(stashed(dtype=dtype, **options), args, live)
  expected = differentiate(plain(megablox(transpose_rhs, dtype=dtype)), args, live)
  assert_same(actual, expected, live)
  assert [int(x[0]) for x in actual[3]] == [152, 152, 0, 0, 152]


@pytest.mark.parametrize(
  "offset, groups, implementation",
  [
    once(1, 2, None),
    long(1, 2, MOSAIC),
    *(long(offset, groups, None) for offset, groups in ((0, 2), (2, 2), (1, 1))),
  ],
)
def test_only_the_groups_that_rhs_has_are_kept(offset, groups, implementation):
  args, live = operands(groups=groups), rows_in_groups(offset, groups)
  offset = jnp.int32(offset)
  options = {"group_offset": offset, "tiling": TILING, "interpret": not ON_TPU}
  actual = differentiate(stashed(**options, implementation=implementation), args, live)
  expected = differentiate(plain(megablox(group_offset=offset)), args, live)
  assert_same(actual, expected, live)
  rows = int(live.sum())
  lead = (
    int(SIZES[: int(offset)].sum()) % 8 * (rows > 0)
  )  # They start as far behind a tile's start.
  assert int(actual[3].rows_in_use[0]) == -(-(lead + rows) // 8) * 8


@pytest.mark.parametrize("implementation", [XLA, long_if_interpreted(MOSAIC)])
def test_padding_is_restored_for_what_is_not_known_to_mask(implementation, monkeypatch):
  fills = []

  def expand(*args):
    fills.append(args[-1])
    return kernels_expand(*args)

  kernels_expand = kernels.expand
  monkeypatch.setattr(kernels, "expand", expand)
  args, live = operands(), rows_in_groups()
  inject = lambda lhs, rhs, group_sizes: jnp.square(lhs) @ rhs[0]  # Its gradient reads padding.
  _, _, d_rhs, _ = differentiate(
    stashed(grouped_matmul=inject, implementation=implementation), args, live
  )
  assert not is_any_nan(d_rhs)
  assert fills == [None]
  options = {"tiling": TILING, "interpret": not ON_TPU, "implementation": implementation}
  _, _, d_rhs, _ = differentiate(stashed(**options), args, live)
  assert not is_any_nan(d_rhs)
  if implementation == XLA:  # The kernel reads rows where they lie.
    assert len(fills) == 2 and fills[1] is not None


def injected():
  def ragged_dot(lhs, rhs):
    return jax.lax.ragged_dot(lhs, rhs, SIZES)

  def tokamax(lhs, rhs):
    return pytest.importorskip("tokamax").ragged_dot(lhs, rhs, SIZES)

  return [ragged_dot, tokamax]


@pytest.mark.both  # One Python may have no tokamax.
@pytest.mark.parametrize("grouped_matmul", injected(), ids=lambda f: f.__name__)
def test_another_grouped_matmul(grouped_matmul):
  lhs, rhs, d_out = operands()
  live = rows_in_groups()
  args = (jnp.where(live[:, None], lhs, 0), rhs, d_out)
  inject = lambda lhs, rhs, group_sizes: grouped_matmul(lhs, rhs)
  actual = differentiate(stashed(grouped_matmul=inject), args, live)
  assert_same(actual, differentiate(plain(grouped_matmul), args, live), live)


def test_overflow_is_nan_in_rhs_and_counted():
  args, live = operands(), rows_in_groups()
  options = {"tiling": TILING, "interpret": not ON_TPU}
  out, d_lhs, d_rhs, stats = differentiate(stashed(capacity=144, **options), args, live)
  expected = differentiate(plain(megablox()), args, live)
  assert_trees_equal(out, expected[0])
  assert_trees_equal(d_lhs[live], expected[1][live])
  has_rows = SIZES > 0
  assert bool(jnp.isnan(d_rhs[has_rows]).all())
  assert_trees_equal(d_rhs[~has_rows], jnp.zeros_like(d_rhs[~has_rows]))
  assert [int(x[0]) for x in stats] == [0, 0, 1, 0, 152]


@pytest.mark.once
@pytest.mark.parametrize("capacity, overflowed", [(72, 1), (80, 0)])
def test_rows_have_to_fit_behind_the_start_of_a_tile(capacity, overflowed):
  args, live = operands(groups=2), rows_in_groups(1, 2)  # 71 rows, from row 50 on.
  options = {"group_offset": jnp.int32(1), "tiling": (64, 128, 128), "interpret": not ON_TPU}
  _, _, d_rhs, stats = differentiate(stashed(capacity=capacity, **options), args, live)
  assert is_any_nan(d_rhs) == bool(overflowed)
  assert [int(x[0]) for x in stats] == [capacity * (not overflowed)] * 2 + [overflowed, 0, 80]


@pytest.mark.parametrize("seals", [0, once(2)])
def test_gradients_are_nan_unless_sealed_once(seals):
  args, live = operands(), rows_in_groups()
  options = {"tiling": TILING, "interpret": not ON_TPU, "seals": seals}
  _, d_lhs, d_rhs, _ = differentiate(stashed(**options), args, live)
  assert bool(jnp.isnan(d_lhs[live]).all()) and bool(jnp.isnan(d_rhs[SIZES > 0]).all())


@pytest.mark.parametrize(
  "change, message",
  [
    ({"residual": ((K,), jnp.bfloat16)}, "must be those that the stash was made for"),
    ({"residual": ((N,), jnp.float32)}, "must be those that the stash was made for"),
    ({"lhs": jnp.zeros((2, M, K))}, "must have rank 2"),
    ({"stash": None}, "must be a Stash"),
    ({"transpose_rhs": True, "grouped_matmul": jax.lax.ragged_dot}, "must be left out"),
    ({"group_offset": jnp.int32(1), "grouped_matmul": jax.lax.ragged_dot}, "must be left out"),
    ({"tiling": None}, "No tuned tiling found"),
  ],
)
def test_misuse_is_refused(change, message):
  change = dict(change)
  shape, dtype = change.pop("residual", ((K,), jnp.float32))
  lhs, rhs, _ = operands()
  lhs = change.pop("lhs", lhs)
  stash = change.pop("stash", ps.Stash.empty(200, [jax.ShapeDtypeStruct(shape, dtype)]))
  options = {"tiling": TILING, "interpret": not ON_TPU} | change
  with pytest.raises(ValueError, match=message):
    jax.vjp(lambda lhs: ps.gmm(stash, lhs, rhs, SIZES, **options)[0], lhs)


def test_the_signature_is_that_of_megablox():
  import inspect

  from jax.experimental.pallas.ops.tpu.megablox import gmm

  theirs = inspect.signature(inspect.unwrap(gmm)).parameters
  ours = inspect.signature(ps.gmm).parameters
  positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
  assert positional == ["stash", *(name for name in theirs if name != "existing_out")]
  same_default = lambda name: ours[name].default == theirs[name].default
  assert all(map(same_default, positional[1:]))
