"""Passes of several microbatches in one program, in any order, against `jax.vjp` of each."""

import functools
from itertools import starmap

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash.jaxprs import inner_jaxprs
from tests.helpers.checks import assert_trees_equal, FUSED, long, needs_devices, once
from tests.helpers.few_layers import SAVE

WIDTH, HIDDEN, GROUPS, ROWS, LAYERS = 16, 24, 4, 96, 2
SIZES = jnp.array([[10, 0, 31, 3], [5, 5, 5, 5], [40, 20, 1, 30]], jnp.int32)
MICROBATCHES = len(SIZES)
FIRST_IN_FIRST_OUT = "F0 F1 B0 F2 B1 B2"
LAST_IN_FIRST_OUT = "F0 F1 F2 B2 B1 B0"


def ffn(rows, sizes, weights):
  live = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]
  rows = jnp.where(live, rows, 0)
  hidden = jnp.where(live, lax.ragged_dot(rows, weights["in"], sizes), 0)
  hidden = jax.nn.silu(checkpoint_name(hidden, "hidden"))
  return jnp.where(live, lax.ragged_dot(hidden, weights["out"], sizes), 0)


stashed_ffn = ps.checkpoint(ffn)


def stage(stash, weights, x, sizes):
  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME))
  def layer(carry, weights):
    x, stash = carry
    y, stash = stashed_ffn(stash, ps.RaggedRows(sizes, ROWS), x, sizes, weights)
    return (x + y, stash), None

  return lax.scan(layer, (x, stash), weights)[0]


def plain_stage(weights, x, sizes):
  layer = jax.checkpoint(lambda x, weights: (x + ffn(x, sizes, weights), None))
  return lax.scan(layer, x, weights)[0]


def draw(*shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


WEIGHTS = {
  "in": draw(LAYERS, GROUPS, WIDTH, HIDDEN, seed=0),
  "out": draw(LAYERS, GROUPS, HIDDEN, WIDTH, seed=1),
}
ONE_LAYER = jax.tree.map(lambda w: w[0], WEIGHTS)
XS, D_OUTS = (draw(MICROBATCHES, ROWS, WIDTH, seed=seed) for seed in (2, 3))
SPECS = stashed_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)
forward, backward = ps.split_passes(stage)
compiled = functools.partial(jax.jit, compiler_options=FUSED)


@functools.partial(compiled, static_argnums=0)
def run(schedule, stash):
  """Runs passes, "F0 B0" for example; returns the stash and the gradients of each microbatch."""
  saved, gradients = {}, {}
  for one in schedule.split():
    number = int(one[1])
    args = WEIGHTS, XS[number], SIZES[number]
    if one[0] == "F":
      _, stash, saved[number] = forward(stash, *args)
    else:
      stash, gradients[one] = backward(stash, saved[number], D_OUTS[number], *args)
  return stash, {one: (d_weights, d_x) for one, (d_weights, d_x, _) in gradients.items()}


@functools.cache
def expected(number):
  pull_back = lambda *args: jax.vjp(lambda *a: plain_stage(*a, SIZES[number]), *args)[1]
  gradients = compiled(lambda weights, x, d_out: pull_back(weights, x)(d_out))
  return gradients(WEIGHTS, XS[number], D_OUTS[number])


@pytest.mark.parametrize(
  "schedule, capacity, page_rows",
  [
    (FIRST_IN_FIRST_OUT, 512, 32),
    (LAST_IN_FIRST_OUT, 160, 32),
    *starmap(long, [(FIRST_IN_FIRST_OUT, 0, 32), (FIRST_IN_FIRST_OUT, 512, None)]),
    *starmap(long, [(LAST_IN_FIRST_OUT, 512, 32), (FIRST_IN_FIRST_OUT, 160, 32)]),
  ],
)
def test_gradients_in_any_order(schedule, capacity, page_rows):
  stash, gradients = run(schedule, ps.Stash.empty(capacity, SPECS, page_rows=page_rows))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  for one, found in gradients.items():
    # What is recomputed XLA may round in another way.
    same = assert_trees_equal if capacity == 512 else functools.partial(jax.tree.map, close)
    same(found, expected(int(one[1])))
  stats = stash.stats()
  assert (int(stats.overflowed_pushes[0]) > 0) == (capacity < 512)
  assert int(stats.rows_in_use[0]) == (0 if page_rows else stash.top[0])


def test_the_output_is_that_of_the_function():
  stash = ps.Stash.empty(512, SPECS, page_rows=32)
  args = WEIGHTS, XS[0], SIZES[0]
  out, after, saved = jax.jit(forward)(stash, *args)
  assert_trees_equal(out, jax.jit(stage)(stash, *args)[0])
  assert (int(saved.before[0]), int(saved.after[0])) == (0, LAYERS)
  assert int(after.stats().rows_in_use[0]) == LAYERS * 64


@pytest.mark.parametrize("schedule", [*map(long, ["F0 B0 F1 B0", "F0 B0 B0"]), "F0 F1 B0 F2 B0 B1"])
def test_a_second_backward_pass_is_nan(schedule):
  stash, gradients = run(schedule, ps.Stash.empty(512, SPECS, page_rows=32))
  assert np.isnan(stash.canary).all()
  # Of the second one, as of all that are behind it. No row of padding came through the experts.
  d_weights, d_x = gradients["B0"]
  assert all(np.isnan(d[:, SIZES[0] > 0]).all() for d in jax.tree.leaves(d_weights))
  np.testing.assert_array_equal(np.isnan(d_x).all(axis=1), np.arange(ROWS) < SIZES[0].sum())


def test_debug_says_that_rows_are_freed(capsys):
  with ps.debug():
    stash, gradients = run("F0 B0 F1 B0", ps.Stash.empty(512, SPECS, page_rows=32))
    jax.effects_barrier()
  assert np.isnan(stash.canary).all() and np.isnan(gradients["B0"][1]).any()
  (line,) = capsys.readouterr().out.splitlines()
  last = LAYERS - 1
  assert line.startswith(f"pallas_stash: the backward pass of push {last} (the first is 0) was")
  assert "has its rows no longer" in line


def test_input_gradients_early_and_weight_gradients_late():
  def early_and_late(stash):
    args = [(WEIGHTS, XS[number], SIZES[number]) for number in (0, 1)]
    _, stash, first = forward(stash, *args[0])
    _, (_, d_x, _) = backward(stash, first, D_OUTS[0], *args[0])
    _, stash, second = forward(stash, *args[1])
    stash, (d_weights, _, _) = backward(stash, first, D_OUTS[0], *args[0])
    stash, others = backward(stash, second, D_OUTS[1], *args[1])
    return stash, (d_weights, d_x), others[:2]

  stash, *found = compiled(early_and_late)(ps.Stash.empty(512, SPECS, page_rows=32))
  assert_trees_equal(found, [expected(0), expected(1)])
  assert int(stash.stats().rows_in_use[0]) == 0


def split_layers(is_checkpointed=True, **options):
  """Returns the passes of layers whose gradients of weights are late, and the residuals."""
  late_ffn = ps.checkpoint(ffn, late_argnames="weights", **options)

  def late_stage(stash, weights, x, sizes):
    def layer(carry, weights):
      x, stash = carry
      y, stash = late_ffn(stash, ps.RaggedRows(sizes, ROWS), x, sizes, weights)
      return (x + y, stash), None

    if is_checkpointed:
      layer = jax.checkpoint(layer, policy=SAVE(ps.SLOT_NAME))
    return lax.scan(layer, (x, stash), weights)[0]

  residuals = late_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)
  return *ps.split_passes(late_stage), residuals


of_both = lambda arrays: jnp.concatenate([arrays[0], arrays[1]])  # Of two microbatches, or shards.


def split_layer():
  """Returns a layer `(stash, weights, x, sizes) -> (y, stash)` of the same, and its residuals."""
  late_ffn = ps.checkpoint(ffn, policy=SAVE("hidden"), late_argnames="weights")

  def layer(stash, weights, x, sizes):
    return late_ffn(stash, ps.RaggedRows(sizes, ROWS), x, sizes, weights)

  return layer, late_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)


def run_halves(schedule, passes, stash):
  """Runs passes, "F0 I0 W0" for example; returns the stash and the gradients of each."""
  forward, backward = passes

  def run(stash):
    saved, gradients = {}, {}
    for one in schedule.split():
      kind, number = one[0], int(one[1])
      args = WEIGHTS, XS[number], SIZES[number]
      if kind == "F":
        _, stash, saved[number] = forward(stash, *args)
      else:
        run = {"B": backward, "I": backward.early, "W": backward.late}[kind]
        stash, (*gradients[one], _) = run(stash, saved[number], D_OUTS[number], *args)
    return stash, gradients

  return compiled(run)(stash)


@pytest.mark.parametrize(
  "capacity, options",
  [
    once(512, {"policy": SAVE("hidden")}),
    *starmap(long, [(512, {}), (160, {}), (0, {})]),
    long(512, {"implementation": "mosaic_interpret", "is_checkpointed": False}),
  ],
)
def test_two_halves(capacity, options):
  """Each in the bits of the whole, also where pushes do not fit and are recomputed."""
  *passes, residuals = split_layers(**options)
  stash = ps.Stash.empty(capacity, residuals, page_rows=32)
  stash, gradients = run_halves("F0 F1 I0 F2 I1 W0 B2 W1", passes, stash)
  same = assert_trees_equal
  if capacity < 512 or options.get("policy"):  # What is recomputed XLA may round in another way.
    same = functools.partial(
      jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    )
  for number in 0, 1:
    none = {"in": None, "out": None}
    (d_weights, none_of_x), (none_of_weights, d_x) = (gradients[f"{k}{number}"] for k in "WI")
    assert none_of_x is None and none_of_weights == none
    same((d_weights, d_x), expected(number))
  same(tuple(gradients["B2"]), expected(2))
  stats = stash.stats()
  assert (int(stats.overflowed_pushes[0]) > 0) == (capacity < 512)
  assert int(stats.rows_in_use[0]) == 0 == float(stash.canary[0])


@pytest.mark.long
def test_debug_of_halves(capsys):
  with ps.debug():
    test_two_halves(512, {})
    jax.effects_barrier()
  assert "came back" not in capsys.readouterr().out


@pytest.mark.once
def test_no_matmul_is_in_both_halves():
  *(forward, backward), residuals = split_layers()
  # Of rows, what a layer is given is one of the residuals here; beside them the cotangents.
  assert sorted(r.shape for r in residuals[-2:]) == [(WIDTH,), (HIDDEN,)]
  stash = ps.Stash.empty(512, residuals, page_rows=32)
  args = WEIGHTS, XS[0], SIZES[0]
  saved = jax.eval_shape(forward, stash, *args)[2]
  counts = [
    count_matmuls(jax.make_jaxpr(run)(stash, saved, D_OUTS[0], *args).jaxpr)
    for run in (backward, backward.early, backward.late)
  ]
  assert counts == [4, 2, 2]


@pytest.mark.once
def test_the_late_half_needs_nothing_in_front_of_the_experts():
  """Neither what makes their rows, nor what makes the sizes of their groups."""
  late_ffn = ps.checkpoint(ffn, policy=SAVE("hidden"), late_argnames=["weights"])
  mix = draw(LAYERS, WIDTH, WIDTH, seed=4)

  def late_stage(stash, weights, mix, x):
    @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME))
    def layer(carry, weights):
      x, stash = carry
      mixed = jnp.tanh(x @ weights["mix"])
      sizes = jnp.sum(jnp.argmax(mixed, 1)[:, None] == jnp.arange(GROUPS), 0, dtype=jnp.int32)
      y, stash = late_ffn(stash, ps.RaggedRows(sizes, ROWS), mixed, sizes, weights)
      return (x + y, stash), None

    return lax.scan(layer, (x, stash), weights | {"mix": mix})[0]

  residuals = late_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)
  stash = ps.Stash.empty(512, residuals, page_rows=32)
  forward, backward = ps.split_passes(late_stage)
  args = WEIGHTS, mix, XS[0]
  saved = jax.eval_shape(forward, stash, *args)[2]
  count = lambda run, name: count_matmuls(
    jax.make_jaxpr(run)(stash, saved, D_OUTS[0], *args).jaxpr, name
  )
  # Forward again, and both gradients.
  assert [count(run, "dot_general") for run in (backward, backward.early)] == [3, 3]
  assert count(backward.late, "dot_general") == 0
  assert [count(run, "ragged_dot") for run in (backward.early, backward.late)] == [2, 2]


def count_matmuls(jaxpr, name="ragged_dot"):
  """Counts those of a layer; of the branches of a cond, the one with the fewest."""
  total = 0
  for equation in jaxpr.eqns:
    inner = [count_matmuls(one, name) for one in inner_jaxprs(equation)]
    of_inner = min(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    total += of_inner + equation.primitive.name.startswith(name)
  return total


@pytest.mark.parametrize(
  "schedule, wrong",
  [
    once("F0 I0 I0", "I0"),
    *starmap(long, [("F0 W0", "W0"), ("F0 I0 B0", "B0"), ("F0 I0 W0 W0", "W0")]),
  ],
)
def test_halves_out_of_order_are_nan(schedule, wrong):
  *passes, residuals = split_layers()
  stash = ps.Stash.empty(512, residuals, page_rows=32)
  stash, gradients = run_halves(schedule, passes, stash)
  assert np.isnan(stash.canary).all()
  d_weights, d_x = gradients[wrong]
  of_groups = [d[:, SIZES[0] > 0] for d in jax.tree.leaves(d_weights)]
  of_rows = [] if d_x is None else [d_x[: SIZES[0].sum()]]
  assert all(np.isnan(d).all() for d in of_groups + of_rows)


@pytest.mark.once
@needs_devices(2)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_where_one_of_two_shards_stored_nothing(order):
  """The passes are around the `shard_map`: all shards are then recomputed, and none is NaN."""
  on_device, residuals = split_layer()
  mesh, spec = Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x")
  stage = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  forward, backward = ps.split_passes(stage)
  order = jnp.array(order)
  xs, sizes, d_outs = (array[order] for array in (XS, SIZES, D_OUTS))
  args = jax.tree.map(lambda w: of_both([w, w]), ONE_LAYER), of_both(xs), of_both(sizes)
  d_out = of_both(d_outs)

  @functools.partial(compiled, static_argnums=0)
  def gradients(capacity):
    stash = ps.Stash.empty(capacity, residuals, 2, page_rows=32)
    _, stash, saved = forward(stash, *args)
    stash, (_, d_x, _) = backward.early(stash, saved, d_out, *args)
    stash, (d_weights, _, _) = backward.late(stash, saved, d_out, *args)
    return saved.is_stored, stash.canary, (d_weights, d_x)

  *flags, expected = gradients(64)
  np.testing.assert_array_equal(flags, [[True, True], [0, 0]])
  *flags, actual = gradients(32)  # 44 rows of one shard, and 20 of the other
  np.testing.assert_array_equal(flags, [order == 1, [0, 0]])
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected
  )


@pytest.mark.once
@needs_devices(2)
def test_halves_in_a_shard_map_that_checks_what_varies():
  """Gradients of weights that all devices share are added up, in the half that has them."""
  stage, residuals = split_layer()
  mesh, spec = Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x")
  forward, backward = ps.split_passes(stage, axis_name="x")

  def on_device(weights, x, sizes, d_out):
    stash = ps.Stash.empty(64, residuals, page_rows=32)
    stash = jax.tree.map(lambda leaf: lax.pcast(leaf, "x", to="varying"), stash)
    _, stash, saved = forward(stash, weights, x, sizes)
    stash, (_, d_x, _) = backward.early(stash, saved, d_out, weights, x, sizes)
    _, (d_weights, _, _) = backward.late(stash, saved, d_out, weights, x, sizes)
    return d_weights, d_x

  specs = PartitionSpec(), spec, spec, spec
  both = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), spec))
  d_weights, d_x = compiled(both)(ONE_LAYER, of_both(XS), of_both(SIZES), of_both(D_OUTS))
  pull_backs = [jax.vjp(lambda w, x, i=i: ffn(x, SIZES[i], w), ONE_LAYER, XS[i])[1] for i in (0, 1)]
  (d_first, d_x_first), (d_second, d_x_second) = (pull_backs[i](D_OUTS[i]) for i in (0, 1))
  expected = jax.tree.map(jnp.add, d_first, d_second), of_both([d_x_first, d_x_second])
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, (d_weights, d_x), expected)


@pytest.mark.once
def test_halves_of_what_has_no_late_gradients():
  """All of them are early, and the late half frees the pages."""
  stash = ps.Stash.empty(512, SPECS, page_rows=32)
  stash, gradients = run_halves("F0 F1 I0 B1 W0", (forward, backward), stash)
  assert_trees_equal(tuple(gradients["I0"]), expected(0))
  assert jax.tree.leaves(gradients["W0"]) == [] and int(stash.stats().rows_in_use[0]) == 0


def test_refusals_of_halves():
  for names in (3, "sizes weight", ["weights", "nothing"]):
    with pytest.raises(ValueError, match="late_argnames=.* must be"):
      ps.checkpoint(ffn, late_argnames=names)
  args = WEIGHTS, XS[0], SIZES[0]
  without_pages = ps.Stash.empty(512, SPECS)
  _, stash, saved = jax.eval_shape(forward, without_pages, *args)
  for half in backward.early, backward.late:
    with pytest.raises(ValueError, match="stash=.* must have pages"):
      jax.eval_shape(half, without_pages, saved, D_OUTS[0], *args)

  late_ffn = ps.checkpoint(ffn, late_argnames="weights")

  def tied(stash, weights, x, sizes):
    y, stash = late_ffn(stash, ps.RaggedRows(sizes, ROWS), x, sizes, weights)
    return x + y @ (weights["in"][0] @ weights["out"][0]), stash

  args = ONE_LAYER, XS[0], SIZES[0]
  residuals = late_ffn.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)
  stash = ps.Stash.empty(512, residuals, page_rows=32)
  forward_of_tied, backward_of_tied = ps.split_passes(tied)
  saved = jax.eval_shape(forward_of_tied, stash, *args)[2]
  with pytest.raises(ValueError, match=r"args\[0\]\['in'\] has a gradient of which a part is late"):
    jax.eval_shape(backward_of_tied.early, stash, saved, D_OUTS[0], *args)

  def sums_up(rows, sizes, weights):
    return jnp.sum(ffn(rows, sizes, weights), axis=0)

  summed = ps.checkpoint(sums_up, late_argnames="weights")
  with pytest.raises(ValueError, match=r"needs the cotangent float32\[16\] of a result"):
    summed.residuals(ps.RaggedRows(SIZES[0], ROWS), XS[0], SIZES[0], ONE_LAYER)


def test_saved_has_shapes_and_no_arguments():
  """A carry can hold it: for each microbatch it has the same shapes."""
  stash = ps.Stash.empty(512, SPECS, page_rows=32)
  of = lambda number: jax.eval_shape(forward, stash, WEIGHTS, XS[number], SIZES[number])[2]
  assert of(0) == of(1)
  shapes = [x.shape for x in jax.tree.leaves(of(0))]
  assert WEIGHTS["in"].shape not in shapes
  assert (LAYERS, ROWS, WIDTH) in shapes  # What each layer is given.


def test_explain_tells_of_a_cast_weight():
  def cast(stash, weights, x, sizes):
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    return stage(stash, weights, x.astype(jnp.bfloat16), sizes)

  specs = [jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for s in SPECS]
  args = ps.Stash.empty(64, specs, page_rows=32), WEIGHTS, XS[0], SIZES[0]
  found = ps.split_passes(cast)[0].explain(*args)
  of_weights = [r for r, of in found.saved if of == ("args[0]['in']",)]
  assert [(r.operation, r.shape) for r in of_weights] == [
    ("convert_element_type", WEIGHTS["in"].shape)
  ]
  assert "convert_element_type" in str(found) and "Saved for each pass in flight" in str(found)
  kept = jax.checkpoint(cast, policy=SAVE(ps.SLOT_NAME))
  of_kept = ps.split_passes(kept)[0].explain(*args).saved
  assert not [r for r, of in of_kept if of == ("args[0]['in']",)]
  shapes = jax.eval_shape(lambda: args)
  assert str(ps.split_passes(cast)[0].explain(*shapes)) == str(found)


def test_refusals():
  stash = ps.Stash.empty(512, SPECS, page_rows=32)
  args = WEIGHTS, XS[0], SIZES[0]
  with pytest.raises(ValueError, match=r"fun=3 must be a function"):
    ps.split_passes(3)
  with pytest.raises(ValueError, match=r"stash=.* must be the Stash"):
    forward(*args)
  with pytest.raises(ValueError, match="the second result=.* must be the Stash"):
    ps.split_passes(lambda stash, x: (stash, x))[0](stash, XS[0])
  _, after, saved = jax.eval_shape(forward, stash, *args)
  with pytest.raises(ValueError, match=r"saved=.* must be what the forward pass saves"):
    jax.eval_shape(backward, after, saved.values, D_OUTS[0], *args)
  shorter = saved._replace(values=saved.values[1:])
  with pytest.raises(ValueError, match=r"saved=.* must be what the forward pass saves"):
    jax.eval_shape(backward, after, shorter, D_OUTS[0], *args)
  with pytest.raises(ValueError):
    jax.eval_shape(backward, after, saved, D_OUTS[0][:1], *args)

  def closes_over(x):
    return ps.split_passes(lambda stash, y: (x * y, stash))[0](stash, XS[0])

  with pytest.raises(ValueError, match="closes over traced values, float32"):
    jax.jit(closes_over)(XS[0])
