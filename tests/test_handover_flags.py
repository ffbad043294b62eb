"""A stash under the `jax.checkpoint` and `jax.custom_vjp` that jax has beside its default."""

import contextlib
import functools
import inspect

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long
from tests.helpers.three_layers import (
  experts,
  layer,
  LAYERS,
  mlp,
  ROWS,
  SAVE,
  SPECS,
  WEIGHTS,
  with_gmm,
  with_gmm_in_place,
  with_mlp,
  X,
)

pytestmark = pytest.mark.both  # One jax refuses what the other can run.

FLAGS = "jax_remat3", "jax_custom_vjp3"
RUNS_FLAGS = "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters


@contextlib.contextmanager
def flags_on(*names):
  before = {name: getattr(jax.config, name) for name in names}
  for name in names:
    jax.config.update(name, True)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


ids_of = lambda value: " and ".join(value) if isinstance(value, tuple) else None


@pytest.fixture(params=[FLAGS[:1], FLAGS[1:], FLAGS], ids=ids_of)
def flags(request):
  if not RUNS_FLAGS:
    pytest.skip("this jax cannot run a stash under them, and so they are refused")
  with flags_on(*request.param):
    yield


@pytest.mark.skipif(RUNS_FLAGS, reason="this jax can run a stash under them")
@pytest.mark.parametrize("base", [layer, with_gmm, with_mlp], ids=["checkpoint", "gmm", "mlp"])
@pytest.mark.parametrize("names", [FLAGS[:1], FLAGS[1:], FLAGS], ids=" and ".join)
def test_flags_that_a_jax_cannot_run_are_refused(names, base):
  with flags_on(*names), pytest.raises(ValueError, match=f"{names[0]}=True must be off with jax"):
    base((X, ps.Stash.empty(8, specs_of(base))), WEIGHTS[0])


WRAPS = {
  "unwrapped": lambda layer: layer,
  "slot": functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME)),
  "full": jax.checkpoint,
}


def specs_of(base):
  return SPECS * (2 if base is with_mlp else 1)


def scanned(base, wrap, capacity=LAYERS * ROWS):
  def loss(weights):
    step = WRAPS[wrap](lambda carry, w: (base(carry, w), None))
    carry, _ = lax.scan(step, (X, ps.Stash.empty(capacity, specs_of(base))), weights)
    return jnp.sum(ps.seal(*carry))

  return loss


@functools.cache
def scanned_plainly(base):
  multiply = lambda x, w: x @ w
  plain = {layer: experts, with_mlp: mlp, with_gmm: multiply, with_gmm_in_place: multiply}[base]
  loss = lambda weights: jnp.sum(lax.scan(lambda x, w: (plain(x, w), None), X, weights)[0])
  return jax.jit(jax.value_and_grad(loss))(WEIGHTS)


@pytest.mark.parametrize(
  "flags, base, wrap",
  [
    *((FLAGS, layer, wrap) for wrap in WRAPS),
    (FLAGS, with_gmm, "slot"),
    *(long(FLAGS, base, "slot") for base in (with_gmm_in_place, with_mlp)),
    *((flags, layer, "slot") for flags in (FLAGS[:1], FLAGS[1:])),
    *((FLAGS[:1], base, "slot") for base in (with_gmm_in_place, with_mlp)),
    *(
      long(flags, layer, wrap)
      for flags in (FLAGS[:1], FLAGS[1:])
      for wrap in WRAPS
      if wrap != "slot"
    ),
    *(long(flags, with_gmm, "slot") for flags in (FLAGS[:1], FLAGS[1:])),
  ],
  indirect=["flags"],
  ids=ids_of,
)
def test_gradients_with_the_flags_of_jax(flags, base, wrap):
  compiled = jax.jit(jax.value_and_grad(scanned(base, wrap))).lower(WEIGHTS).compile()
  # Products of three matrices of order one, summed in another order.
  assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(assert_close, compiled(WEIGHTS), scanned_plainly(base))
  buffer = f"{LAYERS * ROWS},128]"
  assert f"f32[{buffer}" in compiled.as_text()
  assert f"f32[{LAYERS},{buffer}" not in compiled.as_text()  # No layer saves the stash.


def test_matmuls_with_the_flags_of_jax(flags):
  """The forward pass is not replayed under any of them."""
  matmuls = lambda loss: aot.compile(jax.grad(loss), WEIGHTS).matmuls(is_conditional=False).total()
  saving = jax.checkpoint(experts, policy=SAVE("hidden"))

  def saved(weights):
    step = lambda x, w: (saving(x, w), None)
    return jnp.sum(lax.scan(step, X, weights)[0])

  assert matmuls(scanned(layer, "slot")) == matmuls(saved)


@pytest.mark.parametrize(
  "flags", [long(FLAGS[:1]), long(FLAGS[1:]), FLAGS], indirect=True, ids=ids_of
)
def test_a_loss_under_checkpoint_with_the_flags_of_jax(flags):
  """All of it, seal included, is run again in the backward pass."""
  loss = jax.checkpoint(scanned(layer, "slot"))
  assert_trees_equal(
    jax.jit(jax.grad(loss))(WEIGHTS), jax.jit(jax.grad(scanned(layer, "slot")))(WEIGHTS)
  )
