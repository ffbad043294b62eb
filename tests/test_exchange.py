"""Rows between devices: a ragged all-to-all, the way of an MoE layer's rows, and back: unsort."""

from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from bench.parity import losses
from bench.tpu import aot
from reference import exchange, model, modes
from tests.helpers.checks import long, needs_devices

pytestmark = pytest.mark.once

DEVICES, TOKENS = losses.DEVICES, 4  # Of each device.
AXIS = P("expert")
CONFIG = model.Config(vocab=1, width=16, hidden=24, num_experts=16, top_k=3, layers=1)


def on_devices(function, *args):
  """Calls `function` on each device with its entry of each argument; returns [devices, ...]."""

  def on_device(*args):
    out = function(*jax.tree.map(lambda arg: arg[0], args))
    return jax.tree.map(lambda leaf: leaf[None], out)

  run = jax.shard_map(on_device, mesh=losses.mesh_of("ring"), in_specs=AXIS, out_specs=AXIS)
  return jax.device_get(jax.jit(run)(*args))


def exchanged(rows, sizes, total_rows):
  """What `exchange_rows` returns, row by row."""
  out = np.zeros((DEVICES, total_rows, rows.shape[-1]), rows.dtype)
  starts = np.cumsum(sizes, 1) - sizes
  for to in range(DEVICES):
    parts = [rows[i, starts[i, to] :][: sizes[i, to]] for i in range(DEVICES)]
    out[to, : sizes[:, to].sum()] = np.concatenate(parts)
  return out


def documented_ragged_all_to_all(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
  """`lax.ragged_all_to_all` as its documentation has it; NaN where both sides differ on sizes."""
  here, row = lax.axis_index(axis_name), jnp.arange(len(output))
  gathered = (operand, input_offsets, send_sizes, output_offsets)
  operand, starts, sizes, to_starts = (lax.all_gather(leaf, axis_name) for leaf in gathered)
  for i in range(DEVICES):
    in_slice = row - to_starts[i, here]
    is_sent = (0 <= in_slice) & (in_slice < sizes[i, here])
    sent = operand[i].at[starts[i, here] + in_slice].get(mode="fill", fill_value=jnp.nan)
    output = jnp.where(is_sent[:, None], sent, output)
  return jnp.where(jnp.all(recv_sizes == sizes[:, here]), output, jnp.nan)


@needs_devices(DEVICES)
@pytest.mark.parametrize("case", ["some", "none", "one", "full"])
def test_exchange_rows(case):
  rng = np.random.default_rng(0)
  sizes = rng.integers(0, 5, (DEVICES, DEVICES)) * rng.integers(0, 2, (DEVICES, DEVICES))
  if case == "none":
    sizes = 0 * sizes
  if case == "one":  # All devices send to one, and it sends nothing.
    sizes = sizes.sum(1, keepdims=True) * (np.arange(DEVICES) == 5)
    sizes[5] = 0
  is_full = case == "full"  # No padding anywhere.
  sizes = np.where(is_full, (np.arange(DEVICES)[:, None] + np.arange(DEVICES)) % 8, sizes)
  sent_rows, total_rows = int(sizes.sum(1).max()), int(sizes.sum(0).max())
  if not is_full:
    sent_rows, total_rows = sent_rows + 3, total_rows + 2
  is_row = np.arange(sent_rows) < sizes.sum(1)[:, None]
  rows = rng.normal(size=(DEVICES, sent_rows, 3)).astype(np.float32)
  d_out = rng.normal(size=(DEVICES, total_rows, 3)).astype(np.float32)

  def run(rows, d_out):
    here = jnp.asarray(sizes, jnp.int32)
    exchange_here = lambda rows: exchange.exchange_rows(rows, here, total_rows, "expert")
    out, vjp = jax.vjp(exchange_here, rows)
    options = {"total_rows": total_rows, "axis_name": "expert"}
    return out, exchange.by_ragged_all_to_all(rows, here, **options), *vjp(d_out)

  padded = np.where(is_row[..., None], rows, np.nan)
  with mock.patch.object(lax, "ragged_all_to_all", documented_ragged_all_to_all):
    out, by_ragged, d_rows = on_devices(run, padded, d_out)
  np.testing.assert_array_equal(out, exchanged(rows, sizes, total_rows))
  np.testing.assert_array_equal(by_ragged, out)
  np.testing.assert_array_equal(d_rows, exchanged(d_out, sizes.T, sent_rows))


@needs_devices(DEVICES)
@pytest.mark.parametrize("routing", ["any", "same"])
def test_unsort_is_the_way_back(routing):
  """Each row is marked by the expert that it reached, and returns to the choice that it is of."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(DEVICES, TOKENS, CONFIG.width)).astype(np.float32)
  expert_ids = rng.random((DEVICES, TOKENS, CONFIG.num_experts)).argsort(-1)[..., : CONFIG.top_k]
  if routing == "same":  # Of two devices; nothing goes to the others.
    expert_ids[:] = [4, 3, 5]
  expert_ids = expert_ids.astype(np.int32)
  local = CONFIG.num_experts // DEVICES

  def run(tokens, expert_ids):
    rows, sizes, plan = modes.send_to_experts(tokens, expert_ids, CONFIG)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    expert = (lax.axis_index("expert") * local + group)[:, None]
    marked = jnp.where(group[:, None] < local, rows + 100.0 * expert, jnp.nan)
    returned = modes.unsort(marked, plan, "expert")
    return returned[plan.choice_rows], sizes

  returned, sizes = on_devices(run, x, expert_ids)
  expected = np.asarray(x)[:, :, None] + 100 * np.float32(expert_ids[..., None])
  np.testing.assert_array_equal(returned, expected)
  counts = np.bincount(np.ravel(expert_ids), minlength=CONFIG.num_experts)
  np.testing.assert_array_equal(np.ravel(sizes), counts)


def unsort_and_gradient(out, plan, d_returned):
  returned, vjp = jax.vjp(lambda out: modes.unsort(out, plan, "expert"), out)
  return returned, *vjp(d_returned)


def there_and_back(tokens, expert_ids, d_returned):
  def run(tokens):
    rows, _, plan = modes.send_to_experts(tokens, expert_ids, CONFIG)
    return modes.unsort(jnp.sin(rows), plan, "expert")

  returned, vjp = jax.vjp(run, tokens)
  return returned, *vjp(d_returned)


@pytest.mark.parametrize(
  "chip, way",
  [
    ("v5p", "unsort"),
    *(long(chip, "unsort") for chip in aot.TOPOLOGIES if chip != "v5p"),
    *(long(chip, "there and back") for chip in aot.TOPOLOGIES),
  ],
)
def test_compiles_for_tpus(chip, way):
  """The collective itself, which no CPU has, and no gather of the rows of all devices."""
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  devices, width, num_tokens = 4, 256, 512  # Of each device.

  def struct(rows, *features, dtype=jnp.int32):
    return jax.ShapeDtypeStruct((devices * rows, *features), dtype)

  rows_of = lambda count: struct(count, width, dtype=jnp.bfloat16)
  choices, total_rows = num_tokens * CONFIG.top_k, devices * num_tokens * CONFIG.top_k
  expert_ids = struct(num_tokens, CONFIG.top_k)
  sizes = jax.ShapeDtypeStruct((devices, devices), jnp.int32)
  plan, of_plan = modes.Plan(expert_ids, struct(total_rows), sizes), modes.Plan(AXIS, AXIS, P())
  run, args, specs = {
    "unsort": (unsort_and_gradient, (rows_of(total_rows), plan), (AXIS, of_plan)),
    "there and back": (there_and_back, (rows_of(num_tokens), expert_ids), (AXIS, AXIS)),
  }[way]
  args, specs = (*args, rows_of(choices)), (*specs, AXIS)
  mesh = aot.mesh(chip, devices)
  program = aot.compile(
    jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=AXIS), *aot.place(args, mesh, specs)
  )
  starts = "ragged-all-to-all", "ragged-all-to-all-start"  # The latter has an end of its own.
  assert sum(i.opcode in starts for i in program.instructions) == (2 if way == "unsort" else 4)
  gathered = f"bf16[{devices},"
  assert not any(gathered in i.result for i in program.instructions if "gather" in i.opcode)
