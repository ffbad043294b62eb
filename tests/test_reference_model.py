"""The reference model: its structures agree, it learns, it is causal."""

import ast
import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reference
from reference import model, moe
from tests.helpers.checks import long
from tests.helpers.reference_model import (
  assert_close,
  assert_trees,
  CONFIG,
  dense_block,
  in_jit,
  in_one_shard_map,
  mesh_of,
  NAMES,
  params_of,
)

pytestmark = pytest.mark.once


def batch_of(batch=4, seq=16, vocab=256):
  return jax.random.randint(jax.random.key(7), (batch, seq + 1), 0, vocab)


def count_rows(config):
  """A wrapped `expert_ffn` whose state, [1] on each device, counts the rows seen so far."""
  expert_ffn = jax.checkpoint(moe.ffn_of(config))
  return lambda state, sizes, *args: (expert_ffn(*args), state + jnp.sum(sizes))


@functools.cache
def dense_results(config):
  run = functools.partial(model.loss, config=config, moe=dense_block)
  return jax.jit(jax.value_and_grad(run, has_aux=True))(params_of(config), batch_of())


AGREE = [((2, 2, 2, True), in_one_shard_map)]
AGREE_FOR_LONG = [
  ((1, 4, 2, False), in_jit),
  ((1, 1, 2, True), in_jit),
  ((1, 2, 0, False), in_one_shard_map),
  ((1, 4, 2, True), in_one_shard_map),
  ((2, 2, 2, True), in_jit),
  # The other structure.
  ((1, 1, 2, True), in_one_shard_map),
  ((1, 2, 0, False), in_jit),
  ((1, 4, 2, True), in_jit),
  ((1, 4, 2, False), in_one_shard_map),
]


@pytest.mark.parametrize(
  "data, expert, num_heads, check_vma, structure, is_before",
  [
    *((*case, structure, False) for case, structure in AGREE),
    *(long(*case, structure, True) for case, structure in AGREE),
    *(long(*case, structure, i % 2 == 0) for i, (case, structure) in enumerate(AGREE_FOR_LONG)),
  ],
)
def test_structures_agree(data, expert, num_heads, check_vma, structure, is_before):
  config = dataclasses.replace(CONFIG, num_heads=num_heads)
  (loss, (_, sizes)), gradient = dense_results(config)
  config = dataclasses.replace(config, weights_before_down_projection=is_before)
  run = functools.partial(structure, mesh_of(data, expert), check_vma, config=config)
  run = functools.partial(run, ffn=count_rows(config), state=jnp.zeros(data * expert, jnp.int32))
  gradient_of = jax.jit(jax.value_and_grad(run, has_aux=True))
  params = params_of(config)
  (actual_loss, (state, actual_sizes)), actual_gradient = gradient_of(params, batch_of())
  assert_close(actual_loss, loss)
  assert_trees(assert_close, actual_gradient, gradient)
  np.testing.assert_array_equal(actual_sizes, sizes)
  rows = np.asarray(sizes).sum(0).reshape(expert, -1).sum(1)  # by device of the expert axis
  np.testing.assert_array_equal(state.reshape(data, expert).sum(0), rows)


def test_finish_sees_the_last_state():
  def block(x, layer_params, state, *, config, ffn):
    del layer_params, config, ffn
    return x, state + 1, jnp.zeros((1,), jnp.int32)

  def finish(x, state):
    return jnp.where(state == CONFIG.layers, jnp.nan, x)

  params = params_of(CONFIG)
  tokens = batch_of()[:, :-1]
  logits, state, _ = model.forward(
    params, tokens, config=CONFIG, state=jnp.int32(0), moe=block, finish=finish
  )
  assert np.isnan(logits).all()
  assert state == CONFIG.layers


def grouped_matmuls(jaxpr):
  """How many grouped matmuls a jaxpr contains, those of nested jaxprs included."""
  return str(jaxpr).count("ragged_dot_general[")


@pytest.mark.parametrize(
  "is_before, names, recomputed",
  [(False, (), 3), (False, NAMES, 0), (False, NAMES[:2], 1), (True, (), 2), (True, NAMES[:2], 0)],
)
def test_named_residuals_are_all_that_backward_needs(is_before, names, recomputed):
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  config = dataclasses.replace(CONFIG, weights_before_down_projection=is_before)
  run = functools.partial(in_jit, mesh_of(1, 1), True, config=config, policy=policy, state=None)
  gradient = jax.grad(run, has_aux=True)
  jaxpr = jax.make_jaxpr(gradient)(params_of(CONFIG), batch_of())
  assert grouped_matmuls(jaxpr) == 3 + recomputed + 6
  assert ("mlpwo" in str(jaxpr)) != is_before


def test_bfloat16():
  config = model.Config(**(vars(CONFIG) | dict(dtype=jnp.bfloat16)))
  params = params_of(config)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
  run = functools.partial(in_jit, mesh_of(1, 1), True, config=config, state=None)
  loss, _ = jax.jit(run)(params, batch_of())
  assert loss.dtype == jnp.float32
  assert loss == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.long
def test_trains_from_a_uniform_guess():
  params, optimizer = params_of(CONFIG), optax.adam(1e-2)
  text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 3, np.uint8)
  tokens = jnp.asarray(text[:132].reshape(4, 33), jnp.int32)
  run = functools.partial(in_jit, mesh_of(1, 1), True, config=CONFIG, state=None)

  @jax.jit
  def step(params, optimizer_state):
    (loss, _), gradient = jax.value_and_grad(run, has_aux=True)(params, tokens)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, loss

  carry = (params, optimizer.init(params))
  losses = []
  for _ in range(20):
    *carry, loss = step(*carry)
    losses.append(float(loss))
  assert losses[0] == pytest.approx(math.log(256), rel=0.02)
  assert losses[-1] < 0.5 * losses[0]


def test_causal():
  params = params_of(CONFIG)
  tokens = batch_of()[:, :-1]
  run = functools.partial(model.forward, params, config=CONFIG, moe=dense_block)
  before, after = run(tokens)[0], run(tokens.at[:, 9].set(tokens[:, 9] ^ 1))[0]
  assert_close(after[:, :9], before[:, :9])
  assert (np.abs(after[:, 9:] - before[:, 9:]).max(-1) > 1e-3).all()


def test_cross_entropy():
  logits = jnp.log(jnp.array([[1.0, 3.0], [1.0, 1.0]]))
  assert_close(model.cross_entropy(logits, jnp.array([1, 0])), -np.log(3 / 4 * 1 / 2) / 2)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(top_k=9), "self.top_k=9 must be at most self.num_experts=8"),
    (dict(num_heads=3), "self.width=32 must be a multiple of self.num_heads=3"),
  ],
)
def test_config_is_checked(change, message):
  with pytest.raises(ValueError, match=message):
    model.Config(**(vars(CONFIG) | change))


def test_imports_nothing_that_it_judges():
  (folder,) = reference.__path__
  imported = set()
  for source in pathlib.Path(folder).glob("*.py"):
    for node in ast.walk(ast.parse(source.read_text())):
      if isinstance(node, ast.Import):
        imported |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        imported.add(node.module)
  packages = {name.split(".")[0] for name in imported}
  assert packages <= {
    "collections",
    "dataclasses",
    "functools",
    "jax",
    "numpy",
    "reference",
    "typing",
  }
