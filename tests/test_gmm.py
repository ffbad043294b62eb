"""`gmm` has the gradients of the grouped matmul that it wraps, and zero in padding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import kernels
from pallas_stash.kernels import in_place
from tests.helpers.checks import assert_trees_equal, is_any_nan, long, once
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted, ON_TPU

M, K, N, GROUPS = 256, 128, 256, 4
TILING = (128, 128, 128)
XLA, MOSAIC = IMPLEMENTATIONS
SIZES = jnp.array([50, 0, 71, 30], jnp.int32)


def operands(dtype=jnp.float32, groups=GROUPS, transpose_rhs=False):
  keys = jax.random.split(jax.random.key(0), 3)
  lhs = jax.random.normal(keys[0], (M, K)).astype(dtype)
  lhs = lhs.at[int(SIZES.sum()) :].set(jnp.nan)  # Padding.
  rhs = jax.random.normal(keys[1], (groups, N, K) if transpose_rhs else (groups, K, N)).astype(
    dtype
  )
  return lhs, rhs, jax.random.normal(keys[2], (M, N)).astype(dtype)


def rows_in_groups(offset=0, groups=GROUPS):
  first, last = int(SIZES[:offset].sum()), int(SIZES[: offset + groups].sum())
  return (jnp.arange(M) >= first) & (jnp.arange(M) < last)


def differentiate(multiply, operands, live):
  """Returns (out, d_lhs, d_rhs) for a cotangent that is NaN in padding, as no one should care."""
  lhs, rhs, d_out = operands

  def run(lhs, rhs, d_out):
    out, vjp, stash = jax.vjp(multiply, lhs, rhs, has_aux=True)
    return out, *vjp(jnp.where(live[:, None], d_out, 0)), stash

  out, d_lhs, d_rhs, stash = jax.jit(run)(lhs, rhs, d_out)
  return jnp.where(live[:, None], out, 0), d_lhs, d_rhs, stash


def plain(grouped_matmul):
  return lambda lhs, rhs: (grouped_matmul(lhs, rhs), None)


def stashed(capacity=200, dtype=jnp.float32, seals=1, **options):
  def multiply(lhs, rhs):
    stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((K,), dtype)])
    out, stash = ps.gmm(stash, lhs, rhs, SIZES, **options)
    for _ in range(seals):
      out = ps.seal(out, stash)
    return out, stash.stats()

  return multiply


def megablox(transpose_rhs=False, group_offset=None, dtype=jnp.float32):
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  return lambda lhs, rhs: gmm(
    lhs, rhs, SIZES, dtype, TILING, group_offset, None, transpose_rhs, not ON_TPU
  )


def assert_same(actual, expected, live):
  out, d_lhs, d_rhs, _ = actual
  assert_trees_equal(out, expected[0])
  assert_trees_equal(d_lhs[live], expected[1][live])
  assert_trees_equal(d_lhs[~live], jnp.zeros_like(d_lhs[~live]))
  assert_trees_equal(d_rhs, expected[2])
  assert not is_any_nan((d_lhs, d_rhs))


def few_of_each():
  """Parameters: one case of each implementation, and both of each other option; others for long."""
  every = itertools.product([jnp.float32, jnp.bfloat16], [False, True], [None, *IMPLEMENTATIONS])
  marked = {
    (jnp.float32, False, None): pytest.param,
    (jnp.float32, True, XLA): once,
    (jnp.bfloat16, True, MOSAIC): once,
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
    *(once(1, 2, implementation) for implementation in (None, MOSAIC)),
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


SAVE_SLOTS = jax.checkpoint_policies.save_only_these_names(ps.SLOT_NAME)


def two_layers(transform, grouped_matmul):
  """Returns the gradients of a scan, whose layers are transformed, in rows of groups."""
  lhs, rhs, d_out = operands()
  live = rows_in_groups()[:, None]

  def layer(carry, rhs):
    x, stash = carry
    out, stash = grouped_matmul(stash, x, rhs)
    return (x + jnp.where(live, jnp.sin(out[:, :K]), 0), stash), None

  def loss(lhs, rhs):
    stash = ps.Stash.empty(2 * 152, [jax.ShapeDtypeStruct((K,), jnp.float32)])
    (x, stash), _ = jax.lax.scan(transform(layer), (lhs, stash), rhs)
    return jnp.sum(jnp.where(live, ps.seal(x, stash) * d_out[:, :K], 0))

  d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, jnp.stack([rhs, 2 * rhs]))
  return jnp.where(live, d_lhs, 0), d_rhs


def test_a_replay_of_the_layer_multiplies_again_without_the_stash():
  options = {"tiling": TILING, "interpret": not ON_TPU}
  stashing = lambda stash, x, rhs: ps.gmm(stash, x, rhs, SIZES, **options)
  saving = lambda stash, x, rhs: ps.gmm(
    stash, x, rhs, SIZES, grouped_matmul=lambda lhs, rhs, _: megablox()(lhs, rhs)
  )
  replayed = two_layers(functools.partial(jax.checkpoint, policy=SAVE_SLOTS), stashing)
  assert_trees_equal(replayed, two_layers(lambda layer: layer, saving))


@pytest.mark.once
def test_debug_around_the_forward_pass_alone(monkeypatch):
  """What it copied, to wherever there was room, is not read as if it lay as in `lhs`."""
  (lhs, rhs, d_out), live = operands(), rows_in_groups()
  multiply = lambda lhs, rhs: stashed(tiling=TILING, interpret=not ON_TPU)(lhs, rhs)[0]
  with ps.debug():
    _, vjp = jax.vjp(multiply, lhs, rhs)
  monkeypatch.delattr(in_place, "tgmm")
  _, d_rhs = vjp(jnp.where(live[:, None], d_out, 0))
  _, _, expected, _ = differentiate(plain(megablox()), (lhs, rhs, d_out), live)
  assert_trees_equal(d_rhs, expected)


@pytest.mark.once
def test_without_jit():
  args, live = operands(), rows_in_groups()
  options = {"tiling": TILING, "interpret": not ON_TPU}
  lhs, rhs, d_out = args
  out, vjp, stats = jax.vjp(stashed(**options), lhs, rhs, has_aux=True)
  actual = jnp.where(live[:, None], out, 0), *vjp(jnp.where(live[:, None], d_out, 0)), stats
  assert_same(actual, differentiate(stashed(**options), args, live), live)


@pytest.mark.once
def test_under_vmap_examples_run_one_by_one():
  (lhs, rhs, d_out), live = operands(), rows_in_groups()
  options = {"tiling": TILING, "interpret": not ON_TPU, "implementation": IMPLEMENTATIONS[0]}

  def gradients(lhs, **change):
    multiply = lambda lhs, rhs: stashed(**options | change)(lhs, rhs)[0]
    _, vjp = jax.vjp(multiply, lhs, rhs)
    return vjp(jnp.where(live[:, None], d_out, 0))

  both = jnp.stack([lhs, 2 * lhs])
  actual = jax.jit(jax.vmap(functools.partial(gradients, implementation=None)))(both)
  for i, one in enumerate(both):
    assert_trees_equal(jax.tree.map(lambda x, i=i: x[i], actual), jax.jit(gradients)(one))


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


def test_undifferentiated_the_stash_passes_through():
  lhs, rhs, _ = operands()
  multiply = functools.partial(ps.gmm, tiling=TILING, interpret=not ON_TPU)
  stash = ps.Stash.empty(200, [jax.ShapeDtypeStruct((K,), jnp.float32)])
  out, after = jax.jit(multiply)(stash, lhs, rhs, SIZES)
  assert_trees_equal(after, stash)
  live = rows_in_groups()
  np.testing.assert_array_equal(out[live], megablox()(lhs, rhs)[live])
