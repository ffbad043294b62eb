"""`with_expected_rows`: what kernels declare of their cost, and that nothing else changes."""

import functools
import re

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import pallas_stash as ps
from pallas_stash import jaxprs
from tests.helpers.checks import assert_trees_equal
from tests.helpers.few_layers import SAVE
from tests.helpers.support import ON_TPU
from tests.test_handover_flags import flags_on, RUNS_FLAGS

M, WIDTH, GROUPS, LAYERS, EXPECTED = 512, 128, 4, 3, 100
TILING = (128, 128, 128)
multiply = functools.partial(megablox, tiling=TILING)
SPECS = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * 2

W = jnp.zeros((LAYERS, GROUPS, WIDTH, WIDTH))
X = jnp.zeros((M, WIDTH))
SIZES = jnp.array([[50, 0, 100, 28]] * LAYERS, jnp.int32)


def experts(x, w, sizes):
  hidden = checkpoint_name(multiply(x, w, sizes), "hidden")
  return jnp.where((jnp.arange(M) < jnp.sum(sizes))[:, None], jnp.tanh(hidden), 0)


def with_megablox(stash, x, w, sizes):
  return experts(x, w, sizes), stash


def with_checkpoint(stash, x, w, sizes):
  f = ps.checkpoint(experts, policy=SAVE("hidden"))
  return f(stash, ps.RaggedRows(sizes, M), x, w, sizes)


def with_gmm(stash, x, w, sizes, interpret=False):
  out, stash = ps.gmm(stash, x, w, sizes, x.dtype, tiling=TILING, interpret=interpret)
  return jnp.where((jnp.arange(M) < jnp.sum(sizes))[:, None], out, 0), stash


def with_mlp(stash, x, w, sizes):
  out, stash = ps.grouped_mlp(stash, x, w, w, w, sizes, tiling=TILING)
  return jnp.where((jnp.arange(M) < jnp.sum(sizes))[:, None], out, 0), stash


def gradient(block, residuals, x, w, sizes):
  """Returns the loss and gradients of layers, each replayed but for what is stashed."""

  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME), prevent_cse=False)
  def layer(x, stash, w, sizes):
    return block(stash, x, w, sizes)

  def loss(x, w):
    body = lambda carry, xs: (layer(*carry, *xs), None)
    (x, stash), _ = lax.scan(body, (x, ps.Stash.empty(LAYERS * M, SPECS[:residuals])), (w, sizes))
    return jnp.sum(ps.seal(x, stash) ** 2)

  return jax.value_and_grad(loss, (0, 1))(x, w)


def lowered(fun, *args):
  return jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def costs(text):
  """Returns (FLOPs, bytes) of each Pallas kernel that declares them."""
  found = re.findall(r"cost_estimate\\22: \{(.*?)\}", text)
  number = lambda name, fields: int(re.search(rf"{name}\\22: *(\d+)", fields)[1])
  return [tuple(number(name, fields) for name in ("flops", "bytes_accessed")) for fields in found]


def scaled(cost):
  return tuple(amount * EXPECTED // M for amount in cost)


BLOCKS = {
  "megablox": (with_megablox, 1),
  "checkpoint": (with_checkpoint, 1),
  "gmm": (with_gmm, 1),
  "grouped_mlp": (with_mlp, 2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_each_grouped_matmul_declares_the_rows_expected(name):
  block, residuals = BLOCKS[name]
  fun = functools.partial(gradient, block, residuals)
  plain = lowered(fun, X, W, SIZES)
  declared = lowered(ps.with_expected_rows(fun, EXPECTED, M), X, W, SIZES)
  assert len(costs(plain)) >= 3
  assert costs(declared) == list(map(scaled, costs(plain)))


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_else_of_the_program_changes(name):
  block, residuals = BLOCKS[name]
  fun = functools.partial(gradient, block, residuals)
  of_costs = r"cost_estimate=\S+\(.*?\)|\s*expected=\S+\(.*?\)|0x\w+"
  without_costs = lambda f: re.sub(of_costs, "", str(jax.make_jaxpr(f)(X, W, SIZES)))
  assert without_costs(fun) == without_costs(ps.with_expected_rows(fun, EXPECTED, M))


@pytest.mark.parametrize("name", ["gmm", "grouped_mlp"])
def test_results_and_gradients_are_the_same(name):
  block, residuals = BLOCKS[name]
  if name == "gmm":
    block = functools.partial(block, interpret=not ON_TPU)
  fun = functools.partial(gradient, block, residuals)
  keys = jax.random.split(jax.random.key(0))
  x, w = (jax.random.normal(key, a.shape) / 8 for key, a in zip(keys, (X, W), strict=True))
  found = jax.jit(ps.with_expected_rows(fun, EXPECTED, M))(x, w, SIZES)
  assert jnp.all(jnp.isfinite(found[0])) and jnp.any(found[1][1] != 0)
  assert_trees_equal(found, jax.jit(fun)(x, w, SIZES))


def test_other_buffers_keep_their_cost():
  """Of kernels, it is those with an array of so many rows."""

  def fun(x, few, w, sizes):
    return multiply(x, w, sizes), multiply(few, w, sizes)

  args = X, jnp.zeros((M // 2, WIDTH)), W[0], SIZES[0]
  (first, second), found = (
    costs(lowered(f, *args)) for f in (fun, ps.with_expected_rows(fun, EXPECTED, M))
  )
  assert found == [scaled(first), second]


def test_what_is_called_twice_is_lowered_once():
  once = jax.jit(multiply)
  fun = lambda x, w, sizes: once(once(x, w, sizes), w, sizes)
  args = X, W[0], SIZES[0]
  for f in (fun, ps.with_expected_rows(fun, EXPECTED, M)):
    assert len(costs(lowered(f, *args))) == 1


def test_a_product_that_is_left_of_a_replay():
  """What is not used of `gmm` is dropped behind it: the product declares its cost all the same."""
  stash = ps.Stash.empty(M, SPECS[:1])
  fun = lambda x: jax.vjp(lambda x: with_gmm(stash, x, W[0], SIZES[0]), x)[0]
  declared = ps.with_expected_rows(fun, EXPECTED, M)
  closed, out = jax.make_jaxpr(declared, return_shape=True)(X)
  is_used = [True] + [False] * (len(jax.tree.leaves(out)) - 1)
  jaxpr, _ = jaxprs.without_unused(closed.jaxpr, is_used)
  run = lambda f: costs(lowered(f, X))
  product = lambda x: jax.core.eval_jaxpr(jaxpr, closed.consts, x)
  (found,) = run(product)
  assert found == scaled(*run(fun))


def test_in_a_shard_map():
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
  run = lambda x: experts(x, W[0], SIZES[0])
  fun = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
  assert costs(lowered(ps.with_expected_rows(fun, M, M), X)) == costs(lowered(fun, X))
  (found,) = costs(lowered(ps.with_expected_rows(fun, EXPECTED, M), X))
  assert found == scaled(*costs(lowered(fun, X)))


@pytest.mark.skipif(not RUNS_FLAGS, reason="this jax cannot run a stash under it")
def test_under_the_other_implementation_of_checkpoint():
  """What it calls cannot be changed: then it is said, and not changed in part."""
  declared = ps.with_expected_rows(functools.partial(gradient, with_megablox, 1), EXPECTED, M)
  with flags_on("jax_remat3"), pytest.raises(ValueError, match="turn jax_remat3 and jax_cus"):
    lowered(declared, X, W, SIZES)


@pytest.mark.parametrize(
  "args, message",
  [
    ((1, EXPECTED, M), "fun=1 must be a function"),
    ((experts, 0, M), "expected_rows=0 must be positive"),
    ((experts, EXPECTED, 2.5), "total_rows=2.5 must be a static int"),
    ((experts, M + 1, M), "expected_rows=513 must be at most total_rows=512"),
  ],
)
def test_bad_arguments(args, message):
  with pytest.raises(ValueError, match=message):
    ps.with_expected_rows(*args)


def test_a_function_without_such_a_kernel():
  with pytest.raises(ValueError, match="total_rows=256 must be the rows of an array of a Pallas"):
    ps.with_expected_rows(experts, EXPECTED, 256)(X, W[0], SIZES[0])
  with pytest.raises(ValueError, match="total_rows=512 must be the rows of an array of a Pallas"):
    ps.with_expected_rows(jnp.sin, EXPECTED, M)(X)
  with pytest.raises(ValueError, match="must be arrays"):
    ps.with_expected_rows(experts, EXPECTED, M)(X, W[0], "sizes")
