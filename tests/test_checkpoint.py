"""`checkpoint` in a model: gradients, what is replayed, scan, vmap, shard_map."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import (
  assert_trees_equal,
  is_any_nan,
  long,
  needs_devices,
  once,
  OPTIMIZED,
)
from tests.helpers.masked_experts import (
  COUNTS,
  experts,
  mask,
  NEEDED,
  ragged_of,
  ROWS,
  SAVE,
  scanned_loss,
  TWO,
  weights,
  X,
)
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted


def optimized(gradient):
  return jax.jit(gradient, compiler_options=OPTIMIZED)(weights())


@functools.cache
def saved_gradients():
  return optimized(jax.grad(scanned_loss))


@pytest.mark.parametrize(
  "capacity, implementation",
  [
    *(
      (NEEDED, None),
      long(NEEDED, IMPLEMENTATIONS[0]),
      long_if_interpreted(NEEDED, IMPLEMENTATIONS[1]),
    ),
    *((NEEDED // 2, None), long(NEEDED // 2, IMPLEMENTATIONS[0])),
    long_if_interpreted(NEEDED // 2, IMPLEMENTATIONS[1]),
  ],
)
def test_gradients_of_a_scan(capacity, implementation):
  # The interpreter has effects, which `jax.checkpoint` does not support.
  options = {"capacity": capacity, "implementation": implementation}
  if implementation == "mosaic_interpret":
    options["outer_names"] = ()
  gradient = jax.grad(functools.partial(scanned_loss, **options))
  if capacity >= NEEDED:
    assert_trees_equal(optimized(gradient), saved_gradients())
  else:  # What is recomputed may be fused, and so rounded, differently.
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
      optimized(gradient),
      saved_gradients(),
    )


@pytest.mark.parametrize("seal", [ps.seal, lambda x, stash: x])
@pytest.mark.parametrize("is_mapped", [once((True, False)), once((False, True)), (True, True)])
@pytest.mark.parametrize("loops", [long(0), 1])
def test_each_example_of_a_vmap_has_a_stash_of_its_own(loops, is_mapped, seal):
  """Also where one is made for all of them: what sends it back would be added up."""
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = weights()

  def loss(x, w_in, f, seal):
    def layer(carry, xs):
      x, stash = carry
      out, stash = f(stash, ragged_of(COUNTS[0]), x, *xs, COUNTS[0])
      return (x + out, stash), None

    carry = x, ps.Stash.empty(2 * 24, TWO)
    if loops:
      carry, _ = lax.scan(layer, carry, (w_in[:2], w_out[:2]))
    else:
      carry, _ = layer(carry, (w_in[0], w_out[0]))
    return jnp.sum(seal(*carry) ** 2)

  def gradient(f, seal):
    axes = tuple(0 if mapped else None for mapped in is_mapped)
    total = lambda *args: jnp.sum(jax.vmap(lambda *args: loss(*args, f, seal), axes)(*args))
    twice = lambda leaf: jnp.stack([leaf, jnp.sin(leaf)])
    args = [twice(a) if mapped else a for a, mapped in zip((X, w_in), is_mapped, strict=True)]
    return jax.jit(jax.grad(total, (0, 1)))(*args)

  found = gradient(f, seal)
  if seal is not ps.seal:
    assert all(is_any_nan(leaf) for leaf in found)
    return
  saving = jax.checkpoint(experts, policy=SAVE("residual"))
  plain = gradient(lambda stash, ragged, *args: (saving(*args), stash), lambda x, stash: x)
  # One example after the other, or all at once: sums of 16 terms are rounded differently.
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, plain)


def test_the_forward_is_not_replayed():
  """The stash costs the matmuls of saving the residuals, not those of saving nothing."""

  def matmuls(**options):
    gradient = jax.grad(functools.partial(scanned_loss, **options))
    counts = aot.compile(gradient, weights()).matmuls(is_conditional=False)
    return counts.total()

  saved, recomputed = matmuls(), matmuls(outer_names=("nothing",))
  assert matmuls(capacity=NEEDED, outer_names=(ps.SLOT_NAME,)) == saved < recomputed


def test_undifferentiated_the_stash_passes_through():
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())
  stash = ps.Stash.empty(64, TWO)
  args = (X, w_in, w_out, COUNTS[0])
  call = jax.jit(lambda stash, *args: f(stash, ragged_of(args[-1]), *args))
  out, after = call(stash, *args)
  assert_trees_equal(out, jax.jit(experts)(*args))
  assert_trees_equal(after, stash)
  text = call.lower(stash, *args).as_text()
  assert not any(op in text for op in ("while", "dynamic_update_slice", "custom_call"))


@needs_devices(4)
def test_devices_of_a_function_with_collectives_agree_on_recomputing():
  """Rows that do not fit on one device are stored on none: all run the collectives, or none."""
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
  counts = jnp.array([5, 40, 8, 0], jnp.int32)

  def fun(rows, w, count):
    hidden = checkpoint_name(mask(rows @ w, count), "residual")
    return mask(jnp.sin(hidden) * lax.psum(jnp.sum(hidden), "x"), count)

  f = ps.checkpoint(fun, policy=SAVE("residual"), axis_name="x")

  def with_stash(rows, w, count):
    stash = ps.Stash.empty(16, TWO[:1])
    out, stash = f(stash, ps.RaggedRows(count, ROWS), rows, w, count)
    return ps.seal(out, stash), stash.stats().overflowed_pushes

  def gradient_of(device_fun):
    run = jax.shard_map(
      device_fun, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"), check_vma=False
    )
    loss = lambda rows, w: (lambda out, aux: (jnp.sum(out**2), aux))(*run(rows, w, counts))
    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(jnp.tile(X, (4, 1)), weights()[1][0])

  stashed, overflowed = gradient_of(with_stash)
  plain, _ = gradient_of(lambda *args: (fun(*args), args[-1]))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), stashed, plain)
  assert overflowed.tolist() == [1, 1, 1, 1]


@needs_devices(2)
def test_a_stash_made_for_values_that_vary_over_devices_varies():
  """So that it can be the carry of a scan in `shard_map(check_vma=True)`."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  f = ps.checkpoint(experts, policy=SAVE("residual"))

  def loss(x, w_in, w_out, count):
    args = (w_in[0], w_out[0], count[0])
    stash = ps.Stash.empty(256, f.residuals(ragged_of(count[0]), x, *args))

    def layer(carry, weights):
      x, stash = carry
      out, stash = f(stash, ragged_of(count[0]), x, *weights, count[0])
      return (x + out, stash), None

    (x, stash), _ = lax.scan(layer, (x, stash), (w_in, w_out))
    return lax.psum(jnp.sum(ps.seal(x, stash) ** 2), "x")

  run = jax.shard_map(
    loss, mesh=mesh, in_specs=(P("x"), P(), P(), P("x")), out_specs=P(), check_vma=True
  )
  gradient = jax.jit(jax.grad(run))(jnp.tile(X, (2, 1)), *weights()[1:], COUNTS[:2])
  assert not is_any_nan(gradient)
