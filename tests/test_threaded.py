"""`threaded`: what a policy names is in a stash, and nothing else is another program."""

import collections
import functools
from itertools import starmap
import re

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
from pallas_stash.pushes import Pushes
from reference import model, moe
from tests.helpers.checks import assert_trees_equal, FUSED, long, needs_devices
from tests.helpers.moe_training import CONFIG, loss_function, NAMES, params_and_tokens, SAVE
from tests.helpers.threaded_models import (
  GROUPS,
  LAYERS,
  MODELS,
  names_in,
  plain,
  scanned,
  TOKENS,
  weights_of,
  X,
)

ALL = lambda worst_case_rows: worst_case_rows
OVERFLOWS = lambda worst_case_rows: worst_case_rows // 8


def weights_for(name):
  return weights_of(5 if name == "blocks" else LAYERS)


def results(fun, weights):
  """Returns the loss, its gradients, and the second result of `fun` if it has statistics."""

  def loss(x, weights):
    out = fun(x, weights)
    out, stats = out if isinstance(out, tuple) else (out, ())
    return jnp.sum(out**2), stats

  differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
  (value, stats), gradients = jax.jit(differentiate, compiler_options=FUSED)(X, weights)
  return (value, gradients), stats


@functools.cache
def saved(name):
  return results(MODELS[name](SAVE(*names_in(name))), weights_for(name))[0]


QUICK = (
  *("plain", "chunks", "two widths", "marks under jit", "rows named before the mark"),
  *("groups with starts", "in cond", "other results", "reversed", "rows of other ranks"),
)


@pytest.mark.parametrize("name", [name if name in QUICK else long(name) for name in MODELS])
def test_gradients_are_those_of_saving(name):
  fun = ps.threaded(MODELS[name](ps.save_in_stash(*names_in(name))), ALL, has_stats=True)
  actual, stats = results(fun, weights_for(name))
  assert_trees_equal(actual, saved(name))
  assert all(int(s.peak_rows[0]) > 0 and not int(s.overflowed_pushes[0]) for s in stats)


@pytest.mark.parametrize("name", [n if n in ("plain", "chunks") else long(n) for n in MODELS])
def test_rows_that_do_not_fit_are_recomputed(name):
  fun = ps.threaded(MODELS[name](ps.save_in_stash(*names_in(name))), OVERFLOWS, has_stats=True)
  actual, stats = results(fun, weights_for(name))
  assert_trees_equal(actual, saved(name))
  assert all(int(s.overflowed_pushes[0]) > 0 for s in stats)


@pytest.mark.parametrize(
  "name, pushes",
  [("chunks", 2 * LAYERS), long("rows of two lengths", 2 * LAYERS), long("blocks", 5)],
)
def test_one_push_for_each_mark(name, pushes):
  fun = ps.threaded(MODELS[name](ps.save_in_stash(*names_in(name))), 0, has_stats=True)
  _, stats = results(fun, weights_for(name))
  assert [int(s.overflowed_pushes[0]) for s in stats] == [pushes]


def test_what_is_named_before_its_rows_are_marked_is_stashed_too():
  model = MODELS["rows named before the mark"](ps.save_in_stash("sorted", "hidden"))
  (kind,) = Pushes(jax.make_jaxpr(model)(X, weights_of()).jaxpr).worst_cases
  assert kind.residuals == (((X.shape[1],), X.dtype),) * 2


def test_residuals_of_other_rows_have_a_stash_of_their_own():
  worst_cases = []

  def capacity_rows(worst_case_rows):
    worst_cases.append(worst_case_rows)
    return worst_case_rows

  fun = ps.threaded(MODELS["two widths"](ps.save_in_stash("hidden", "wide")), capacity_rows)
  jax.jit(fun).lower(X, weights_of())
  assert worst_cases == [LAYERS * TOKENS] * 2
  fun = ps.threaded(
    MODELS["rows of two lengths"](ps.save_in_stash("hidden", "twice")), capacity_rows
  )
  jax.jit(fun).lower(X, weights_of())
  assert worst_cases[2:] == [3 * LAYERS * TOKENS]


@pytest.mark.long
def test_each_stash_has_statistics_of_its_own():
  rooms = iter([0, LAYERS * TOKENS])
  model = MODELS["two widths"](ps.save_in_stash("hidden", "wide"))
  _, stats = results(ps.threaded(model, lambda _: next(rooms), has_stats=True), weights_of())
  assert [int(s.overflowed_pushes[0]) for s in stats] == [LAYERS, 0]


def test_the_worst_case_has_room_for_whole_tiles():
  """Of 21 rows, each push takes 24."""
  worst_cases = []
  fun = ps.threaded(
    scanned(plain)(ps.save_in_stash("hidden")), lambda w: worst_cases.append(w) or w
  )
  jax.jit(fun).lower(X[:21], weights_of())
  assert worst_cases == [LAYERS * 24]


def test_evaluation_moves_nothing():
  fun = ps.threaded(scanned(plain)(ps.save_in_stash("hidden")), ALL)
  assert "stash_compact" not in str(jax.make_jaxpr(fun)(X, weights_of()))
  assert_trees_equal(jax.jit(fun)(X, weights_of()), jax.jit(scanned(plain)(None))(X, weights_of()))


def test_outside_of_threaded_names_are_rematerialised():
  def text(policy):
    gradient = jax.grad(lambda weights: jnp.sum(scanned(plain)(policy)(X, weights)))
    return jax.jit(gradient).lower(weights_of()).as_text()

  assert text(ps.save_in_stash("hidden")) == text(None)


def test_keywords_and_statistics():
  fun = lambda x, *, weights: {"y": scanned(plain)(ps.save_in_stash("hidden"))(x, weights)}
  out, (stats,) = jax.jit(ps.threaded(fun, 64, has_stats=True))(X, weights=weights_of())
  assert list(out) == ["y"] and "of 64" in jax.device_get(stats).log_line(64)


def marked_ffn(config):
  ffn = functools.partial(moe.expert_ffn, grouped_matmul=config.grouped_matmul)

  def marked(state, group_sizes, *args):
    ps.mark_rows(ps.RaggedRows(group_sizes, args[1].shape[0]))
    return ffn(*args), state

  return marked


def reference_loss(structure, check_vma, policy, capacity_rows):
  """Returns the loss of the reference model; its code mentions no stash."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("expert",))

  def block(x, layer_params, state, *, config, ffn):
    run = lambda *args: moe.moe_block(*args, None, config=config, ffn=ffn)[::2]
    y, sizes = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(P("expert"), moe.param_specs(config)),
      out_specs=P("expert"),
      check_vma=check_vma,
    )(x, layer_params)
    return y, state, sizes

  options = {"config": CONFIG, "ffn": marked_ffn(CONFIG), "policy": policy}
  if structure == "outside":
    options["moe"] = block
  loss = lambda params, tokens: model.loss(params, tokens, **options)[0]
  if capacity_rows is not None:
    loss = ps.threaded(loss, capacity_rows)
  if structure == "outside":
    return loss
  return jax.shard_map(
    lambda *args: lax.pmean(loss(*args), "expert"),
    mesh=mesh,
    in_specs=(model.param_specs(CONFIG), P("expert")),
    out_specs=P(),
    check_vma=check_vma,
  )


@needs_devices(2)
@pytest.mark.parametrize(
  "structure, check_vma",
  [("inside", True), *starmap(long, [("outside", False), ("inside", False), ("outside", True)])],
)
def test_the_program_is_that_of_threading_by_hand(structure, check_vma):
  capacity = 2 * 96
  by_hand = loss_function(CONFIG, 2, structure, check_vma, capacity)
  loss = reference_loss(structure, check_vma, ps.save_in_stash(*NAMES), capacity)
  params_tokens = params_and_tokens(CONFIG)
  first = lambda *args: by_hand(*args, None)[0]
  options = {"compiler_options": FUSED}
  hand, auto = (
    jax.jit(jax.grad(f), **options).lower(*params_tokens).compile() for f in (first, loss)
  )
  assert instructions(auto) == instructions(hand)
  sizes = [c.memory_analysis().temp_size_in_bytes for c in (hand, auto)]
  assert sizes[0] == sizes[1]
  assert_trees_equal(auto(*params_tokens), hand(*params_tokens))


def instructions(compiled):
  """Returns how often a program has each instruction, with the shape that it makes."""
  return collections.Counter(re.findall(r" = (\S+ [a-z\-]+)\(", compiled.as_text()))


@needs_devices(2)
@pytest.mark.long
@pytest.mark.parametrize("structure", ["inside", "outside"])
def test_gradients_of_the_reference_model(structure):
  args = params_and_tokens(CONFIG)
  run = lambda *options: jax.jit(
    jax.value_and_grad(reference_loss(structure, True, *options)), compiler_options=FUSED
  )(*args)
  expected = run(SAVE(*NAMES), None)
  assert_trees_equal(run(ps.save_in_stash(*NAMES), ALL), expected)
  half = ps.save_in_stash("mlpwo", policy=SAVE("mlpwi_0", "mlpwi_1"))
  assert_trees_equal(run(half, lambda rows: rows // 4), expected)


def with_sum(axes):
  """A layer whose experts exchange something: devices have to agree on what they recompute."""

  def layer(x, weights):
    count = 4 + 8 * lax.axis_index("x")
    ps.mark_rows(ps.RaggedRows(count[None], TOKENS))
    live = (jnp.arange(TOKENS) < count)[:, None]
    hidden = checkpoint_name(jnp.where(live, x @ weights[0], 0), "hidden")
    mean = lax.pmean(hidden, "x") if axes else hidden
    return x + jnp.where(live, jnp.sin(mean) * hidden, 0), None

  return layer


@needs_devices(2)
@pytest.mark.parametrize("exchanges", [True, False])
def test_devices_agree_where_the_function_exchanges(exchanges):
  """The rows of one device fit, those of the other do not."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

  def run(policy, wrap):
    def device_loss(x, weights):
      step = jax.checkpoint(with_sum(exchanges), policy=policy)
      x = lax.pcast(x, "x", to="varying")
      y, stats = wrap(lambda x, weights: lax.scan(step, x, weights)[0])(x, weights)
      return lax.pmean(jnp.sum(y**2), "x"), stats

    loss = jax.shard_map(device_loss, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P("x")))
    (value, stats), gradients = jax.jit(jax.value_and_grad(loss, 1, has_aux=True))(X, weights_of())
    return (value, gradients), stats

  expected, _ = run(SAVE("hidden"), lambda f: lambda *args: (f(*args), ()))
  stashed = functools.partial(ps.threaded, capacity_rows=LAYERS * 8, has_stats=True)
  actual, (stats,) = run(ps.save_in_stash("hidden"), stashed)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
  )
  overflowed = [LAYERS - 1] * 2 if exchanges else [0, LAYERS - 1]
  assert stats.overflowed_pushes.tolist() == overflowed


@pytest.mark.long
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_compiled_for_a_tpu(chip):
  """The kernels store and read the rows, the stash is never copied, and no matmul is replayed."""
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  shapes = (256, 1024), (LAYERS, GROUPS, 1024, 1024)
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  args = aot.place(args, aot.mesh(chip))

  def compiled(policy, wrap):
    model = wrap(scanned(plain)(policy))
    return aot.compile(jax.grad(lambda x, w: jnp.sum(model(x, w) ** 2), (0, 1)), *args)

  saved = compiled(SAVE("hidden"), lambda fun: fun)
  stashed = compiled(
    ps.save_in_stash("hidden"), functools.partial(ps.threaded, capacity_rows=262_136)
  )
  assert not stashed.copies(jax.ShapeDtypeStruct((262_136, 1024), jnp.float32))
  matmuls = lambda program: program.matmuls(is_conditional=False).total()
  assert matmuls(stashed) == matmuls(saved)
  assert {"stash_compact", "stash_expand"} <= set(stashed.kernels())
