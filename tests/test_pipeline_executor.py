"""Schedules that run: against worst-case residuals bit for bit, and against no pipeline at all."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bench.pipeline import drawing, stages, training
import pallas_stash as ps
from pallas_stash import pipeline
from reference import model
from tests.helpers.checks import assert_trees_equal, FUSED, is_any_nan, long, needs_devices, once

CONFIG = model.Config(
  vocab=64,
  width=32,
  hidden=48,
  num_experts=4,
  top_k=2,
  layers=4,
  num_heads=2,
  weights_before_down_projection=True,
)
RANKS, MICROBATCHES = 2, 4
JOB = stages.Job(CONFIG, RANKS, experts=2, microbatches=MICROBATCHES, batch=4, seq=16)
SCHEDULES = {
  "1F1B": pipeline.one_f_one_b(RANKS, MICROBATCHES),
  "interleaved": pipeline.interleaved(RANKS, 2, MICROBATCHES),
  "ZB-H1": pipeline.zero_bubble(RANKS, MICROBATCHES),
  "DualPipeV": pipeline.dual_pipe_v(RANKS, MICROBATCHES),
}
AMPLE, SHORT = 4096, 256

compiled = functools.partial(jax.jit, compiler_options=FUSED)


@functools.cache
def params_and_tokens():
  params = jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(0))
  shape = MICROBATCHES, JOB.batch, JOB.seq + 1
  return params, jax.random.randint(jax.random.key(1), shape, 0, CONFIG.vocab)


@functools.cache
def step(name, capacity, late=()):
  """Returns loss, gradients, statistics and rows of a step."""
  run = stages.pipelined(JOB, SCHEDULES[name], stages.Way(capacity, late=late))
  return jax.device_get(compiled(run)(*params_and_tokens()))


@functools.cache
def plain():
  return jax.device_get(compiled(stages.in_one_piece(JOB))(*params_and_tokens()))


def assert_close(actual, expected):
  check = functools.partial(np.testing.assert_allclose, rtol=1e-5)
  jax.tree.map(lambda a, b: check(a, b, atol=1e-5 * np.abs(b).max()), actual, expected)


@needs_devices(4)
@pytest.mark.parametrize("name", ["DualPipeV", *map(long, ("1F1B", "interleaved", "ZB-H1"))])
def test_gradients_are_those_of_worst_case_residuals(name):
  worst, ample = step(name, None), step(name, AMPLE)
  assert not is_any_nan(worst)
  assert_trees_equal(ample[:2], worst[:2])
  _, _, stats, rows = ample
  assert stats.overflowed_pushes.sum() == 0 == stats.rows_in_use.sum()
  # Within a tick a forward pass may come before a backward pass frees its rows.
  assert (0 < rows.max(0)).all() and (rows.max(0) <= stats.peak_rows).all()
  assert rows.shape == (len(pipeline.tabulate(SCHEDULES[name]).columns["f"]), 4)


@needs_devices(4)
@pytest.mark.parametrize("name", [once("ZB-H1"), long("DualPipeV")])
def test_gradients_in_two_halves(name):
  loss, gradients, stats, _ = step(name, AMPLE, ("experts",))
  # Each half alone has the bits of the whole, see `tests/test_passes_in_halves.py`; in the tick
  # loop XLA rounds them in another way.
  assert_close((loss, gradients), step(name, None)[:2])
  assert stats.overflowed_pushes.sum() == 0 == stats.rows_in_use.sum()
  # They need no other rows, nor for longer.
  *_, whole, _ = step(name, AMPLE)
  assert_trees_equal(stats, whole)


@pytest.mark.long
@needs_devices(4)
@pytest.mark.parametrize("name", ["ZB-H1", "DualPipeV"])
def test_in_two_halves_with_fewer_pages(name):
  loss, gradients, stats, _ = step(name, SHORT, ("experts",))
  assert_close((loss, gradients), plain())
  assert stats.overflowed_pushes.sum() > 0 == stats.rows_in_use.sum()


@pytest.mark.long
@needs_devices(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_without_a_pipeline(name):
  assert_close(step(name, None)[:2], plain())


@pytest.mark.long
@needs_devices(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_fewer_pages_layers_are_recomputed(name):
  loss, gradients, stats, _ = step(name, SHORT)
  assert_close((loss, gradients), plain())
  assert stats.overflowed_pushes.sum() > 0 == stats.rows_in_use.sum()
  assert stats.peak_rows.max() <= SHORT
  *_, ample, _ = step(name, AMPLE)
  # What would have been enough does not depend on what there was.
  np.testing.assert_array_equal(stats.sufficient_rows, ample.peak_rows)


@pytest.mark.long
@needs_devices(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stash_of_the_rows_that_sizing_gives_is_enough(name):
  schedule = SCHEDULES[name]
  layers = CONFIG.layers // len(schedule.placement)
  worst_case = ps.sizing.worst_case_rows(*JOB.routing)
  rows = pipeline.capacity_rows(schedule, None, worst_case, pushes=layers, page_rows=32)
  *_, stats, _ = step(name, rows)
  assert stats.overflowed_pushes.sum() == 0


@pytest.mark.once
def test_the_drawing_shows_every_pass():
  for schedule in SCHEDULES.values():
    table = pipeline.tabulate(schedule)
    drawn = sorted((rank, kind, chunk, m) for _, rank, kind, chunk, m in drawing.passes_of(table))
    programs = enumerate(schedule.programs)
    assert drawn == sorted((rank, *one) for rank, steps in programs for s in steps for one in s)


@pytest.mark.once
def test_checks_of_the_bench_find_what_is_wrong():
  fine = training.Training(np.array([2.0, 1.0]), {"w": np.array([1.0])}, 200)
  stash = dataclasses.replace(fine, temp_bytes=100)
  half = dataclasses.replace(stash, overflowed=3)
  trainings = {"worst case": fine, "stash": stash, "halves": stash, "half": half}
  schedule = SCHEDULES["1F1B"]
  assert training.check(schedule, trainings, fine) == []
  wrong = {
    "pushes overflowed": {"stash": dataclasses.replace(stash, overflowed=1)},
    "pushes overflowed: 2 of passes": {"halves": dataclasses.replace(stash, overflowed=2)},
    "losses": {"stash": dataclasses.replace(stash, losses=np.array([2.0, 1.0000001]))},
    "gradients differ": {"stash": dataclasses.replace(stash, gradients={"w": np.ones(1) + 1e-7})},
    "losses of half": {"half": dataclasses.replace(half, losses=np.array([2.0, 1.1]))},
    "gradients of half": {"half": dataclasses.replace(half, gradients={"w": np.full(1, np.nan)})},
    "the stash takes": {"stash": dataclasses.replace(stash, temp_bytes=200)},
  }
  for message, changed in wrong.items():
    (failure,) = training.check(schedule, trainings | changed, fine)
    assert f"1F1B: {message}" in failure
