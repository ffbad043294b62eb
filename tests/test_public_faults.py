"""Faults that users of related systems reported, each with a test that it is not here."""

import functools
import re

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import sizing
from tests.helpers import moe_training
from tests.helpers.checks import assert_trees_equal, is_any_nan, needs_devices
from tests.helpers.few_layers import (
  assert_close,
  check_gradient,
  FEATURES,
  gradient,
  loss,
  mask,
  SAVE,
  TOTAL_ROWS,
  weights_of,
  X,
)
from tests.helpers.moe_training import CONFIG
from tests.helpers.support import integers

WIDTH = 128
SPEC = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)]


def values(seed):
  return integers(seed, TOTAL_ROWS, WIDTH)


def ragged_of(*sizes, total_rows=TOTAL_ROWS):
  return ps.RaggedRows(np.array(sizes, np.int32), total_rows)


@jax.jit
def push(stash, rows, ragged):
  return stash.push(rows, ragged)


@jax.jit
def restore(stash, slot, ragged):
  return stash.restore(slot, ragged)


def push_all(stash, pushes):
  """Pushes `values(i)`, of `pushes[i]` rows each; returns the stash and the slots."""
  slots = []
  for seed, rows in enumerate(pushes):
    stash, slot = push(stash, [values(seed)], ragged_of(rows))
    slots.append(slot)
  return stash, slots


def assert_restored(stash, slots, pushes):
  for seed, (slot, rows) in enumerate(zip(slots, pushes, strict=True)):
    (restored,) = restore(stash, slot, ragged_of(rows))
    expected = np.where(np.arange(TOTAL_ROWS)[:, None] < rows, values(seed), 0)
    np.testing.assert_array_equal(restored, expected)


def test_pushes_near_the_end_do_not_move_onto_earlier_rows():
  """MaxText pull 3493, draft: `lax.dynamic_update_slice` of a maximal chunk, near the end of the
  shared buffer, is clamped onto rows of the layers before."""
  pushes = [16, 8, 5, 3]  # To the last tile, where a maximal chunk of 32 rows would not fit.
  stash, slots = push_all(ps.Stash.empty(40, SPEC), pushes)
  assert int(stash.stats().rows_in_use[0]) == 40
  assert_restored(stash, slots, pushes)


def test_the_next_push_starts_where_the_last_rows_end():
  """MaxText pull 3493, draft: the pointer advances by a maximal chunk, not by the rows written."""
  stash, slots = push_all(ps.Stash.empty(64, SPEC), [1, 8, 9, 0, 16])
  assert [int(slot.start[0]) for slot in slots] == [0, 8, 16, 32, 32]
  assert int(stash.stats().rows_in_use[0]) == 48
  assert int(stash.stats().overflowed_pushes[0]) == 0


def test_stale_rows_of_a_tail_tile_do_not_come_back():
  """Megablox leaves finite rows of an earlier tile behind the last group, and NaN further on: a
  residual that keeps them adds them to gradients."""

  def fun(rows, scale, count):
    row = jnp.arange(TOTAL_ROWS)[:, None]
    stale = jnp.where(row < count, rows * 2, jnp.where(row < 16, 1e6, jnp.nan))
    return checkpoint_name(stale, "residual") * scale

  count = jnp.int32(11)
  f = ps.checkpoint(fun, policy=SAVE("residual"))

  def total(scale):
    stash = ps.Stash.empty(16, [jax.ShapeDtypeStruct((FEATURES,), jnp.float32)])
    out, stash = f(stash, ps.RaggedRows(count[None], TOTAL_ROWS), X, scale, count)
    return jnp.sum(ps.seal(out, stash))

  assert_close(jax.jit(jax.grad(total))(jnp.ones(FEATURES)), 2 * X[:11].sum(0))


@needs_devices(2)
def test_router_weights_have_their_gradient():
  """MaxText pull 5042: a `None` cotangent silently makes the gradient of the router zero."""
  # Programs that `test_gradients.py` compiles too.
  saved = moe_training.gradients(CONFIG, 2, "inside", check_vma=True)[1]
  options = {"check_vma": True, "capacity": 10_000, "room": 10_000}
  stashed = moe_training.gradients(CONFIG, 2, "inside", **options)[1]
  router, expected = (gradients["layers"]["moe"]["router"] for gradients in (stashed, saved))
  assert (np.abs(router).max(axis=(1, 2)) > 1e-6).all()  # In every layer.
  assert_close(router, expected)


def test_router_weights_have_their_gradient_through_gmm():
  """The same, where the weight of each choice multiplies the rows before the grouped matmul."""
  sizes = jnp.array([9, 0, 14], jnp.int32)
  experts = jax.random.normal(jax.random.key(3), (3, FEATURES, FEATURES))
  spec = [jax.ShapeDtypeStruct((FEATURES,), jnp.float32)]

  def total(router, multiply):
    lhs = X * jax.nn.sigmoid(X @ router)
    return jnp.sum(mask(multiply(lhs, experts, sizes), 23) ** 2)

  def stashed(*operands):
    stash = ps.Stash.empty(24, spec)
    return ps.seal(*ps.gmm(stash, *operands, grouped_matmul=jax.lax.ragged_dot))

  actual, expected = (
    jax.jit(jax.grad(functools.partial(total, multiply=multiply)))(jnp.ones((FEATURES, 1)))
    for multiply in (stashed, jax.lax.ragged_dot)
  )
  assert (np.abs(actual) > 1e-3).all()
  assert_close(actual, expected)


def test_memory_that_was_never_written_is_never_read():
  """MaxText pulls 4905 and 4898: uninitialised rows are zero on a CPU and anything on a TPU."""
  poison = lambda buffer: jnp.full_like(buffer, jnp.nan)
  check_gradient([9, 0, 31, 1], 32, fresh=poison)
  stash, pushes = ps.Stash.empty(64, SPEC), [9, 0, 31, 1]
  stash.buffers = tuple(map(poison, stash.buffers))
  assert_restored(*push_all(stash, pushes), pushes)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_element_of_20_gib_is_numbered(platform):
  """Megatron-LM pull 6414: offsets of elements overflow int32 at 18 to 20 GiB of stash. Here only
  rows are numbered; `test_large_indices.py` runs what this looks at."""
  width, rows = 7168, 2**20 * 3 // 2
  struct = jax.ShapeDtypeStruct
  stash = jax.eval_shape(lambda: ps.Stash.empty(rows, [struct((width,), jnp.bfloat16)]))
  assert stash.buffers[0].size * 2 > 20 * 2**30

  def round_trip(stash, values, sizes):
    ragged = ps.RaggedRows(sizes, 4096)
    stash, slot = stash.push([values], ragged)
    return stash, stash.restore(slot, ragged)

  args = stash, struct((4096, width), jnp.bfloat16), struct((8,), jnp.int32)
  text = jax.jit(round_trip).trace(*args).lower(lowering_platforms=(platform,)).as_text()
  shapes = re.findall(r"tensor<((?:\d+x)+)", text)
  assert f"{rows}x{width}x" in shapes
  dimensions = [int(size) for shape in shapes for size in shape.split("x") if size]
  assert max(dimensions) == rows
  assert not re.search(rf"dense<{width}> : tensor<i(32|64)>", text)  # Nothing to multiply rows by.


def test_small_residuals_that_share_an_allocator_have_room():
  """NeMo Automodel bf89f30c9: small tensors that share one allocator are counted as fewer pages
  than they take."""
  specs = [
    jax.ShapeDtypeStruct((), jnp.float32),
    jax.ShapeDtypeStruct((3,), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((2, 5), jnp.bfloat16),
  ]
  layers = 6
  rows = sizing.expected_rows(1, 3, 1, 2)
  alignment = ps.Stash.empty(0, specs).alignment
  capacity = sizing.capacity_rows(1, 3, 1, 2, layers=layers, row_alignment=alignment)
  stash, ragged, pushed = ps.Stash.empty(capacity, specs), ragged_of(rows), []
  for seed in range(layers):
    of_spec = lambda spec, seed=seed: mask_rows(integers(seed, TOTAL_ROWS, *spec.shape), spec, rows)
    pushed.append([of_spec(spec) for spec in specs])
    stash, slot = push(stash, pushed[-1], ragged)
    pushed[-1].append(slot)
  assert stash.stats().overflowed_pushes.tolist() == [0]
  assert stash.stats().rows_in_use.tolist() == [stash.rows_per_shard] == [capacity]
  for *expected, slot in pushed:
    assert_trees_equal(restore(stash, slot, ragged), tuple(expected))


def mask_rows(array, spec, rows):
  array[rows:] = 0
  return array.astype(spec.dtype)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 17, 0, 4], [5, 0, 24, 0]])
@pytest.mark.parametrize("room", [0, 32])
def test_layers_to_which_nothing_is_routed(counts, room):
  """Reported of several systems: a layer without tokens divides by zero, hangs or is NaN."""
  actual, stats = check_gradient(counts, room)
  assert not is_any_nan(actual)
  assert stats.overflowed_pushes == sum(-(-n // 8) * 8 > room for n in counts)
  assert not np.any(actual[0][np.array(counts) == 0])


@needs_devices(2)
def test_a_device_without_tokens_beside_one_that_overflows():
  """Reported of several systems: devices that decide differently wait for each other, or one takes
  the other's decision."""
  counts = np.array([[0, 0, 0], [30, 2, 25]], np.int32)
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

  def on_device(weights, x, counts, room):
    value, stats = loss(weights, x[0], counts[0], room)
    overflowed = jnp.int32(0) if stats is None else stats.overflowed_pushes
    return jax.lax.psum(value, "x"), jnp.reshape(overflowed, 1)

  def total(weights, x, room):
    run = functools.partial(on_device, room=room)
    specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": (P(), P("x"))}
    run = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
    return run(weights, x, counts)

  run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2)
  args = weights_of(3), jnp.stack([X, X + 1])
  (value, _), expected = run(*args, None)
  (actual_value, overflowed), actual = run(*args, 8)
  jax.tree.map(assert_close, (actual_value, actual), (value, expected))
  assert overflowed.tolist() == [0, 2]


def test_the_number_of_microbatches_may_change():
  """Megatron-LM pull 5258: what was allocated for the microbatches of the first step is wrong for
  those of the next."""
  counts = np.array([[9, 20], [0, 31], [16, 3]], np.int32)
  step = jax.jit(
    lambda weights, counts: jax.lax.scan(
      lambda total, counts: (total + jax.grad(lambda w: loss(w, X, counts, 56)[0])(weights), None),
      jnp.zeros_like(weights),
      counts,
    )[0]
  )
  for microbatches in (3, 2, 3):
    expected = sum(gradient(weights_of(2), X, c)[1][0] for c in counts[:microbatches])
    assert_close(step(weights_of(2), counts[:microbatches]), expected)


def test_one_stash_for_steps_of_different_numbers_of_microbatches():
  """The same, where one stash lives on: every step takes its rows and gives all of them back."""
  stash = ps.Stash.empty(64, SPEC)
  for pushes in ([20, 9], [8, 8, 31, 1], [5], [16, 16, 16, 16]):
    stash, slots = push_all(stash, pushes)
    assert_restored(stash, slots, pushes)
    for slot in reversed(slots):
      stash = stash.pop(slot)
    assert stash.stats().rows_in_use.tolist() == stash.stats().overflowed_pushes.tolist() == [0]


def test_the_first_layer_need_not_use_the_stash():
  """Reported of several systems: the first layers of DeepSeek-V3 are dense, so what is numbered by
  layers is one off, or the first use is taken for the first layer."""

  def with_dense_layer(dense, weights, room):
    x = jnp.tanh(X @ dense)
    return loss(weights, x, np.array([9, 30], np.int32), room)[0]

  run = jax.jit(jax.grad(with_dense_layer, (0, 1)))
  args = weights_of(1)[0], weights_of(2)
  expected = run(*args, None)
  assert all(np.abs(leaf).max() > 1e-3 for leaf in expected)
  for room in 48, 16, 0:
    jax.tree.map(assert_close, run(*args, room), expected)


def test_a_retry_after_overflow_counts_once():
  """Reported of several systems: a step that is repeated with more room counts its metrics again,
  and so does a layer that is recomputed."""
  counts = [20, 0, 31, 5]
  _, stats = check_gradient(counts, 32)
  # 24 rows fit, then 32 do not, then 8 do.
  assert stats.overflowed_pushes == 1 and stats.peak_rows == stats.rows_in_use == 32
  assert stats.sufficient_rows == 24 + 0 + 32 + 8
  _, again = check_gradient(counts, stats.sufficient_rows)
  assert again == ps.StashStats(64, 64, 0, 0, 64)
