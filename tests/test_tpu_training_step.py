"""A training step of 58 layers on four chips, a ring of experts: what the real TPU compiler makes.

Nothing runs here. Every program is compiled ahead of time for chips that this host does not have.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from bench.tpu import aot
import pallas_stash as ps
from reference import model, moe
from tests.helpers.checks import long, once
from tests.helpers.deepseek import CAPACITY, LAYERS, num_bytes, WIDTH, WORST_CASE_ROWS
from tests.helpers.moe_training import SAVE, saving_ffn, stashing_ffn

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

struct = jax.ShapeDtypeStruct
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
  pytest.param(*case, marks=marks, id=f"{case[0]}-{case[3].__name__}-{case[2]}")
  for case, marks in [
    (("v5e", SMALL, False, shard_map_in_scan), pytest.mark.long),
    (("v5p", SMALL, False, shard_map_in_scan), pytest.mark.long),
    (("v6e", RAGGED_DOT, True, scan_in_shard_map), ()),
    (("tpu7x", SMALL, False, shard_map_in_scan), pytest.mark.long),
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


@pytest.mark.parametrize("structure", [once(scan_in_shard_map), shard_map_in_scan])
def test_evaluation_leaves_the_stash_alone(structure):
  evaluation = compile_step("v6e", structure, SMALL, stashing, is_training=False)
  assert evaluation.kernels() == {}
  assert evaluation.copies(*buffers_of(SMALL)) == []
  assert evaluation.matmuls(is_conditional=True).total() == 0
  assert evaluation.memory.temp_size_in_bytes < num_bytes(*buffers_of(SMALL)) / 50
