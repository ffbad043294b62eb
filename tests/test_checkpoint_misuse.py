"""Misuse of `checkpoint` and of its stash: refused while tracing, or NaN."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from tests.helpers.checks import is_any_nan
from tests.helpers.masked_experts import (
  COUNTS,
  experts,
  HIDDEN,
  NEEDED,
  ragged_of,
  ROWS,
  SAVE,
  scanned_loss,
  TWO,
  weights,
  X,
)


def chain(use):
  """Differentiates `use(f, stash, x)`, where `f(stash, x)` is a layer."""
  g = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())
  f = lambda stash, x: g(stash, ragged_of(COUNTS[0]), x, w_in, w_out, COUNTS[0])
  return jax.jit(jax.grad(lambda x: jnp.sum(use(f, ps.Stash.empty(128, TWO), x) ** 2)))(X)


def test_a_chain_is_right_when_it_is_linear():
  def use(f, stash, x):
    for _ in range(2):
      x, stash = f(stash, x)
    return ps.seal(x, stash)

  assert not is_any_nan(chain(use))


def test_a_stash_that_is_dropped_between_layers_gives_nan():
  def use(f, stash, x):
    x, _ = f(stash, x)
    x, stash = f(stash, x)
    return ps.seal(x, stash)

  assert is_any_nan(chain(use))


def test_a_stash_that_is_duplicated_gives_nan():
  def use(f, stash, x):
    x, stash = f(stash, x)
    y, first = f(stash, x)
    z, second = f(stash, x)
    return ps.seal(y, first) + ps.seal(z, second)

  assert is_any_nan(chain(use))


def test_a_stash_that_is_sealed_too_early_gives_nan():
  def use(f, stash, x):
    x, stash = f(stash, x)
    x = ps.seal(x, stash)
    return f(stash, x)[0]

  assert is_any_nan(chain(use))


WRONG_SLOT = ps.Slot(jnp.array([3], jnp.int32), jnp.array([5], jnp.int32))


def test_popping_out_of_order_gives_nan_from_there_on():
  assert is_any_nan(chain(lambda f, stash, x: ps.seal(*f(stash.pop(WRONG_SLOT), x))))


def test_popping_between_layers_gives_nan():
  """Even in order: rows that a layer still needs may be overwritten by the next."""

  def use(f, stash, x):
    y, stash = f(stash, x)
    last = ps.Slot(stash.top, jnp.zeros_like(stash.top))
    return ps.seal(y, stash.pop(last))

  assert is_any_nan(chain(use))


def test_a_stash_that_is_reset_between_layers_gives_nan():
  def use(f, stash, x):
    y, stash = f(stash, x)
    return ps.seal(y, stash.reset())

  assert is_any_nan(chain(use))


def test_pushing_between_layers_is_refused():
  def use(f, stash, x):
    y, stash = f(stash, x)
    stash, _ = stash.push([jnp.ones((ROWS, HIDDEN))] * 2, ragged_of(COUNTS[0]))
    return ps.seal(y, stash)

  with pytest.raises(NotImplementedError, match="through Stash.push"):
    chain(use)


def test_second_order_is_refused():
  gradient = jax.grad(functools.partial(scanned_loss, capacity=NEEDED))
  with pytest.raises(NotImplementedError, match="first-order reverse-mode"):
    jax.grad(lambda w: sum(jnp.sum(g**2) for g in gradient(w)))(weights())


def test_forward_mode_is_refused():
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jvp(functools.partial(scanned_loss, capacity=NEEDED), (weights(),), (weights(),))


def call(stash=None, ragged=None, saved="residual"):
  _, w_in, w_out = (leaf[0] for leaf in weights())
  stash = ps.Stash.empty(64, TWO) if stash is None else stash
  ragged = ragged_of(COUNTS[0]) if ragged is None else ragged
  f = ps.checkpoint(experts, policy=SAVE(saved))
  return jax.grad(lambda rows: f(stash, ragged, rows, w_in, w_out, COUNTS[0])[0].sum())(X)


@pytest.mark.parametrize(
  "options, message",
  [
    ({"ragged": ragged_of(COUNTS[0], 63)}, "No residual has ragged.total_rows=63 rows"),
    ({"saved": "nothing"}, "No residual has ragged.total_rows=64 rows"),
    ({"stash": ps.Stash.empty(64, TWO[:1])}, "must be those that the stash was made for"),
    ({"stash": ps.Stash.empty(64, [*TWO, *TWO])}, "must be those that the stash was made for"),
    ({"stash": (1, 2)}, "must be a Stash"),
    ({"ragged": COUNTS}, "must be RaggedRows"),
    ({"stash": ps.Stash.empty(64, TWO, num_shards=2)}, "has 2 shards here"),
  ],
)
def test_misuse_that_is_known_while_tracing(options, message):
  with pytest.raises(ValueError, match=message):
    call(**options)


def test_an_unknown_option_is_refused():
  with pytest.raises(ValueError, match=r"policy=\['residual'\] must be a function, or None"):
    ps.checkpoint(experts, policy=["residual"])
  with pytest.raises(ValueError, match="implementation='cuda' must be one of"):
    ps.checkpoint(experts, implementation="cuda")


def test_a_closed_over_traced_value_is_refused():
  @jax.jit
  def step(count, rows, w_in, w_out):
    f = ps.checkpoint(lambda rows, w_in: experts(rows, w_in, w_out, count))
    return f(ps.Stash.empty(64, TWO), ragged_of(count), rows, w_in)[0]

  with pytest.raises(ValueError, match="closes over traced values.*must be passed as arguments"):
    step(COUNTS[0], X, weights()[1][0], weights()[2][0])
