"""The real TPU compiler: what it accepts, what it copies, what it runs twice.

Nothing runs here. Every program is compiled ahead of time for chips that this host does not have.
"""

import dataclasses
import functools
import itertools

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash import kernels
from pallas_stash.kernels.tiling import choose_tiling
from reference import model, moe
from tests.helpers.checks import long
from tests.helpers.moe_training import SAVE, saving_ffn, stashing_ffn

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

CHIPS = list(aot.TOPOLOGIES)
DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "int32"]
WIDTHS = [7168, 2048, 128, 1000, 100, "split"]
MIB = 2**20

# DeepSeek-V3: 58 MoE layers, 262,144 rows at worst, a quarter of them routed, of 7168 bfloat16.
LAYERS, WORST_CASE_ROWS, ROUTED_ROWS, WIDTH = 58, 262_144, 65_536, 7168
CAPACITY = LAYERS * ROUTED_ROWS

struct = jax.ShapeDtypeStruct
SIZES, START = struct((8,), jnp.int32), struct((), jnp.int32)


def num_bytes(*structs):
  return sum(s.size * s.dtype.itemsize for s in structs)


def empty_stash(capacity, residuals):
  return jax.eval_shape(functools.partial(ps.Stash.empty, capacity, residuals))


# Kernels.


def push(stash, values, sizes):
  return stash.push(values, ps.RaggedRows(sizes, values[0].shape[0]))


def restore(stash, slot, sizes, total_rows):
  return stash.restore(slot, ps.RaggedRows(sizes, total_rows))


def update(operand, rows, start, sizes, starts=None):
  return ps.dynamic_update_slice(operand, rows, (start, 0), group_sizes=sizes, group_starts=starts)


def slice_(operand, start, sizes, starts=None, *, total_rows):
  shape = (total_rows, operand.shape[1])
  return ps.dynamic_slice(operand, (start, 0), shape, group_sizes=sizes, group_starts=starts)


def kernel_compact(stash, rows, start, sizes):
  runs = ps.RaggedRows(sizes, rows.shape[0]).compact_runs(start, stash.shape[0])
  return kernels.compact(rows, stash, runs, None)


def kernel_expand(stash, start, sizes, *, total_rows):
  runs = ps.RaggedRows(sizes, total_rows).expand_runs(start, stash.shape[0])
  blank = jnp.zeros((), stash.dtype)
  return kernels.expand(stash, runs, total_rows, stash.shape[1], blank, None)


@pytest.mark.parametrize(
  "chip, way",
  [
    *((chip, "stash") for chip in CHIPS),
    *(("v5p", "drop-in"), ("tpu7x", "kernels")),
    *(long(chip, "drop-in") for chip in CHIPS if chip != "v5p"),
    *(long(chip, "kernels") for chip in CHIPS if chip != "tpu7x"),
  ],
)
def test_deepseek_size(chip, way):
  rows = struct((WORST_CASE_ROWS, WIDTH), jnp.bfloat16)
  spare = int(aot.HBM_GIB[chip] * 2**30) - num_bytes(rows) - 16 * MIB
  capacity = min(CAPACITY, spare // (WIDTH * 2) // 8192 * 8192)
  stash = empty_stash(capacity, [struct((WIDTH,), jnp.bfloat16)])
  (buffer,) = stash.buffers
  slot = ps.Slot(stash.top, stash.top)
  compact, compact_args, expand, expand_args = {
    "stash": (push, (stash, [rows], SIZES), restore, (stash, slot, SIZES)),
    "drop-in": (update, (buffer, rows, START, SIZES), slice_, (buffer, START, SIZES)),
    "kernels": (
      kernel_compact,
      (buffer, rows, START, SIZES),
      kernel_expand,
      (buffer, START, SIZES),
    ),
  }[way]

  mesh = aot.mesh(chip)
  compacted = aot.compile(compact, *aot.place(compact_args, mesh), donate_argnums=0)
  expand = functools.partial(expand, total_rows=WORST_CASE_ROWS)
  expanded = aot.compile(expand, *aot.place(expand_args, mesh))
  assert compacted.kernels() == {"stash_compact": 1}
  assert expanded.kernels() == {"stash_expand": 1}
  assert compacted.copies(buffer) == expanded.copies(buffer) == []
  assert compacted.memory.temp_size_in_bytes < MIB
  assert expanded.memory.temp_size_in_bytes < MIB
  # Scalars of the stash are donated too.
  assert 0 <= compacted.memory.alias_size_in_bytes - num_bytes(buffer) < MIB


def width_of(width, dtype):
  """A static width; "split" is one that takes two kernel calls, each for some of the columns."""
  return 32 * 1024 // jnp.dtype(dtype).itemsize + 128 if width == "split" else width


def every_chip_dtype_and_width():
  """Parameters: every dtype on one chip, every chip and every width for quick; all for long."""
  widths = ["split", 7168, 128, 1000, 128, 2048, 100]
  few = set(zip(itertools.cycle(CHIPS), DTYPES, widths))
  every = itertools.product(CHIPS, DTYPES, WIDTHS)
  return [case if case in few else long(*case) for case in every]


@pytest.mark.parametrize("chip, dtype, width", every_chip_dtype_and_width())
def test_dtypes_and_widths(chip, dtype, width):
  width = width_of(width, dtype)
  itemsize = jnp.dtype(dtype).itemsize
  # More than any VMEM holds, where the compiler would put it first.
  operand_rows = 2**29 // (width * itemsize) // 32 * 32
  operand, rows = struct((operand_rows, width), dtype), struct((2048, width), dtype)
  args = aot.place((operand, rows, START, SIZES, SIZES), aot.mesh(chip))
  updated = aot.compile(update, *args, donate_argnums=0)
  sliced = aot.compile(functools.partial(slice_, total_rows=2048), args[0], *args[2:])
  calls = len(choose_tiling(-(-width // 128) * 128, itemsize).column_blocks)
  if dtype == "float16":  # Mosaic takes none, so XLA copies the rows.
    calls = 0
  assert updated.kernels().total() == updated.kernels()["stash_compact"] == calls
  assert sliced.kernels().total() == sliced.kernels()["stash_expand"] == calls
  if width % 128 == 0:
    assert updated.memory.alias_size_in_bytes == num_bytes(operand)
    assert updated.memory.temp_size_in_bytes < num_bytes(operand) / 2
    if calls:
      assert updated.copies(operand) == sliced.copies(operand) == []


@pytest.mark.parametrize("chip", [*map(long, CHIPS[:3]), *CHIPS[3:]])
def test_several_residuals(chip):
  residuals = [
    struct((1000,), jnp.float16),
    struct((4, 128), jnp.float8_e4m3fn),
  ]
  stash = empty_stash(2**19, residuals)
  values = [struct((2048, *r.shape), r.dtype) for r in residuals]
  args = aot.place((stash, values, SIZES, ps.Slot(stash.top, stash.top)), aot.mesh(chip))
  stash, values, sizes, slot = args
  pushed = aot.compile(push, stash, values, sizes, donate_argnums=0)
  restored = aot.compile(functools.partial(restore, total_rows=2048), stash, slot, sizes)
  assert pushed.kernels() == {"stash_compact": len(residuals)}
  assert restored.kernels() == {"stash_expand": len(residuals)}
  assert pushed.copies(*stash.buffers) == restored.copies(*stash.buffers) == []
  assert 0 <= pushed.memory.alias_size_in_bytes - num_bytes(*stash.buffers) < MIB


# A training step of 58 layers, on four chips as a ring of experts.

EXPERT = P("expert")
RING = 4


def megablox(*tiling):
  return lambda lhs, rhs, sizes: gmm(lhs, rhs, sizes, lhs.dtype, tiling)


SMALL = model.Config(
  vocab=256,
  width=256,
  hidden=128,
  num_experts=32,
  top_k=8,
  layers=LAYERS,
  dtype=jnp.bfloat16,
  grouped_matmul=megablox(128, 256, 128),
)
WIDE = dataclasses.replace(SMALL, width=WIDTH)
REAL = dataclasses.replace(WIDE, hidden=256, grouped_matmul=megablox(512, 1024, 1024))
# Megablox does not know `check_vma`.
RAGGED_DOT = dataclasses.replace(SMALL, grouped_matmul=lax.ragged_dot)


def saving(config, seq):
  """Options of the model that saves its residuals."""
  del seq
  policy = SAVE("mlpwi_0", "mlpwi_1", "mlpwo")
  return {"ffn": saving_ffn(config), "policy": policy, "make_state": lambda *_: None}


def stashing(config, seq):
  """Options of the model that stashes them."""
  ffn, residuals = stashing_ffn(config)
  num_tokens, local_experts = RING * seq, config.num_experts // RING
  total_rows = num_tokens * min(config.top_k, local_experts)

  def make_stash(experts, num_shards):
    tokens = struct((num_tokens, config.width), config.dtype)
    rows = struct((total_rows,), jnp.int32)
    choices = [struct((num_tokens, config.top_k), dtype) for dtype in (jnp.int32, jnp.float32)]
    sizes = struct((local_experts,), jnp.int32)
    specs = residuals(ps.RaggedRows(sizes, total_rows), tokens, rows, *choices, sizes, experts)
    return ps.Stash.empty(CAPACITY, specs, num_shards)

  policy = SAVE(ps.SLOT_NAME)
  return {"ffn": ffn, "policy": policy, "make_state": make_stash, "finish": ps.seal}


def scan_in_shard_map(mesh, check_vma, params, tokens, *, make_state, config, **options):
  """Structure 1: the loss, and the state behind the last layer."""

  def device_loss(params, tokens):
    experts = jax.tree.map(lambda stacked: stacked[0], params["layers"]["moe"]["experts"])
    state = make_state(experts, 1)
    loss, (state, _) = model.loss(params, tokens, state=state, config=config, **options)
    return lax.pmean(loss, "expert"), state

  return jax.shard_map(
    device_loss,
    mesh=mesh,
    in_specs=(model.param_specs(config), EXPERT),
    out_specs=(P(), EXPERT),
    check_vma=check_vma,
  )(params, tokens)


def shard_map_in_scan(mesh, check_vma, params, tokens, *, make_state, config, **options):
  """Structure 2: a `shard_map` in each layer, and a global, sharded stash."""

  def moe_block(x, layer_params, state, *, config, ffn):
    return jax.shard_map(
      functools.partial(moe.moe_block, config=config, ffn=ffn),
      mesh=mesh,
      in_specs=(EXPERT, moe.param_specs(config), EXPERT),
      out_specs=EXPERT,
      check_vma=check_vma,
    )(x, layer_params, state)

  of_device = lambda leaf: struct((leaf.shape[1] // RING, *leaf.shape[2:]), leaf.dtype)
  state = make_state(jax.tree.map(of_device, params["layers"]["moe"]["experts"]), RING)
  sharding = NamedSharding(mesh, EXPERT)
  state = jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, sharding), state)
  options |= {"state": state, "config": config, "moe": moe_block}
  loss, (state, _) = model.loss(params, tokens, **options)
  return loss, state


STRUCTURES = [scan_in_shard_map, shard_map_in_scan]


def compile_step(chip, structure, config, residuals, seq=4, check_vma=False, is_training=True):
  """Compiles loss and gradient, with the statistics of the stash; or only loss and stash.

  `seq` is the tokens of a device: sorting and scattering many takes the compiler long.
  """
  mesh = aot.mesh(chip, RING)
  params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
  params = aot.place(params, mesh, model.param_specs(config))
  tokens = aot.place(struct((RING, seq + 1), jnp.int32), mesh, EXPERT)
  options = residuals(config, seq)
  run = functools.partial(structure, mesh, check_vma, config=config, **options)

  def loss_and_stats(params, tokens):
    loss, stash = run(params, tokens)
    return loss, stash and stash.stats()

  step = jax.value_and_grad(loss_and_stats, has_aux=True) if is_training else run
  return aot.compile(step, params, tokens)


def buffers_of(config):
  """The buffers of the stash on one device."""
  return [struct((CAPACITY, width), config.dtype) for width in (*2 * [config.hidden], config.width)]


@functools.cache
def saved_matmuls(structure, config, check_vma):
  """The matmuls of the program that saves the residuals, whose chip does not matter."""
  saved = compile_step("v5e", structure, config, saving, check_vma=check_vma)
  assert saved.kernels() == saved.matmuls(is_conditional=True) == {}
  return saved.matmuls(is_conditional=False)


def check_step(stash, saved_matmuls, config):
  """No matmul of the forward pass is replayed, and no buffer of the stash is copied."""
  # The grouped matmuls are 3 forward and 6 backward, and 3 where rows did not fit.
  assert saved_matmuls.total() >= 9
  assert stash.matmuls(is_conditional=False) == saved_matmuls
  assert stash.matmuls(is_conditional=True).total() == 3
  assert stash.kernels(is_conditional=False) == {"stash_compact": 3}
  assert stash.kernels(is_conditional=True) == {"stash_expand": 3}
  assert stash.outside_hbm() == []
  assert stash.copies(*buffers_of(config)) == []
  assert stash.copies(struct((RING * CAPACITY, config.width), config.dtype)) == []


STEPS = [
  pytest.param(chip, config, check_vma, structure, id=f"{chip}-{structure.__name__}-{check_vma}")
  for chip, config, check_vma, structure in [
    ("v5e", SMALL, False, shard_map_in_scan),
    ("v5p", SMALL, False, shard_map_in_scan),
    ("v6e", RAGGED_DOT, True, scan_in_shard_map),
    ("tpu7x", SMALL, False, shard_map_in_scan),
  ]
]
# The other structure, wider rows, and v6e with both matmuls.
STEPS_FOR_LONG = [
  long(*case)
  for case in [
    ("v5e", SMALL, False, scan_in_shard_map),
    ("v5p", WIDE, False, scan_in_shard_map),
    ("v5p", WIDE, False, shard_map_in_scan),
    ("v6e", SMALL, False, shard_map_in_scan),
    ("v6e", SMALL, False, scan_in_shard_map),
    ("v6e", RAGGED_DOT, True, shard_map_in_scan),
    ("tpu7x", SMALL, False, scan_in_shard_map),
  ]
]


@pytest.mark.parametrize("chip, config, check_vma, structure", [*STEPS, *STEPS_FOR_LONG])
def test_training_step(chip, config, check_vma, structure):
  stash = compile_step(chip, structure, config, stashing, check_vma=check_vma)
  # Nor do sizes.
  narrow = dataclasses.replace(config, width=SMALL.width)
  check_step(stash, saved_matmuls(structure, narrow, check_vma), config)
  # Nearly all that the program allocates is the stash, once.
  assert 1 <= stash.memory.temp_size_in_bytes / num_bytes(*buffers_of(config)) < 1.02


@pytest.mark.long
@pytest.mark.parametrize("structure", STRUCTURES)
def test_training_step_at_deepseek_size(structure):
  # It compiles, so it fits; it would not with a second stash.
  stash = compile_step("v5p", structure, REAL, stashing, seq=WORST_CASE_ROWS // REAL.top_k // RING)
  check_step(stash, saved_matmuls(structure, SMALL, False), REAL)
  assert 2 * num_bytes(*buffers_of(REAL)) > aot.HBM_GIB["v5p"] * 2**30


@pytest.mark.parametrize("structure", STRUCTURES)
def test_evaluation_leaves_the_stash_alone(structure):
  evaluation = compile_step("v6e", structure, SMALL, stashing, is_training=False)
  assert evaluation.kernels() == {}
  assert evaluation.copies(*buffers_of(SMALL)) == []
  assert evaluation.matmuls(is_conditional=True).total() == 0
  assert evaluation.memory.temp_size_in_bytes < num_bytes(*buffers_of(SMALL)) / 50
