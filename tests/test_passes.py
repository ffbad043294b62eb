"""Passes of several microbatches in one program, in any order, against `jax.vjp` of each."""

import functools
from itertools import starmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long
from tests.helpers.few_layers import SAVE
from tests.helpers.few_passes import (
  backward,
  compiled,
  D_OUTS,
  expected,
  FIRST_IN_FIRST_OUT,
  forward,
  LAST_IN_FIRST_OUT,
  LAYERS,
  ROWS,
  run,
  SIZES,
  SPECS,
  stage,
  WEIGHTS,
  WIDTH,
  XS,
)


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
