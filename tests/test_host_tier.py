"""Rows in host memory: gradients are those of saving, wherever the rows are."""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import host_tier
from pallas_stash.kernels import host
from tests.helpers import host_layers, three_layers
from tests.helpers.checks import (
  assert_trees_equal,
  FUSED,
  is_any_nan,
  long,
  needs_devices,
  once,
)
from tests.helpers.few_layers import SAVE
from tests.helpers.host_layers import (
  CAPACITY,
  ragged_of,
  SIZES,
  SPECS,
  TOTAL_ROWS,
  values_of,
)

BOTH = {"capacity_rows": CAPACITY, "host_capacity_rows": CAPACITY}
NEEDED = int((-(-SIZES.sum(1) // 8) * 8).sum())


@functools.cache
def saved():
  return host_layers.gradients(*host_layers.arrays())


def check(staging_rows, room, host_room):
  capacities = BOTH | {"staging_rows": staging_rows, "room": (room, host_room)}
  (value, stats), gradients = host_layers.gradients(*host_layers.arrays(), **capacities)
  (expected_value, _), expected = saved()
  assert_trees_equal((value, gradients), (expected_value, expected))
  taken = CAPACITY - room, CAPACITY - host_room
  actual = [int(count[0]) for count in stats]
  actual = [
    *(actual[0] - taken[0], max(actual[1] - taken[0], 0)),
    *(actual[5] - taken[1], max(actual[6] - taken[1], 0)),
    *(*actual[7:], actual[2]),
  ]
  assert actual == list(host_layers.expected_stats(room, host_room, staging_rows))
  assert int(stats.sufficient_rows[0]) == NEEDED
  assert int(stats.invalid_pushes[0]) == 0


# Rows that are free in HBM and in host memory: host memory alone, HBM first, both as far as they
# reach, neither, and a layer that does not fit between layers that do.
ROOMS = [(0, 400), (104, 400), (400, 400), (400, 64), (200, 104), (64, 64), (0, 64), (8, 8), (0, 0)]


@pytest.mark.parametrize("staging_rows", [long(0), 32, long(256), long(48)])
def test_gradients_are_those_of_saving(staging_rows):
  """With NaN in all memory that holds no rows."""
  for room in ROOMS:
    check(staging_rows, *room)


@pytest.mark.parametrize(
  "capacities",
  [
    long((0, 400, 0)),
    long((104, 400, 256)),
    long((8, 64, 8)),
    long((0, 0, 0)),
    long((160, 160, 8)),
  ],
)
def test_capacities_that_are_static(capacities):
  names = "capacity_rows", "host_capacity_rows", "staging_rows"
  options = dict(zip(names, capacities, strict=True))
  (value, _), gradients = host_layers.gradients(*host_layers.arrays(), **options)
  (expected_value, _), expected = saved()
  assert_trees_equal((value, gradients), (expected_value, expected))


def test_sealed_twice_gives_nan():
  def layer_and_seal(carry, w):
    x, stash = LAYERS["checkpoint"](carry, w)
    return ps.seal(x, stash), stash

  sizes = {"host_capacity_rows": 3 * ROWS, "staging_rows": 8}
  layers = [LAYERS["checkpoint"], LAYERS["checkpoint"], layer_and_seal]
  assert is_any_nan(gradient_of(layers, capacity_rows=8, **sizes))


def test_never_sealed_is_an_error():
  """Jax makes zeros in HBM for a cotangent in host memory."""
  options = BOTH | {"staging_rows": 32, "seals": 0}
  with pytest.raises(ValueError, match="Expected cotangent type .*<host>"):  # Of its scan.
    host_layers.gradients(*host_layers.arrays(), **options)

  def loss(w):
    stash = ps.Stash.empty(32, three_layers.SPECS, host_capacity_rows=32)
    out, _ = three_layers.layer((three_layers.X, stash), w)
    return jnp.sum(out)

  with pytest.raises(ValueError, match="was not sealed. Call seal"):
    jax.grad(loss)(three_layers.WEIGHTS[0])


@needs_devices(2)
@pytest.mark.parametrize(
  "structure, check_vma",
  [once("inside", True), long("outside", False), long("inside", False), long("outside", True)],
)
def test_both_structures(structure, check_vma):
  arrays = host_layers.arrays(2)

  def gradients(**capacities):
    fun = host_layers.sharded_loss(structure, check_vma, **capacities)
    return jax.jit(jax.value_and_grad(fun, argnums=(0, 1)), compiler_options=FUSED)(*arrays)

  # Of a stash, for devices to add up in one order.
  expected = gradients(capacity_rows=CAPACITY)
  actual = gradients(capacity_rows=104, host_capacity_rows=CAPACITY, staging_rows=32)
  assert_trees_equal(actual, expected)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
  jax.tree.map(close, actual, gradients())


ROWS = three_layers.ROWS
LAYERS = {
  "checkpoint": three_layers.layer,
  "gmm": three_layers.with_gmm,
  "megablox": three_layers.with_gmm_in_place,  # Whose rows are copied where there is host memory.
}


def gradient_of(layers, specs=three_layers.SPECS, **capacities):
  def loss(weights):
    carry = three_layers.X, ps.Stash.empty(residuals=specs, **capacities)
    for one, w in zip(layers, weights, strict=True):
      carry = one(carry, w)
    return jnp.sum(ps.seal(*carry) ** 2)

  return jax.jit(jax.grad(loss), compiler_options=FUSED)(three_layers.WEIGHTS)


@functools.cache
def of_checkpoints():
  """The gradient of three layers of `checkpoint`, without host memory."""
  return gradient_of([LAYERS["checkpoint"]] * 3, capacity_rows=3 * ROWS)


@pytest.mark.parametrize(
  "names",
  [
    ("checkpoint", "gmm", "checkpoint"),
    long(("gmm", "checkpoint", "gmm")),
    long(("megablox", "checkpoint", "megablox")),
  ],
)
def test_checkpoint_and_gmm_in_one_stash(names):
  layers = [LAYERS[name] for name in names]
  expected = gradient_of(layers, capacity_rows=3 * ROWS)
  for capacity, staging in (0, 8), (16, 8):
    sizes = {"host_capacity_rows": 3 * ROWS, "staging_rows": staging}
    actual = gradient_of(layers, capacity_rows=capacity, **sizes)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.once
def test_grouped_mlp():
  layers, specs = [three_layers.with_mlp] * 3, three_layers.SPECS * 2
  expected = gradient_of(layers, specs, capacity_rows=3 * ROWS)
  sizes = {"host_capacity_rows": 2 * ROWS, "staging_rows": 8}
  np.testing.assert_array_equal(gradient_of(layers, specs, capacity_rows=8, **sizes), expected)


def test_residuals_of_one_byte():
  """Their tiles have 32 rows."""

  def small(x, w):
    hidden = checkpoint_name((x @ w).astype(jnp.float8_e5m2), "hidden")
    return jnp.sin(hidden.astype(jnp.float32)) + x

  f, rows = ps.checkpoint(small, policy=SAVE("hidden")), 80
  ragged = ps.RaggedRows(jnp.array([rows], jnp.int32), rows)
  x = jax.random.normal(jax.random.key(0), (rows, 4))

  def loss(weights, host_rows):
    out = x
    stash = ps.Stash.empty(
      *(64, f.residuals(ragged, x, weights[0])), host_capacity_rows=host_rows, staging_rows=32
    )
    for w in weights:
      out, stash = f(stash, ragged, out, w)
    return jnp.sum(ps.seal(out, stash) ** 2), stash.stats()

  def plain(weights):
    out = x
    for w in weights:
      out = small(out, w)
    return jnp.sum(out**2)

  differentiate = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  gradient, stats = differentiate(three_layers.WEIGHTS, 250)
  assert [int(count[0]) for count in stats][5:] == [224, 224, 96, 2]
  np.testing.assert_allclose(gradient, jax.grad(plain)(three_layers.WEIGHTS), rtol=1e-5)


def test_without_host_memory_all_is_as_before():
  stash = ps.Stash.empty(CAPACITY, SPECS)
  assert stash.host is None and stash.host_rows_per_shard == 0
  assert len(jax.tree.leaves(stash)) == len(SPECS) + 2 + 5 + 1
  assert isinstance(stash.stats(), ps.StashStats)

  def text(**options):
    gradients = lambda *args: jax.grad(host_layers.loss, has_aux=True)(
      *args, capacity_rows=CAPACITY, **options
    )
    return jax.jit(gradients).lower(*host_layers.arrays()).as_text()

  assert text(host_capacity_rows=0, staging_rows=0) == text()


push = jax.jit(lambda stash, *args: stash.push(*args), donate_argnums=0)
pop = jax.jit(lambda stash, slot: stash.pop(slot), donate_argnums=0)
restore = jax.jit(lambda stash, *args: stash.restore(*args))


def test_the_memory_of_a_donated_stash_is_used_again():
  stash = jax.jit(lambda: ps.Stash.empty(64, SPECS, host_capacity_rows=64, staging_rows=8))()
  before = stash.host.buffers[0]
  after, _ = push(stash, values_of(0), ragged_of(0))
  assert before.is_deleted() and host.is_on_host(after.host.buffers[0])
  assert after.host.buffers[0].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("staging_rows", [once(32), long(0), long(256)])
def test_a_push_behind_a_pop(staging_rows):
  """The stage may hold the head of what was freed: it is stored on rows that are free."""
  stash = ps.Stash.empty(64, SPECS, host_capacity_rows=280, staging_rows=staging_rows)
  stash, slots = jax.jit(lambda stash: stash)(stash), {}
  for layer in 0, 3:
    stash, slots[layer] = push(stash, values_of(layer), ragged_of(layer))
  stash = pop(stash, slots[3])
  assert np.isnan(restore(stash, slots[3], ragged_of(3))[0]).all()
  for layer in 1, 4, 2, 5:
    stash, slots[layer] = push(stash, values_of(layer), ragged_of(layer))
  assert int(stash.stats().overflowed_pushes[0]) == 0
  for layer in 0, 1, 4, 2, 5:
    row = np.arange(TOTAL_ROWS)[:, None]
    starts, sizes = host_layers.STARTS[layer], SIZES[layer]
    is_live = ((row >= starts) & (row < starts + sizes)).any(axis=1)
    for actual, value in zip(
      restore(stash, slots[layer], ragged_of(layer)), values_of(layer), strict=True
    ):
      live = is_live.reshape(-1, *[1] * (value.ndim - 1))
      np.testing.assert_array_equal(actual, np.where(live, value, 0))
  for layer in 5, 2, 4, 1, 0:
    stash = pop(stash, slots[layer])
  stats = stash.stats()
  assert [int(stats.rows_in_use[0]), int(stats.host_rows_in_use[0])] == [0, 0]
  assert np.isnan(pop(stash, slots[0]).canary).all()


FAULTS = {
  "the head is written over the one that leaves": (
    "store",
    lambda right, tier, values, order, ragged, slot, *args: right(
      dataclasses.replace(tier, stage=tuple(jnp.zeros_like(stage) for stage in tier.stage)),
      *(values, order, ragged, slot, *args),
    ),
  ),
  "host memory is handed over before the copy to it is done": (
    "_stored",
    lambda right, tier, row: tier.buffers,
  ),
  "a reload is of the head of the use itself": (
    "prefetch",
    lambda right, tier, slot: dataclasses.replace(
      right(tier, slot),
      stage=right(tier, slot._replace(host=slot.host._replace(previous=slot.host.start))).stage,
    ),
  ),
  "nothing is reloaded": (
    "prefetch",
    lambda right, tier, slot: dataclasses.replace(right(tier, slot), stage=tier.stage),
  ),
  "any head in the stage is taken for the own": (
    "prefetch",
    lambda right, tier, slot: dataclasses.replace(
      tier, staged=(slot.number - 1).astype(jnp.float32)
    ),
  ),
}


@pytest.mark.parametrize("name", [(once if i in (1, 2) else long)(n) for i, n in enumerate(FAULTS)])
def test_a_planted_fault_is_caught(name, monkeypatch):
  """Host memory that nothing was copied to, and a stage with another head, give other gradients."""
  method, fault = FAULTS[name]
  right = getattr(host_tier.HostTier, method)
  faulty = lambda tier, *args: fault(right, tier, *args)
  layers = [LAYERS["checkpoint"]] * 3
  sizes = {"capacity_rows": 0, "host_capacity_rows": 3 * ROWS, "staging_rows": ROWS}
  expected = of_checkpoints()
  jax.clear_caches()  # `push` is traced once for a shape.
  monkeypatch.setattr(host_tier.HostTier, method, faulty)
  with ps.debug(name.startswith("host memory")):  # There is NaN in what was not written.
    actual = gradient_of(layers, **sizes)
  monkeypatch.undo()
  jax.clear_caches()
  assert not np.allclose(actual, expected, rtol=1e-3)


@pytest.mark.once
def test_debug_sees_rows_that_changed_in_host_memory(capsys):
  sizes = {"host_capacity_rows": 3 * ROWS, "staging_rows": 8}
  of_checkpoints()
  with ps.debug():
    layers = [LAYERS["checkpoint"]] * 3
    right = gradient_of(layers, capacity_rows=8, **sizes)
    np.testing.assert_allclose(right, of_checkpoints(), rtol=1e-6)
    assert "came back" not in capsys.readouterr().out

    def backward(_, d_carry):
      d_x, d_stash = d_carry
      buffers = d_stash.host.buffers
      zeros = tuple(host.fill(b, jnp.int32(0), b.shape[0], 0.0) for b in buffers)
      tier = dataclasses.replace(d_stash.host, buffers=zeros)
      return ((d_x, dataclasses.replace(d_stash, host=tier)),)

    identity = jax.custom_vjp(lambda carry: carry)
    identity.defvjp(lambda carry: (carry, None), backward)
    changed = lambda carry, w: identity(three_layers.layer(carry, w))

    assert is_any_nan(gradient_of([layers[0], changed, layers[0]], capacity_rows=8, **sizes))
  assert "came back from the stash other than they were pushed" in capsys.readouterr().out


@jax.jit
def rows_that_are_free(values, ragged):
  stash = ps.Stash.empty(0, SPECS, host_capacity_rows=64)
  stash, slot = stash.push(values, ragged)
  return stash.restore(slot, ragged), [s.host.buffers for s in (stash.pop(slot), stash.reset())]


@pytest.mark.once
def test_debug_poisons_rows_that_are_free():
  with ps.debug():
    ragged = ps.RaggedRows(jnp.array([20], jnp.int32), TOTAL_ROWS)
    restored, freed = rows_that_are_free(values_of(0), ragged)
  assert not is_any_nan(restored)
  on_device = [jax.device_put(buffer, jax.memory.Space.Device) for buffer in sum(freed, ())]
  assert all(np.isnan(buffer).all() for buffer in on_device)


def test_vmap_is_refused():
  def loss(x, w):
    stash = ps.Stash.empty(8, three_layers.SPECS, host_capacity_rows=32, staging_rows=8)
    return jnp.sum(ps.seal(*three_layers.layer((x, stash), w)))

  x = jnp.stack([three_layers.X] * 2)
  with pytest.raises(ValueError, match="must not be under jax.vmap, here of 2 examples"):
    jax.vmap(jax.grad(loss), (0, None))(x, three_layers.WEIGHTS[0])


@pytest.mark.parametrize(
  "options, match",
  [
    ({"host_capacity_rows": -1}, "host_capacity_rows=-1 must be at least 0"),
    ({"host_capacity_rows": 8.0}, "host_capacity_rows=8.0 must be"),
    ({"host_capacity_rows": 8, "staging_rows": -8}, "staging_rows=-8 must be at least 0"),
    ({"staging_rows": 8}, "staging_rows=8 must be 0 without host memory, host_capacity_rows=0"),
    (
      {"host_capacity_rows": 8, "page_rows": 32},
      "page_rows=32 must be None with host_capacity_rows=8",
    ),
    ({"host_capacity_rows": 2**31 - 1}, "must be below 2.*31"),
  ],
)
def test_misuse(options, match):
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(lambda: ps.Stash.empty(8, SPECS, **options))


def test_kernels_that_are_interpreted_are_refused():
  stash = ps.Stash.empty(8, SPECS, host_capacity_rows=64)
  with pytest.raises(ValueError, match="implementation='mosaic_interpret' must be None or 'xla'"):
    stash.push(values_of(0), ragged_of(0), implementation="mosaic_interpret")


def test_stats_in_a_log():
  stash = ps.Stash.empty(8, SPECS, host_capacity_rows=64, staging_rows=8)
  ragged = ps.RaggedRows(jnp.array([20], jnp.int32), TOTAL_ROWS)
  stash, _ = stash.push(values_of(0), ragged)
  assert stash.stats().log_line(stash.rows_per_shard) == (
    "stash: peak 8 of 8 rows (100.0%), 0 pushes overflowed, 0 invalid, 24 rows would do, host peak"
    " 16 rows, 4 rows of 1 push spilled"
  )
  assert "host=" in repr(stash)
