"""What shows that the backward pass reads the stash that the forward pass filled."""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import handover
from tests.helpers.checks import assert_trees_equal, is_any_nan, once
from tests.helpers.three_layers import experts, layer, LAYERS, ROWS, SPECS, WEIGHTS, with_gmm, X


def gradient_of(layers, capacity=LAYERS * ROWS):
  """The gradient of a chain of layers, of which each takes and returns the carry (x, stash)."""
  return jax.jit(lambda weights: traced_gradient_of(layers, weights, capacity))(WEIGHTS)


def traced_gradient_of(layers, weights, capacity=LAYERS * ROWS):

  def loss(weights):
    carry = X, ps.Stash.empty(capacity, SPECS)
    for one, w in zip(layers, weights, strict=True):
      carry = one(carry, w)
    return jnp.sum(ps.seal(*carry))

  return jax.grad(loss)(weights)


@functools.cache
def right():
  return gradient_of([lambda carry, w: (experts(carry[0], w), carry[1])] * LAYERS)


def recomputed(fun):
  """Makes a layer that keeps its arguments, and is run again in the backward pass."""
  wrapped = jax.custom_vjp(fun)
  wrapped.defvjp(lambda *args: (fun(*args), args), lambda args, d: jax.vjp(fun, *args)[1](d))
  return wrapped


def changed(change, layer=layer):
  """Makes a layer that changes the cotangent of its carry on the way back."""
  identity = jax.custom_vjp(lambda carry: carry)
  identity.defvjp(lambda carry: (carry, None), lambda _, d: (jax.tree.map(of_floats(change), d),))
  return lambda carry, w: layer(identity(carry), w)


def of_floats(change):
  return lambda leaf: change(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def test_the_layers_alone_are_right():
  assert_trees_equal(gradient_of([layer] * LAYERS), right())


@pytest.mark.parametrize(
  "which, base",
  [
    *(once((0,), layer), ((1,), layer), once((2,), layer)),
    *(((0, 1, 2), layer), ((1,), with_gmm)),
  ],
  ids=["first", "middle", "last", "all", "gmm"],
)
def test_a_layer_that_is_recomputed_unknown_to_it_gives_nan(which, base):
  """As equinox's checkpointed loops do; the forward pass then pushes nothing for it."""
  layers = [recomputed(base) if number in which else base for number in range(LAYERS)]
  assert is_any_nan(gradient_of(layers))


CHANGES = {
  "nothing": lambda leaf: leaf,
  "clipped to 1": lambda leaf: jnp.clip(leaf, -1, 1),
  "clipped to 100": lambda leaf: jnp.clip(leaf, -100, 100),
  "clipped to a million": lambda leaf: jnp.clip(leaf, -1e6, 1e6),
  "clipped to the base": lambda leaf: jnp.clip(leaf, -handover.BASE, handover.BASE),
  "doubled": lambda leaf: 2 * leaf,
  "halved": lambda leaf: leaf / 2,
  "scaled a little": lambda leaf: leaf * jnp.float32(0.999999),
  "one added": lambda leaf: leaf + 1,
  "zero": jnp.zeros_like,
  "one": jnp.ones_like,
  "rounded": lambda leaf: lax.reduce_precision(leaf, exponent_bits=8, mantissa_bits=7),
}


@jax.jit
def gradient_with_a_change(which, place):
  """One program for all changes, each at any place."""

  def layer_at(number):
    def backward(index, d_carry):
      change = of_floats(lambda leaf: lax.switch(index, list(CHANGES.values()), leaf))
      return jax.tree.map(change, d_carry), None

    identity = jax.custom_vjp(lambda carry, index: carry)
    identity.defvjp(lambda *args: args, backward)
    index = jnp.where(place == number, which, 0)
    return lambda carry, w: layer(identity(carry, index), w)

  return traced_gradient_of([layer_at(number) for number in range(LAYERS)], WEIGHTS)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [1, 2])
def test_a_stash_that_is_changed_on_its_way_back_gives_nan(change, place):
  """Before the use of the layer that number `place` follows, whatever became of the carry."""
  result = gradient_with_a_change(list(CHANGES).index(change), place)
  assert is_any_nan(result) == (change != "nothing")


def test_a_stash_that_two_uses_send_back_gives_nan():
  """Autodiff adds up what both send back, here halved."""

  def twice(carry, w):
    both = jax.tree.map(jnp.add, *(layer(carry, w) for _ in range(2)))
    return jax.tree.map(of_floats(lambda leaf: leaf / 2), both)

  assert is_any_nan(gradient_of([layer, twice, layer]))


def test_numbers_start_again():
  @functools.partial(jax.jit, static_argnums=1)
  def gradient(first, other):
    def start(carry, w):
      x, stash = carry
      pushes = jnp.full_like(stash.counters.pushes, first)
      stash.counters = stash.counters._replace(pushes=pushes)
      return layer((x, stash), w)

    return traced_gradient_of([start, other, layer], WEIGHTS)

  other = recomputed(layer)
  for first in (0, handover.NUMBERS - LAYERS, handover.NUMBERS - 2):
    # Another program, in which sums of four terms may be rounded differently.
    np.testing.assert_allclose(gradient(first, layer), right(), rtol=1e-4, atol=1e-5)
    assert is_any_nan(gradient(first, other))


def test_counts_are_exact_in_float32():
  counts = np.array([0, 1, handover.NUMBERS - 1, handover.NUMBERS])
  assert (handover.BASE + counts.astype(np.float32) - handover.BASE == counts).all()
  assert handover.next_number(jnp.int32(handover.NUMBERS - 1)) == 0


@pytest.mark.parametrize("capacity", [0, ROWS])
def test_every_push_counts_stored_or_not(capacity):
  gradient = gradient_of([layer] * LAYERS, capacity)
  np.testing.assert_allclose(gradient, right(), rtol=1e-5, atol=1e-6)
  assert is_any_nan(gradient_of([layer, recomputed(layer), layer], capacity))


def test_stashes_that_are_used_again_count_on():
  """A slot of a step before is none of this one, though it may be in the same rows."""

  @jax.jit
  def step(weights, stash):
    def loss(weights):
      carry, _ = lax.scan(lambda c, w: (layer(c, w), None), (X, stash), weights)
      return jnp.sum(ps.seal(*carry)), carry[1]

    gradient, after = jax.grad(loss, has_aux=True)(weights)
    return gradient, after.reset()

  stash = ps.Stash.empty(LAYERS * ROWS, SPECS)
  for number in (1, 2):
    gradient, stash = step(WEIGHTS, stash)
    assert_trees_equal(gradient, right())
    assert stash.counters.pushes.tolist() == [number * LAYERS]


@pytest.mark.parametrize(
  "layers, found",
  [
    ([layer] * LAYERS, []),
    once([layer, recomputed(layer), layer], [(1, 1, 2)]),
    once([recomputed(layer)] * LAYERS, [(0, 0, 1)]),
  ],
)
def test_debug_prints_which_push_found_what(capsys, layers, found):
  with ps.debug():
    jax.block_until_ready(gradient_of(layers))
    jax.effects_barrier()
  printed = capsys.readouterr().out
  pattern = r"of push (\d+) .* of (\d+)\.0 pushes, and must be handed one of (\d+)\.0"
  assert [tuple(map(int, numbers)) for numbers in re.findall(pattern, printed)] == found


@pytest.mark.once
def test_debug_says_that_it_was_never_sealed(capsys):
  def loss(weights):
    return jnp.sum(layer((X, ps.Stash.empty(ROWS, SPECS)), weights[0])[0])

  with ps.debug():
    assert is_any_nan(jax.grad(loss)(WEIGHTS))
    jax.effects_barrier()
  assert (
    "push 0 (the first is 0) was handed a stash that was not sealed: behind"
    in capsys.readouterr().out
  )


# What the count does not see.


def test_buffers_that_are_changed_without_the_count_are_seen_in_debug_only(capsys):
  """As by what treats arrays by their rank; the checksum of the rows shows it."""
  halve = changed(lambda leaf: leaf / 2 if leaf.ndim == 2 else leaf)
  gradient = functools.partial(gradient_of, [layer, halve, layer])
  assert not is_any_nan(gradient())
  with ps.debug():
    assert is_any_nan(gradient())
  jax.effects_barrier()
  assert "came back from the stash other than they were pushed" in capsys.readouterr().out
