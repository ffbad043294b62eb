"""`explain`: what a whole training step keeps, in bytes that are counted by hand."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import pytest

import pallas_stash as ps
from tests.helpers.checks import needs_devices

LAYERS, ROWS, WIDTH, HIDDEN = 4, 16, 8, 32
FLOAT = 4  # bytes
WEIGHTS = 2 * LAYERS * 2 * WIDTH * HIDDEN * FLOAT
INPUTS = LAYERS * ROWS * WIDTH * FLOAT
NAMED = LAYERS * ROWS * HIDDEN * FLOAT
CAPACITY = 24
STASH = CAPACITY * 128 * FLOAT  # Rows are of whole lanes.

struct = jax.ShapeDtypeStruct
save = jax.checkpoint_policies.save_only_these_names
shapes = {"up": (LAYERS, 2, WIDTH, HIDDEN), "down": (LAYERS, 2, HIDDEN, WIDTH)}
WEIGHT_STRUCTS = {name: struct(shape, jnp.float32) for name, shape in shapes.items()}
X = struct((ROWS, WIDTH), jnp.float32)


def experts(rows, weights, sizes):
  ps.mark_rows(ps.RaggedRows(sizes, len(rows)))
  hidden = checkpoint_name(jax.lax.ragged_dot(rows, weights["up"], sizes), "hidden")
  return jax.lax.ragged_dot(jax.nn.silu(hidden), weights["down"], sizes)


def layers(weights, x, policy):
  def layer(x, weights):
    return x + experts(x, weights, jnp.array([3, 2], jnp.int32)), None

  return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0]


def loss(weights, x, *, policy):
  return jnp.sum(layers(weights, x, policy))


def threaded_loss(weights, x):
  model = ps.threaded(functools.partial(layers, policy=ps.save_in_stash("hidden")), CAPACITY)
  return jnp.sum(model(weights, x))


def loss_by_hand(weights, x):
  stashed = ps.checkpoint(experts, policy=save("hidden"))

  def layer(carry, weights):
    x, stash = carry
    sizes = jnp.array([3, 2], jnp.int32)
    out, stash = stashed(stash, ps.RaggedRows(sizes, ROWS), x, weights, sizes)
    return (x + out, stash), None

  stash = ps.Stash.empty(CAPACITY, [struct((HIDDEN,), x.dtype)])
  step = jax.checkpoint(layer, policy=save(ps.SLOT_NAME))
  (x, stash), _ = jax.lax.scan(step, (x, stash), weights)
  return jnp.sum(ps.seal(x, stash))


def total(kept):
  return sum(k.num_bytes for k in kept)


def large(kept):
  """Without the integers of slots and allocators, and the sizes of groups."""
  return [k for k in kept if k.num_bytes > 100]


def line_with(text):
  with open(__file__) as file:
    return next(i for i, line in enumerate(file, 1) if text in line)


def explain(policy):
  return ps.explain(functools.partial(loss, policy=policy), WEIGHT_STRUCTS, X)


def test_saved_values_of_a_scan():
  found = explain(save("hidden"))
  named, carry = sorted(large(found.of_kind("activation")), key=lambda k: k.name is None)
  assert (named.name, named.operation) == ("hidden", "ragged_dot_general")
  assert (named.loops, named.shape, named.dtype) == ((LAYERS,), (ROWS, HIDDEN), jnp.float32)
  assert (named.place, named.layer_bytes, named.num_bytes) == ("device", NAMED // LAYERS, NAMED)
  line = line_with("hidden = checkpoint_name(jax.lax.ragged_dot(rows")
  assert f"test_explain_step.py:{line}:" in named.source
  assert (carry.name, carry.operation, carry.num_bytes) == (None, "carry", INPUTS)
  assert f"test_explain_step.py:{line_with('return jax.lax.scan(jax.checkpoint')}:" in carry.source
  weights = found.of_kind("weights")
  assert {k.operation for k in weights} == {"args[0]['up']", "args[0]['down']"}
  assert total(weights) == WEIGHTS and found.argument_bytes == WEIGHTS + ROWS * WIDTH * FLOAT
  assert not found.of_kind("stash")


def test_nothing_is_kept_that_is_replayed():
  found = explain(None)
  (carry,) = large(found.of_kind("activation"))
  assert (carry.operation, carry.num_bytes) == ("carry", INPUTS)


@pytest.mark.parametrize("step", [threaded_loss, loss_by_hand])
def test_a_stash_is_kept_for_its_worst_case(step):
  found = ps.explain(step, WEIGHT_STRUCTS, X)
  (stash,) = found.of_kind("stash")
  assert (stash.name, stash.place, stash.loops) == ("hidden", "device", ())
  assert (stash.shape, stash.num_bytes) == ((CAPACITY, 128), STASH)
  assert stash.worst_case_bytes == NAMED
  if step is threaded_loss or jax.__version_info__ >= (0, 11):  # Before, that of the rule it is in.
    line = line_with("hidden = checkpoint_name(jax.lax.ragged_dot(rows")
    assert f"test_explain_step.py:{line}:" in stash.source
  (carry,) = large(found.of_kind("activation"))
  assert (carry.operation, carry.num_bytes) == ("carry", INPUTS)
  assert total(found.of_kind("weights")) == WEIGHTS


def test_offloaded_values_are_on_the_host():
  found = explain(ps.policy_by_name({"hidden": "offload"}))
  (named,) = found.of_kind("activation", "host")
  assert (named.name, named.num_bytes, named.loops) == ("hidden", NAMED, (LAYERS,))
  assert total(large(found.of_kind("activation", "device"))) == INPUTS


@pytest.mark.parametrize("times", [1, 4])
def test_all_pushes_into_one_stash_are_counted(times):
  """Layers that are unrolled, two of them in a loop."""
  stashed = ps.checkpoint(experts, policy=save("hidden"))

  def unrolled(weights, x):
    def layers(carry, _):
      x, stash = carry
      for i in range(LAYERS):
        sizes = jnp.array([3, 2], jnp.int32)
        of_layer = {name: stacked[i] for name, stacked in weights.items()}
        out, stash = stashed(stash, ps.RaggedRows(sizes, ROWS), x, of_layer, sizes)
        x += out
      return (x, stash), None

    carry = x, ps.Stash.empty(CAPACITY, [struct((HIDDEN,), x.dtype)])
    carry, _ = layers(carry, None)
    if times > 1:
      carry, _ = jax.lax.scan(layers, carry, None, length=times - 1)
    return jnp.sum(ps.seal(*carry))

  (stash,) = ps.explain(unrolled, WEIGHT_STRUCTS, X).of_kind("stash")
  assert (stash.num_bytes, stash.worst_case_bytes) == (STASH, times * NAMED)


def test_loops_in_loops():
  def block(x, weights):
    return layers(weights, x, save("hidden")), None

  def stages(weights, x):
    return jnp.sum(jax.lax.scan(block, x, weights)[0])

  stacked = {name: struct((3, *w.shape), w.dtype) for name, w in WEIGHT_STRUCTS.items()}
  found = ps.explain(stages, stacked, X)
  (named,) = [k for k in found.kept if k.name == "hidden"]
  assert (named.loops, named.shape) == ((3, LAYERS), (ROWS, HIDDEN))
  assert named.num_bytes == 3 * NAMED


@needs_devices(4)
@pytest.mark.parametrize("step", [functools.partial(loss, policy=save("hidden")), loss_by_hand])
def test_sizes_are_those_of_all_devices(step):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  replicated, sharded = PartitionSpec(), PartitionSpec("data")

  def device_loss(weights, x):
    return jax.lax.pmean(step(weights, x), "data")

  specs = dict(in_specs=(replicated, sharded), out_specs=replicated, check_vma=False)
  mapped = jax.shard_map(device_loss, mesh=mesh, **specs)
  found = ps.explain(mapped, WEIGHT_STRUCTS, struct((4 * ROWS, WIDTH), jnp.float32))
  assert total(found.of_kind("weights")) == WEIGHTS
  carry = next(k for k in found.kept if k.operation == "carry" and k.layer_bytes > 100)
  assert (carry.num_bytes, carry.shape) == (4 * INPUTS, (4, ROWS, WIDTH))
  if step is loss_by_hand:
    (stash,) = found.of_kind("stash")
    assert (stash.num_bytes, stash.worst_case_bytes) == (4 * STASH, 4 * NAMED)
  else:
    (named,) = [k for k in found.kept if k.name == "hidden"]
    assert named.num_bytes == 4 * NAMED


@pytest.mark.parametrize("way", ["gmm", "grouped_mlp"])
def test_kernels_that_push_themselves(way):
  rows, width, hidden = 512, 128, 256
  names, of_row = (["up"], width) if way == "gmm" else (["gate", "up"], hidden)
  operation = "stash_gmm" if way == "gmm" else "stash_mlp_forward"

  def layer(carry, weights):
    x, stash = carry
    sizes = jnp.array([100, 28], jnp.int32)
    if way == "gmm":
      out, stash = ps.gmm(stash, x, weights["up"], sizes)
      out = out[:, :width]
    else:
      out, stash = ps.grouped_mlp(stash, x, *(weights[n] for n in ("gate", "up", "down")), sizes)
    return (x + out, stash), None

  def loss(weights, x):
    stash = ps.Stash.empty(rows, [struct((of_row,), x.dtype)] * len(names))
    step = jax.checkpoint(layer, policy=save(ps.SLOT_NAME))
    (x, stash), _ = jax.lax.scan(step, (x, stash), weights)
    return jnp.sum(ps.seal(x, stash))

  widths = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
  weights = {name: struct((LAYERS, 2, *pair), jnp.float32) for name, pair in widths.items()}
  found = ps.explain(loss, weights, struct((rows, width), jnp.float32)).of_kind("stash")
  assert [k.operation for k in found] == [operation] * len(names)
  assert [k.num_bytes for k in found] == [rows * of_row * FLOAT] * len(names)
  assert [k.worst_case_bytes for k in found] == [LAYERS * rows * of_row * FLOAT] * len(names)


def test_the_table_says_it_all():
  printed = str(ps.explain(threaded_loss, WEIGHT_STRUCTS, X)).splitlines()
  head = "loop value of a layer MB each MB worst case kind in line"
  assert printed[0].split() == head.split()
  (row,) = [line for line in printed if " hidden " in line]
  assert row.split()[:6] == ["-", "hidden", "float32[24,128]", "0.012", "0.012", "0.008"]
  assert (
    f"stash       device  test_explain_step.py:{line_with('hidden = checkpoint_name(jax.lax.r')}:"
    in row
  )
  assert printed[-3:] == [
    "Weights: 0.016 MB, of 0.017 MB of arguments.",
    "Activations: 0.002 MB on the device.",
    "Stash: 0.012 MB, for 0.008 MB at worst case.",
  ]
  assert printed[-4] == "and 12 small ones, 0.000 MB"
  of_host = str(explain(ps.policy_by_name({"hidden": "offload"}))).splitlines()
  assert of_host[-1] == "Activations: 0.002 MB on the device, 0.008 MB on the host."


def test_what_it_cannot_explain_is_said():
  with pytest.raises(ValueError, match="fun=3 must be a function"):
    ps.explain(3)
  with pytest.raises(ValueError, match="must be arrays"):
    ps.explain(loss, WEIGHT_STRUCTS, X, policy="everything")
