"""Rows in host memory, compiled for TPUs: what moves while a layer computes."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from bench.tpu import aot
from bench.tpu.host_schedule import Schedule
import pallas_stash as ps
from pallas_stash import host_tier
from pallas_stash.kernels import host
from tests.helpers.checks import long, once
from tests.helpers.few_layers import SAVE

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

struct = jax.ShapeDtypeStruct
ROWS, WIDTH, LAYERS, GROUPS = 4096, 512, 4, 8
HOST_ROWS, STAGING_ROWS = 2**16, 1024
SPECS = [struct((WIDTH,), jnp.bfloat16)]
CHIPS = ["v5p", *(chip for chip in aot.TOPOLOGIES if chip != "v5p")]


def experts(x, w_in, w_out, sizes):
  is_live = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]
  hidden = checkpoint_name(jnp.where(is_live, x @ w_in, 0), "hidden")
  return jnp.where(is_live, jnp.tanh(hidden) @ w_out, 0)


stashed = ps.checkpoint(experts, policy=SAVE("hidden"))


@functools.partial(ps.checkpoint, policy=SAVE("hidden"))
def experts_of_megablox(x, w_in, w_out, sizes):
  """Its matmuls are kernels that declare their cost."""
  multiply = lambda x, w: gmm(x, jnp.broadcast_to(w, (GROUPS, *w.shape)), sizes, x.dtype)
  is_live = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
  hidden = checkpoint_name(jnp.where(is_live, multiply(x, w_in), 0), "hidden")
  return jnp.where(is_live, multiply(jnp.tanh(hidden), w_out), 0)


def with_megablox(stash, *args):
  return experts_of_megablox(stash, ps.RaggedRows(args[-1], len(args[0])), *args)


def with_checkpoint(stash, *args):
  return stashed(stash, ps.RaggedRows(args[-1], ROWS), *args)


def with_gmm(stash, x, w_in, w_out, sizes):
  of_groups = lambda w: jnp.broadcast_to(w, (GROUPS, *w.shape))
  hidden, stash = ps.gmm(stash, x, of_groups(w_in), sizes, x.dtype)
  is_live = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]
  return jnp.where(is_live, jnp.tanh(hidden) @ w_out, 0), stash


def with_mlp(stash, x, w_in, w_out, sizes):
  of_groups = lambda w: jnp.broadcast_to(w, (GROUPS, *w.shape))
  weights = map(of_groups, (w_in, w_in, w_out))
  out, stash = ps.grouped_mlp(stash, x, *weights, sizes, tiling=(512, 512, 512))
  return jnp.where((jnp.arange(ROWS) < jnp.sum(sizes))[:, None], out, 0), stash


def loss(
  weights,
  x,
  sizes,
  capacity_rows,
  num_shards=1,
  mesh=None,
  block=with_checkpoint,
  staging_rows=STAGING_ROWS,
):
  stash = ps.Stash.empty(
    *(capacity_rows, SPECS * (2 if block is with_mlp else 1), num_shards),
    host_capacity_rows=HOST_ROWS,
    staging_rows=staging_rows,
  )
  if mesh is not None:
    sharded = P("expert")

    def place(array):
      kind = "pinned_host" if host.is_on_host(array) else "device"
      return lax.with_sharding_constraint(array, NamedSharding(mesh, sharded, memory_kind=kind))

    stash = jax.tree.map(place, stash)
    specs = sharded, sharded, P(), P(), sharded
    block = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=sharded)

  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME), prevent_cse=False)
  def layer(x, stash, weights, sizes):
    y, stash = block(stash, jnp.tanh(x @ weights[0]), *weights[1:], sizes)
    return x + y, stash

  body = lambda carry, xs: (layer(*carry, *xs), None)
  (x, stash), _ = lax.scan(body, (x, stash), (weights, sizes))
  return jnp.sum(ps.seal(x, stash).astype(jnp.float32) ** 2)


def compiled(
  chip, layers=LAYERS, capacity_rows=0, shards=1, rows=ROWS, expected_rows=None, **options
):
  """Returns the gradient of a loss through so many layers, compiled for a chip."""
  weights = (struct((layers, WIDTH, WIDTH), jnp.bfloat16),) * 3
  x = struct((shards * rows, WIDTH), jnp.bfloat16)
  sizes = struct((layers, shards * GROUPS), jnp.int32)
  mesh = aot.mesh(chip, shards)
  options |= {"capacity_rows": capacity_rows}
  args = aot.place((weights, x, sizes), mesh)
  if shards > 1:
    options |= {"num_shards": shards, "mesh": mesh}
    specs = P(), P("expert"), P(None, "expert")
    args = aot.place((weights, x, sizes), mesh, specs)
  fun = jax.grad(functools.partial(loss, **options))
  if expected_rows:
    fun = ps.with_expected_rows(fun, expected_rows, rows)
  return jax.jit(fun).lower(*args).compile()


def check_schedule(program):
  """Fails unless heads move beside matmuls, and what is read is what was stored."""
  schedule = Schedule(program.as_text())
  check_loads(schedule)
  # The compiler may take a turn out of the loop over the layers: once, a head may be waited for.
  moves = [move for move in schedule.transfers() if move.computation != schedule.entry]
  heads = [move for move in moves if move.rows == STAGING_ROWS]
  (store,) = [move for move in heads if move.kind == "store"]
  (load,) = [move for move in heads if move.kind == "load"]
  assert store.computation != load.computation
  # Of a layer of three: what is in front of the rows. And those of both operands, backward.
  assert store.matmuls >= 1
  assert load.matmuls >= 2


def check_loads(schedule):
  """Fails unless all that is read comes from where the stage, and the chunks, are stored to."""
  loads = [move for move in schedule.transfers() if move.kind == "load"]
  assert len(loads) >= 3  # A head, one that is not in the stage, and what was spilled.
  for move in loads:
    stores = schedule.stores_behind(move)
    assert len(stores) == 2, f"{move} reads what was stored by {stores}"


def check_copies(program):
  rows = HOST_ROWS + max(STAGING_ROWS, host.chunk_rows(WIDTH, 2))
  program = aot.Program(program)
  assert program.copies(struct((rows, WIDTH), jnp.bfloat16)) == []
  # What is loaded is written over the head that was read.
  of_stage = program.copies(struct((STAGING_ROWS, WIDTH), jnp.bfloat16))
  assert [copy for copy in of_stage if ": dynamic-slice-done" not in copy] == []


@pytest.mark.parametrize("chip", [once(CHIPS[0]), *map(long, CHIPS[1:])])
def test_heads_move_beside_the_matmuls_of_a_layer(chip):
  program = compiled(chip)
  check_schedule(program)
  check_copies(program)


@pytest.mark.long
@pytest.mark.parametrize("block", [with_gmm, with_mlp])
def test_whatever_keeps_rows_copies_neither_tier_nor_stage(block):
  check_copies(compiled("v5p", block=block))


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
def test_a_shard_map_in_each_layer(chip):
  program = compiled(chip, capacity_rows=2 * ROWS, shards=4)
  check_schedule(program)
  check_copies(program)


@pytest.mark.long
@pytest.mark.parametrize("chip", ["v5p", "tpu7x"])
def test_as_many_layers_as_models_have(chip):
  """At the width of models, too, `tests/test_fit.py` compiles it: there it aborts if it may look
  behind the turns of a loop."""
  program = compiled(chip, layers=58, capacity_rows=8 * ROWS)
  check_schedule(program)
  check_copies(program)


@pytest.mark.long
def test_few_rows_expected_are_taken_to_hide_less():
  """XLA waits for a copy where the matmuls beside it, as they declare their cost, took as long."""
  options = {"block": with_megablox, "rows": 8 * ROWS, "staging_rows": 256}
  beside = []
  for expected_rows in (None, ROWS):
    schedule = Schedule(compiled("v5p", expected_rows=expected_rows, **options).as_text())
    beside += [schedule.beside(kind, 256).kernels for kind in ("store", "load")]
  forward, backward, *of_few = beside
  assert forward < 2 and backward < 4 and of_few == [2, 4]


@pytest.mark.long
def test_a_load_that_does_not_wait_is_seen(monkeypatch):
  """The fault: the backward pass is handed host memory as it was before the head was stored."""
  fault = lambda tier, row: tier.buffers
  monkeypatch.setattr(host_tier.HostTier, "_stored", fault)
  jax.clear_caches()
  schedule = Schedule(compiled("v5p").as_text())
  monkeypatch.undo()
  jax.clear_caches()
  with pytest.raises(AssertionError, match="reads what was stored by"):
    check_loads(schedule)
