"""`gmm` under the transformations of jax, without them, and where only one pass is in `debug`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long
from tests.helpers.grouped_matmuls import (
  assert_same,
  differentiate,
  K,
  megablox,
  operands,
  plain,
  rows_in_groups,
  SIZES,
  stashed,
  TILING,
)
from tests.helpers.support import IMPLEMENTATIONS, ON_TPU

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
@pytest.mark.parametrize("is_changed", [long(False), long(True)])
def test_debug_sums_up_the_rows(is_changed):
  """A bit that changes before the backward pass makes its gradient NaN, in debug or not itself."""
  (lhs, rhs, d_out), live = operands(), rows_in_groups()

  def run(lhs, rhs):
    stash = ps.Stash.empty(200, [jax.ShapeDtypeStruct((K,), jnp.float32)])
    out, stash = ps.gmm(stash, lhs, rhs, SIZES, tiling=TILING, interpret=not ON_TPU)
    buffer = stash.buffers[0].at[7, 3].add(float(is_changed))
    return ps.seal(out, dataclasses.replace(stash, buffers=(buffer,)))

  with ps.debug():
    _, vjp = jax.vjp(run, lhs, rhs)
  d_lhs, d_rhs = vjp(jnp.where(live[:, None], d_out, 0))
  _, d_lhs_alone, expected, _ = differentiate(plain(megablox()), (lhs, rhs, d_out), live)
  np.testing.assert_array_equal(d_lhs[live], d_lhs_alone[live])
  if is_changed:
    assert np.isnan(d_rhs).any()
  else:
    np.testing.assert_array_equal(d_rhs, expected)


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


def test_undifferentiated_the_stash_passes_through():
  lhs, rhs, _ = operands()
  multiply = functools.partial(ps.gmm, tiling=TILING, interpret=not ON_TPU)
  stash = ps.Stash.empty(200, [jax.ShapeDtypeStruct((K,), jnp.float32)])
  out, after = jax.jit(multiply)(stash, lhs, rhs, SIZES)
  assert_trees_equal(after, stash)
  live = rows_in_groups()
  np.testing.assert_array_equal(out[live], megablox()(lhs, rhs)[live])
