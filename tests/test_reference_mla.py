"""Latent attention of the reference model: by plain loops, causal, and the names for policies."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from reference import mla, model
from tests.helpers.reference_model import assert_close, assert_trees

pytestmark = pytest.mark.once

SIZES = mla.Sizes(query_rank=12, kv_rank=10, nope=6, rope=4, value=8)
HEADS, WIDTH, BATCH, SEQ = 3, 16, 2, 5
FEATURES = {
  "query_wa_proj": SIZES.query_rank,
  "mla_q": SIZES.query_rank,
  "kv_wa_proj": SIZES.kv_rank + SIZES.rope,
  "mla_kv": SIZES.kv_rank,
  "query_proj": HEADS * (SIZES.nope + SIZES.rope),
  "key_proj": HEADS * (SIZES.nope + SIZES.rope),
  "value_proj": HEADS * SIZES.value,
  "out_proj": WIDTH,
}
CONFIG = model.Config(
  vocab=32,
  width=WIDTH,
  hidden=8,
  num_experts=4,
  top_k=2,
  layers=2,
  num_heads=HEADS,
  latent_attention=SIZES,
)
attention = functools.partial(mla.attention, sizes=SIZES, num_heads=HEADS)


@functools.cache
def x_and_params():
  """x, and parameters whose norms have scales other than one."""
  params = mla.init(SIZES, HEADS, WIDTH, 1, jnp.float32, jax.random.key(0))
  params = jax.tree.map(lambda stacked: stacked[0], params)
  for i, name in enumerate(("query_norm", "kv_norm")):
    params[name] = jax.random.uniform(jax.random.key(i), params[name].shape, minval=0.5, maxval=2)
  return jax.random.normal(jax.random.key(3), (BATCH, SEQ, WIDTH)), params


def by_loops(x, params):
  """`attention` in float64, one sequence, head and position at a time."""
  params = {name: np.asarray(value, np.float64) for name, value in params.items()}
  norm = lambda x, scale: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale
  half, out = SIZES.rope // 2, np.zeros(x.shape)

  def rotated(features, position):
    pairs = features[:half] + 1j * features[half:]
    pairs = pairs * np.exp(1j * position * 10_000 ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])

  for sequence, sequence_out in zip(np.asarray(x, np.float64), out, strict=True):
    low_query = norm(sequence @ params["query_down"], params["query_norm"]) @ params["query_up"]
    down = sequence @ params["kv_down"]
    up = norm(down[:, : SIZES.kv_rank], params["kv_norm"]) @ params["kv_up"]
    heads = zip(
      np.split(low_query, HEADS, axis=1),
      np.split(up, HEADS, axis=1),
      np.split(params["out"], HEADS),
      strict=True,
    )
    for query, key_and_value, w_out in heads:
      for position in range(SEQ):
        scores = []
        for past in range(position + 1):
          without = query[position, : SIZES.nope] @ key_and_value[past, : SIZES.nope]
          rope_query = rotated(query[position, SIZES.nope :], position)
          with_position = rope_query @ rotated(down[past, SIZES.kv_rank :], past)
          scores.append((without + with_position) / np.sqrt(SIZES.nope + SIZES.rope))
        weights = np.exp(scores) / np.sum(np.exp(scores))
        values = key_and_value[: position + 1, SIZES.nope :]
        sequence_out[position] += weights @ values @ w_out
  return out


def test_is_what_plain_loops_compute():
  x, params = x_and_params()
  assert_close(jax.jit(attention)(x, params), by_loops(x, params))


def test_causal():
  x, params = x_and_params()
  run = jax.jit(attention)
  before, after = run(x, params), run(x.at[:, 3].add(1.0), params)
  np.testing.assert_array_equal(after[:, :3], before[:, :3])
  assert (np.abs(after[:, 3:] - before[:, 3:]).max(-1) > 1e-3).all()


def test_only_distances_of_positions_matter():
  """The same query and the same key everywhere: scores are the same along each diagonal."""
  x = jax.random.normal(jax.random.key(4), (1, 1, 2, SIZES.rope))
  query, key = jnp.split(jnp.tile(x, (1, SEQ, 1, 1)), 2, axis=2)
  scores = jnp.einsum("bqhd,bkhd->qk", mla.rotate(query), mla.rotate(key))
  for distance in range(SEQ):
    diagonal = jnp.diagonal(scores, -distance)
    assert_close(diagonal, jnp.full_like(diagonal, diagonal[0]))
  assert np.abs(np.diff(scores[:, 0])).min() > 1e-3


def gradient_of(*names):
  """Returns a function, the gradient of a loss with some names saved."""
  policy = jax.checkpoint_policies.save_only_these_names(*names)

  def loss(x, params):
    # What is behind needs the output, as the next norm of a model does.
    return jnp.sum(jnp.sin(jax.checkpoint(attention, policy=policy)(x, params)))

  return jax.grad(loss, argnums=(0, 1))


@functools.cache
def gradients():
  """Gradients by what is saved, a name or "nothing", from one program: that compiles faster."""
  by_name = {name: gradient_of(name) for name in mla.NAMES} | {"nothing": gradient_of()}
  run = jax.jit(lambda *args: {name: gradient(*args) for name, gradient in by_name.items()})
  return run(*x_and_params())


@pytest.mark.parametrize("name", mla.NAMES)
def test_gradients_with_one_name_saved(name):
  assert_trees(assert_close, gradients()[name], gradients()["nothing"])
  assert all(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(gradients()[name]))


def named_shapes(jaxpr):
  """The shape of each named value of a jaxpr, which has none inside of another."""
  return {
    eqn.params["name"]: eqn.outvars[0].aval.shape
    for eqn in jaxpr.eqns
    if eqn.primitive.name == "name"
  }


def test_names_are_of_rows():
  jaxpr = jax.make_jaxpr(attention)(*x_and_params()).jaxpr
  expected = {name: (BATCH * SEQ, features) for name, features in FEATURES.items()}
  assert named_shapes(jaxpr) == expected
  assert set(mla.NAMES) == set(FEATURES)


def test_every_name_can_be_stashed():
  """With gradients as of saving them."""
  x, params = x_and_params()
  policy = jax.checkpoint_policies.save_only_these_names(*mla.NAMES)
  f = ps.checkpoint(lambda x, params: jnp.sin(attention(x, params)), policy=policy)
  ragged = ps.RaggedRows(jnp.array([BATCH * SEQ], jnp.int32), BATCH * SEQ)
  residuals = f.residuals(ragged, x, params)
  # All of them: the sine needs the output.
  assert sorted(r.shape[0] for r in residuals) == sorted(FEATURES.values())

  def loss(x, params):
    out, stash = f(ps.Stash.empty(16, residuals), ragged, x, params)
    return jnp.sum(ps.seal(out, stash))

  actual = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, params)
  assert_trees(assert_close, actual, gradients()["nothing"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_in_the_model(dtype):
  """The model has it, in its dtype, and its gradients; by shapes alone."""
  config = dataclasses.replace(CONFIG, dtype=dtype)
  params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
  of_layer = mla.init(SIZES, HEADS, WIDTH, CONFIG.layers, dtype, jax.random.key(0))
  shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
  assert shapes(params["layers"]["attention"]) == shapes(of_layer)

  def block(x, layer_params, state, *, config, ffn):
    del layer_params, config, ffn
    return x, state, jnp.zeros((1,), jnp.int32)

  run = functools.partial(model.loss, config=config, moe=block)
  tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
  traced = jax.jit(jax.grad(run, has_aux=True)).trace(params, tokens)
  assert shapes(traced.out_info[0]) == shapes(params)
  assert set(re.findall(r"name=(\w+)", str(traced.jaxpr))) >= set(mla.NAMES)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: dataclasses.replace(SIZES, rope=3), "self.rope=3 must be even"),
    (lambda: dataclasses.replace(CONFIG, num_heads=0), "self.num_heads=0 must be at least 1"),
  ],
)
def test_sizes_are_checked(make, message):
  with pytest.raises(ValueError, match=message):
    make()
