"""What `tests/test_composition.py` does not pair: no `jit`, flax's loops, evaluation, refusals."""

import functools
import itertools
import pathlib
import re

from flax import linen, nnx
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long, needs_devices, once
from tests.helpers.composition import AXES, Case, cases_of_all_pairs
from tests.helpers.composition_check import check, expected_gradients
from tests.helpers.composition_flax import LinenLayer, NnxLayer
from tests.helpers.composition_layers import loss_function, MESH_AXES, mesh_of, RESIDUALS
from tests.helpers.composition_model import (
  dense_layer,
  experts,
  LAYERS,
  moe_layer,
  params_and_tokens,
  SAVE,
  WIDTH,
)
from tests.helpers.composition_step import arguments, place

ROWS = 200  # Enough for the experts of all layers but one, and no other size of the model.


@pytest.mark.parametrize(
  "case",
  [
    once(Case(call="eager", remat="save names", result="value and aux", capacity="half")),
    long(Case(call="eager", loop="unrolled", vmap="inputs")),
    pytest.param(
      Case(call="eager", remat="save names", devices="2", shard_map="in layer"),
      marks=(needs_devices(2), pytest.mark.long),
    ),
  ],
  ids=str,
)
def test_without_jit(case):
  check(case)


def stashing_layer(carry, xs):
  """A layer with experts, as a user would write it."""
  weights, _ = xs
  x, stash = carry
  f = ps.checkpoint(experts, policy=SAVE("hidden"))
  ffn = lambda stash, sizes, *args: f(stash, ps.RaggedRows(sizes, args[1].shape[0]), *args)
  return moe_layer(weights, dense_layer(weights, x), stash, ffn)[:2], None


def squares(x, stash):
  return jnp.sum(ps.seal(x, stash) ** 2)


def test_linen_scan_and_remat():
  params, tokens = params_and_tokens()
  like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), params)
  layer = linen.remat(LinenLayer, policy=SAVE(ps.SLOT_NAME), prevent_cse=False)
  axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
  layers = linen.scan(layer, length=LAYERS, **axes)(stashing_layer, like)

  def loss(params, x):
    carry, _ = layers.apply({"params": params}, (x, ps.Stash.empty(ROWS, RESIDUALS)), None)
    return squares(*carry)

  assert_trees_equal(jax.jit(jax.value_and_grad(loss))(params, tokens), expected_gradients(Case()))
  carry = tokens, ps.Stash.empty(ROWS, RESIDUALS)
  made = jax.eval_shape(layers.init, jax.random.key(0), carry, None)["params"]
  assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


@pytest.mark.once
def test_nnx_scan_and_remat():
  params, tokens = params_and_tokens()
  model = NnxLayer(params, stashing_layer)

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  @functools.partial(nnx.remat, policy=SAVE(ps.SLOT_NAME))
  def layers(carry, layer):
    return layer(carry, None)[0]

  @nnx.jit
  def gradient(model, x):
    loss = lambda model, x: squares(*layers((x, ps.Stash.empty(ROWS, RESIDUALS)), model))
    return nnx.value_and_grad(loss)(model, x)

  value, gradients = gradient(model, tokens)
  assert_trees_equal((value, nnx.to_pure_dict(gradients)), expected_gradients(Case()))


@pytest.mark.once
def test_gradients_of_each_example():
  """`vmap` of `grad`, not `grad` of `vmap`."""
  case = Case(vmap="models", remat="save names")
  params, _, _, tokens = arguments(case, ROWS)
  loss = loss_function(case, ROWS)
  gradient = jax.vmap(jax.grad(lambda *args: loss(*args, None)[0]))
  assert_trees_equal(jax.jit(gradient)(params, tokens[0]), expected_gradients(case)[1])


def two_axes(axis, other, first, second):
  """Parameters: an option of each of two axes, each of two pairs once, others for long."""
  mark = lambda pair: once if pair in (first, second) else long
  return [mark(pair)(*pair) for pair in itertools.product(AXES[axis], AXES[other])]


@pytest.mark.parametrize(
  "shard_map, cond",
  two_axes("shard_map", "cond", ("around", "yes"), ("in layer, unchecked", "no")),
)
def test_evaluation_does_not_touch_the_stash(shard_map, cond):
  """Without gradients the compiled program at most hands it on."""
  case = Case(remat="save names", shard_map=shard_map, cond=cond, microbatches="one stash")
  params, _, stash, tokens = place(case, arguments(case, ROWS))
  loss = loss_function(case, ROWS)

  def uses(fun):
    program = aot.Program(jax.jit(fun).lower(params, tokens[0, 0], stash).compile())
    updates = [i for i in program.instructions if "dynamic-update-slice" in i.opcode + i.name]
    updates = [i for i in updates if f"f32[{ROWS},128]" in i.result]
    return [*program.copies(*stash.buffers), *updates, *program.kernels()]

  evaluate = lambda *args: loss(*args)[0]
  assert not uses(evaluate)
  assert uses(jax.grad(evaluate))


@pytest.mark.parametrize(
  "remat, cond", two_axes("remat", "cond", ("none", "yes"), ("save names", "no"))
)
def test_no_layer_saves_the_stash(remat, cond):
  """Nothing has the stash's shape and an axis of layers."""
  case = Case(remat=remat, cond=cond)
  params, _, _, tokens = arguments(case, ROWS)
  loss = loss_function(case, ROWS)
  gradient = jax.grad(lambda params, x: loss(params, x, None)[0])
  text = jax.jit(gradient).lower(params, tokens[0, 0]).compile().as_text()
  assert f"f32[{ROWS},128]" in text and f"f32[{LAYERS},{ROWS},128]" not in text
  assert f"f32[{LAYERS},{WIDTH},{WIDTH}]" in text  # As what has that axis is written there.


@needs_devices(2)
def test_a_stash_that_does_not_vary_is_refused_in_a_scan():
  f = ps.checkpoint(lambda x: jnp.sin(jnp.sin(x)))

  def layers(x):
    stash = ps.Stash.empty(8, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    layer = lambda carry, _: (f(carry[1], ps.RaggedRows(jnp.array([3]), 8), carry[0]), None)
    return lax.scan(layer, (x, stash), length=2)[0][0]

  spec = jax.sharding.PartitionSpec(MESH_AXES)
  run = jax.shard_map(layers, mesh=mesh_of(Case(devices="2")), in_specs=spec, out_specs=spec)
  with pytest.raises(TypeError, match=r"jax.lax.pcast\(.* to='varying'\)"):
    run(jnp.ones((16, 4)))


def test_a_module_that_is_closed_over_is_refused():
  class Layer(linen.Module):
    @linen.compact
    def __call__(self, rows, stash):
      dense = linen.Dense(4)
      f = ps.checkpoint(lambda rows: jnp.sin(dense(rows)))
      return f(stash, ps.RaggedRows(jnp.array([3]), 8), rows)

  rows = jnp.ones((8, 4))
  stash = ps.Stash.empty(8, [jax.ShapeDtypeStruct((4,), jnp.float32)])
  params = {"params": {"Dense_0": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}}
  with pytest.raises(ValueError, match="closes over traced values.*must be passed as arguments"):
    jax.jit(Layer().apply)(params, rows, stash)


def test_a_stash_as_argument_is_refused_by_export():
  empty = lambda: ps.Stash.empty(8, RESIDUALS)
  exported = jax.export.export(jax.jit(ps.Stash.reset))(empty())
  with pytest.raises(ValueError, match="register_pytree_node_serialization"):
    exported.serialize()


def test_the_documents_name_what_is_paired():
  page = (pathlib.Path(__file__).parent.parent / "docs" / "composition.md").read_text()
  table = re.findall(r"^\| (\w+) \| (.*?) \|$", page, re.MULTILINE)
  assert {axis: tuple(options.split("; ")) for axis, options in table[1:]} == AXES
  assert f"{len(cases_of_all_pairs())} programs" in page
