"""Backward passes in two halves, against `jax.vjp`: gradients of weights come late."""

import functools
from itertools import starmap

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash.jaxprs import inner_jaxprs
from tests.helpers.checks import assert_trees_equal, long, needs_devices, once
from tests.helpers.few_layers import SAVE
from tests.helpers.few_passes import (
  backward,
  compiled,
  D_OUTS,
  draw,
  expected,
  ffn,
  forward,
  GROUPS,
  HIDDEN,
  LAYERS,
  ONE_LAYER,
  ROWS,
  run,
  SIZES,
  SPECS,
  WEIGHTS,
  WIDTH,
  XS,
)


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
  stash, gradients = run("F0 F1 I0 F2 I1 W0 B2 W1", stash, tuple(passes))
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
  same(gradients["B2"], expected(2))
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
  stash, gradients = run(schedule, stash, tuple(passes))
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
  stash, gradients = run("F0 F1 I0 B1 W0", stash)
  assert_trees_equal(gradients["I0"], expected(0))
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
