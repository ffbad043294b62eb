"""What is traced of the kernels, when, and for which platforms."""

import collections
import dataclasses
import functools

import jax
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import kernels
from pallas_stash.kernels import mosaic_tpu, xla
from tests.helpers import ragged_rows
from tests.helpers.checks import needs_devices
from tests.helpers.support import assert_same_bits, integers, ON_TPU

ROWS, RESIDUALS = 40, 8
RAGGED = ps.RaggedRows(np.array([13], np.int32), ROWS)
SAVE = jax.checkpoint_policies.save_only_these_names("saved")


@pytest.fixture
def traces(monkeypatch):
  """Counts how often a kernel is traced, by what it is made of."""
  counts = collections.Counter()

  def count(module, name, kind):
    function = getattr(module, name)

    @functools.wraps(function)
    def counted(*args, **kwargs):
      counts[kind] += 1
      return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)

  count(mosaic_tpu, "copy_runs", "mosaic")
  count(xla, "_copy_runs", "xla")
  return counts


def gradient_of_residuals(width, implementation):
  """Traces the gradient of a function with `RESIDUALS` residuals of one shape."""

  def experts(x, w):
    for _ in range(RESIDUALS):
      x = checkpoint_name(jnp.sin(x @ w), "saved")
    return x

  def loss(w):
    f = ps.checkpoint(experts, policy=SAVE, implementation=implementation)
    x = jnp.ones((ROWS, width))
    stash = ps.Stash.empty(16, f.residuals(RAGGED, x, w))
    return jnp.sum(ps.seal(*f(stash, RAGGED, x, w)))

  return jax.jit(jax.grad(loss)).trace(jnp.eye(width))


# Widths that no other test has: what was traced before is not traced again.
@pytest.mark.parametrize("platform, traced, width", [("cpu", "xla", 11), ("tpu", "mosaic", 12)])
def test_the_platform_that_is_lowered_for_is_traced_once_a_shape(platform, traced, width, traces):
  program = gradient_of_residuals(width, None)
  assert not traces
  text = program.lower(lowering_platforms=(platform,)).as_text()
  assert traces == {traced: 2}  # Compact and expand.
  # And lowered once, whatever the number of residuals.
  assert text.count("tpu_custom_call") == (2 if platform == "tpu" else 0)
  program.lower(lowering_platforms=(platform,))
  assert traces == {traced: 2}


@pytest.mark.parametrize(
  "implementation, traced, width", [("xla", "xla", 13), ("mosaic_interpret", "mosaic", 14)]
)
def test_an_implementation_is_traced_once_a_shape(implementation, traced, width, traces):
  gradient_of_residuals(width, implementation)
  assert traces == {traced: 2}


def test_a_trace_is_not_kept_for_other_settings(traces, monkeypatch):
  """What tests replace, and the mode of `debug`, must not be hidden by a trace from before."""
  rows, runs = jnp.ones((ROWS, 15)), RAGGED.compact_runs(0, 48)
  compact = lambda name: jax.make_jaxpr(
    lambda x: kernels.compact(x, jnp.ones((48, 15)), runs, name)
  )
  count = lambda name: (compact(name)(rows), traces["mosaic"])[1]
  assert [count("mosaic_interpret"), count("mosaic_interpret")] == [1, 1]
  tiling = lambda *args: dataclasses.replace(choose_tiling(*args), tile_rows=32)
  choose_tiling = kernels.dispatch.choose_tiling
  monkeypatch.setattr(kernels.dispatch, "choose_tiling", tiling)
  assert count("mosaic_interpret") == 2
  monkeypatch.setattr(kernels, "INTERPRET", dataclasses.replace(kernels.INTERPRET, random_seed=1))
  assert count("mosaic_interpret") == 3
  with ps.debug():
    assert count("mosaic_interpret") == 4


def write_and_read(stash, rows, start, implementation=None):
  """Compacts and expands `ROWS` rows of which 13 are in a group."""
  runs = RAGGED.compact_runs(start, stash.shape[0])
  stash = kernels.compact(rows, stash, runs, implementation)
  runs = RAGGED.expand_runs(start, stash.shape[0])
  blank = jnp.zeros((), stash.dtype)
  width = rows.shape[-1]
  return stash, kernels.expand(stash, runs, ROWS, width, blank, implementation)


def expected(stash, rows, start):
  stash = ragged_rows.compact(rows, stash, start, [13])
  return stash, ragged_rows.expand(stash, start, ROWS, [13])


def examples(*batch):
  return integers(0, *batch, 48, 5), integers(1, *batch, ROWS, 5), np.arange(5, dtype=np.int32)


def assert_same(actual, expected):
  jax.tree.map(assert_same_bits, actual, tuple(expected))


def test_without_jit():
  stash, rows, starts = examples()
  for start in starts[:2]:
    assert_same(write_and_read(stash, rows, start), expected(stash, rows, start))
  with jax.disable_jit():
    assert_same(write_and_read(stash, rows, starts[1]), expected(stash, rows, starts[1]))


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (None, 1, None), (2, None, None), (None, None, 0)])
def test_vmap(in_axes):
  batched = examples(5)
  pairs = list(zip(batched, in_axes, strict=True))
  args = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in pairs]
  actual = jax.jit(jax.vmap(write_and_read, in_axes))(*args)
  each = [expected(*(x[0 if axis is None else i] for x, axis in pairs)) for i in range(5)]
  assert_same(actual, map(np.stack, zip(*each, strict=True)))


def test_vmap_of_vmap():
  stash, rows, _ = examples(2, 3)
  starts = np.arange(6, dtype=np.int32).reshape(2, 3)
  actual = jax.jit(jax.vmap(jax.vmap(write_and_read)))(stash, rows, starts)
  for i in np.ndindex(2, 3):
    assert_same(jax.tree.map(lambda x, i=i: x[i], actual), expected(stash[i], rows[i], starts[i]))


@needs_devices(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("is_vmapped", [False, True])
def test_shard_map(check_vma, is_vmapped):
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
  stash, rows, starts = examples(4)
  starts = starts[:4]

  # The stash is the same on all devices, the rows are not.
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P("x"), check_vma=check_vma
  )
  def on_device(stash, rows, starts):
    if is_vmapped:
      return jax.vmap(write_and_read, (None, 0, 0))(stash, rows, starts)
    return jax.tree.map(lambda x: x[None], write_and_read(stash, rows[0], starts[0]))

  each = [expected(stash[0], *args) for args in zip(rows, starts, strict=True)]
  actual = jax.jit(on_device)(stash[0], rows, starts)
  assert_same(actual, map(np.stack, zip(*each, strict=True)))


@pytest.mark.skipif(ON_TPU, reason="runs the exported program on a CPU")
def test_a_program_for_two_platforms():
  stash, rows, starts = examples()
  exported = export.export(jax.jit(write_and_read), platforms=("cpu", "tpu"))(
    stash, rows, starts[0]
  )
  text = exported.mlir_module()
  assert text.count("tpu_custom_call") == 2 and "stablehlo.while" in text
  exported = export.deserialize(exported.serialize())
  assert_same(exported.call(stash, rows, starts[3]), expected(stash, rows, starts[3]))


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_bounds_are_checked_in_debug_mode_only(implementation):
  args = jnp.ones((48, 128)), jnp.ones((ROWS, 128)), jnp.int32(0)
  fun = jax.jit(functools.partial(write_and_read, implementation=implementation))
  plain = fun.trace(*args)
  with ps.debug():
    checked = fun.trace(*args)
  # Lowered outside: what counts is where it was traced.
  for traced, is_unchecked in (plain, True), (checked, False):
    text = traced.lower(lowering_platforms=("tpu",)).as_text().replace("\\22", '"')
    assert text.count("tpu_custom_call") == 2
    assert text.count('"disable_bounds_checks": true') == 2 * is_unchecked


def test_x64():
  with jax.enable_x64(True):
    stash, rows, starts = examples()
    assert_same(jax.jit(write_and_read)(stash, rows, starts[1]), expected(stash, rows, starts[1]))


def test_a_carry_is_updated_in_place():
  """Under scan, of a primitive as of what it stands for."""
  stash = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
  rows = jax.ShapeDtypeStruct((6, ROWS, 128), jnp.float32)

  def run(stash, rows):
    def step(carry, rows):
      stash, start = carry
      return (write_and_read(stash, rows, start)[0], start + 16), None

    return lax.scan(step, (stash, jnp.int32(0)), rows)[0][0]

  compiled = jax.jit(run, donate_argnums=0).lower(stash, rows).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == 4 * stash.size
  assert memory.temp_size_in_bytes < stash.size
