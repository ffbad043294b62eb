"""The debug mode: what holds nothing is NaN, what changed in the stash is found, off it costs 0."""

import dataclasses
import functools
import os
import subprocess
import sys

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
from tests.helpers import moe_training
from tests.helpers.checks import assert_trees_equal, is_any_nan, needs_devices, once
from tests.helpers.support import random_bits

ROWS, WIDTH, LAYERS = 64, 16, 3
SAVE = jax.checkpoint_policies.save_only_these_names
SPECS = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)]
RAGGED = ps.RaggedRows(jnp.array([9, 0, 4]), ROWS)
ROOM = LAYERS * 16


def layer(rows, w, group_sizes):
  live = (jnp.arange(ROWS) < group_sizes.sum())[:, None]
  hidden = checkpoint_name(jnp.where(live, rows @ w, 0), "hidden")
  return jnp.where(live, jnp.sin(hidden) @ w.T, 0)


def loss(weights, x, group_sizes, changed_row):
  """A scan of layers under `jax.checkpoint`. Before the backward pass, a row of the stash changes.

  None does if `changed_row`, int32[], is `ROOM`: updates outside an array are dropped.
  """
  f = ps.checkpoint(layer, policy=SAVE("hidden"))

  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME))
  def step(carry, w):
    x, stash = carry
    out, stash = f(stash, ps.RaggedRows(group_sizes, ROWS), x, w, group_sizes)
    return (x + out, stash), None

  specs = f.residuals(ps.RaggedRows(group_sizes, ROWS), x, weights[0], group_sizes)
  (x, stash), _ = lax.scan(step, (x, ps.Stash.empty(ROOM, specs)), weights)
  return jnp.sum(ps.seal(x, change_in_backward(stash, changed_row)) ** 2)


gradient_of_loss = jax.jit(jax.grad(loss))


@jax.custom_vjp
def change_in_backward(stash, row):
  del row
  return stash


def _change(row, d_stash):
  buffers = tuple(buffer.at[row, 3].multiply(-1) for buffer in d_stash.buffers)
  return with_buffers(d_stash, *buffers), None


change_in_backward.defvjp(lambda stash, row: (stash, row), _change)


def with_buffers(stash, *buffers):
  return dataclasses.replace(stash, buffers=buffers)


def arguments(changed_row=ROOM, group_sizes=RAGGED.group_sizes):
  keys = jax.random.split(jax.random.key(0))
  weights = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 3
  x = jax.random.normal(keys[1], (ROWS, WIDTH))
  return weights, x, group_sizes, jnp.int32(changed_row)


@functools.partial(jax.jit, static_argnames="capacity")
def push(values, ragged=RAGGED, capacity=ROOM):
  specs = [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in values]
  return ps.Stash.empty(capacity, specs).push(values, ragged)


restore = jax.jit(ps.Stash.restore)


def ones():
  return [jnp.ones((ROWS, WIDTH))]


def test_rows_that_hold_nothing_are_nan():
  with ps.debug():
    assert np.isnan(ps.Stash.empty(ROOM, SPECS).buffers[0]).all()
    stash, first = push(ones())
    stash, second = stash.push(ones(), RAGGED)
    used = np.isnan(stash.buffers[0][:, :WIDTH]).all(1)
    # Two pushes of 13 rows, each rounded up to 16.
    row = np.arange(ROOM)
    np.testing.assert_array_equal(used, (row % 16 >= 13) | (row >= 32))
    stash = stash.pop(second)
    assert np.isnan(stash.buffers[0][16:]).all()
    assert np.isnan(stash.reset().buffers[0]).all()
    assert_trees_equal(restore(stash, first, RAGGED), restore(push(ones())[0], first, RAGGED))
    wrong = stash.pop(ps.Slot(first.start + 8, first.rows))
    assert_trees_equal(wrong.buffers, stash.buffers)  # It freed nothing.


def test_a_global_stash_is_nan():
  with ps.debug():
    (buffer,) = ps.Stash.empty(8, SPECS, num_shards=2).buffers
  assert buffer.shape == (16, 128) and np.isnan(buffer).all()


def assert_rows_equal(actual, expected):
  """Numpy takes no two NaNs of a small dtype for equal."""
  np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


@pytest.mark.once
def test_any_one_bit_is_found(capsys):
  """Of any element, in groups at odd places."""
  rng = np.random.default_rng(0)
  ragged = ps.RaggedRows(jnp.array([3, 0, 6]), ROWS, jnp.array([40, 0, 11]))
  dtypes = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
  values = [random_bits(rng, (ROWS, 3, 5), dtype) for dtype in dtypes]
  live = np.asarray(ragged.is_in_group())
  with ps.debug():
    stash, slot = push(values, ragged)
    intact = restore(stash, slot, ragged)
    for value, restored in zip(values, intact, strict=True):
      assert_rows_equal(np.asarray(restored)[live], value[live])
    for index, dtype in enumerate(dtypes):
      buffers = [np.array(buffer) for buffer in stash.buffers]
      words = buffers[index].view(f"uint{8 * jnp.dtype(dtype).itemsize}")
      finite = np.argwhere(~np.isnan(intact[index][live].reshape(9, 15)))
      # Groups are stored in their order.
      row, column = rng.choice(finite)
      words[(row + 3) % 9, column] ^= 1 << rng.integers(2)
      restored = restore(with_buffers(stash, *buffers), slot, ragged)
      for other in range(len(dtypes)):
        expected = np.full_like(intact[other], np.nan) if other == index else intact[other]
        assert_rows_equal(restored[other], expected)
      jax.effects_barrier()
      assert f"9 rows of the residual {dtype}[3, 5] came back" in capsys.readouterr().out


@pytest.mark.once
def test_which_nan_it_is_is_not_checked():
  """XLA on a CPU may rewrite that of some dtypes."""
  values = [ones()[0].at[2, 3].set(jnp.nan)]
  with ps.debug():
    stash, slot = push(values)
    buffer = np.array(stash.buffers[0])
    buffer.view(np.uint32)[2, 3] ^= 1
    (restored,) = restore(with_buffers(stash, buffer), slot, RAGGED)
  assert np.isnan(restored).sum() == 1


@pytest.mark.once
def test_rows_that_change_places_are_found():
  values = [jax.random.normal(jax.random.key(0), (ROWS, WIDTH))]
  with ps.debug():
    stash, slot = push(values)
    (buffer,) = stash.buffers
    swapped = buffer.at[jnp.array([2, 5])].set(buffer[jnp.array([5, 2])])
    swapped = with_buffers(stash, swapped)
    assert np.isnan(restore(swapped, slot, RAGGED)[0]).all()
    # As many rows as were pushed, in another place.
    elsewhere = ps.RaggedRows(jnp.array([13]), ROWS, jnp.array([1]))
    assert np.isnan(restore(stash, slot, elsewhere)[0]).all()
    assert not is_any_nan(restore(stash, slot, RAGGED))


def test_what_is_not_stored_is_nan_without_a_message(capsys):
  with ps.debug():
    stash, slot = push(ones(), capacity=8)
    assert np.isnan(restore(stash, slot, RAGGED)[0]).all()
    jax.effects_barrier()
  assert capsys.readouterr().out == ""


def test_a_bit_that_changes_before_the_backward_pass(capsys):
  plain = gradient_of_loss(*arguments())
  unnoticed = gradient_of_loss(*arguments(18))
  assert not is_any_nan(unnoticed) and bool((unnoticed != plain).any())
  with ps.debug():
    # What is no row's may change: here in the rows that round a push up to a tile.
    for intact in (ROOM, 14):
      assert_trees_equal(gradient_of_loss(*arguments(intact)), plain)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""
    noticed = gradient_of_loss(*arguments(18))
    jax.effects_barrier()
  assert "13 rows of the residual float32[16] came back" in capsys.readouterr().out
  # Row 18 is the second layer's: its gradients are NaN, and those of the layer before it.
  assert np.isnan(noticed[:2]).all() and not is_any_nan(noticed[2])


@pytest.mark.once
def test_layers_that_overflow_are_recomputed(capsys):
  args = arguments(group_sizes=jnp.array([9, 20, 4]))  # Room for one layer of three.
  plain = gradient_of_loss(*args)
  with ps.debug():
    checked = gradient_of_loss(*args)
    jax.effects_barrier()
  # What is recomputed may be fused, and so rounded, differently.
  np.testing.assert_allclose(checked, plain, rtol=1e-5, atol=1e-5)
  assert capsys.readouterr().out == ""


@needs_devices(2)
@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_are_checked_one_by_one(check_vma, capsys):
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  # Of the two rows that change, one holds nothing.
  args = jax.tree.map(lambda *leaves: jnp.stack(leaves), arguments(14), arguments(2))
  each = lambda *args: loss(*(leaf[0] for leaf in args))[None]
  specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": check_vma}
  total = lambda *args: jax.shard_map(each, mesh=mesh, **specs)(*args).sum()
  with ps.debug():
    gradient = jax.jit(jax.grad(total))(*args)
    jax.effects_barrier()
  np.testing.assert_allclose(gradient[0], gradient_of_loss(*arguments()), rtol=1e-5, atol=1e-5)
  assert np.isnan(gradient[1][0]).all()
  assert capsys.readouterr().out.count("pallas_stash:") == 1


@pytest.mark.long
@needs_devices(2)
@pytest.mark.parametrize("structure", ["inside", "outside"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_model_are_the_same(structure, check_vma, dtype):
  config = dataclasses.replace(moe_training.CONFIG, dtype=jnp.dtype(dtype))
  args = config, 2, structure
  options = {"check_vma": check_vma, "capacity": 200}
  plain = moe_training.gradients(*args, **options)
  with ps.debug():
    checked = moe_training.gradients.__wrapped__(*args, **options)
  assert not is_any_nan(checked[1])
  assert_trees_equal(checked, plain)


def test_a_jitted_function_is_traced_anew():
  run = jax.jit(lambda stash, values: stash.push(values, RAGGED)[1])
  stash = ps.Stash.empty(ROOM, SPECS)
  assert run(stash, ones()).checksum is None
  with ps.debug():
    assert run(stash, ones()).checksum.shape == (1, 1)
    with ps.debug(False):
      assert run(stash, ones()).checksum is None
  assert run(stash, ones()).checksum is None


def test_off_it_costs_nothing():
  """The program is that of before, and what the mode adds is in none of its text."""
  lower = lambda: gradient_of_loss.lower(*arguments())
  before = lower().as_text()
  with ps.debug():
    inside = lower().as_text()
  assert lower().as_text() == before
  for added in ("ui32", "callback", "stablehlo.xor"):
    assert added in inside and added not in before, added
  assert push(ones())[1].checksum is None


@pytest.mark.parametrize("enabled", [once(False), True])
def test_programs_for_a_tpu(enabled):
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  args = aot.place(jax.eval_shape(arguments), aot.mesh("v5e"))
  with ps.debug(enabled):
    program = aot.compile(jax.grad(loss), *args)
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}
  words = [i for i in program.instructions if "u32[64,16]" in i.result and i.opcode == "multiply"]
  assert bool(words) == enabled


def test_the_environment_variable():
  program = (
    "import pallas_stash as ps, pallas_stash.checks.debugging as d;"
    "print(d.is_debugging(), ps.debug(False).__enter__() or d.is_debugging())"
  )
  environment = os.environ | {"PALLAS_STASH_DEBUG": "1", "JAX_PLATFORMS": "cpu"}
  run = [sys.executable, "-c", program]
  out = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
  assert out.split() == ["True", "False"]
