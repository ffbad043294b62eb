"""One gradient step of a model's MoE layers, as the TPU compiler sees it.

Ring of experts in one `shard_map`: each ring of devices along "expert" shares the experts, and the
rest of the devices, along "fsdp", share each expert's weights, which a layer gathers when it runs.
`lax.scan` over layers under `jax.checkpoint`, which saves the input of each layer; megablox `gmm`;
bfloat16. No attention, no optimiser, and a vocabulary of 256: nothing here takes memory beside the
MoE layers.

As a program it compiles one step and prints what the compiler says, a line of JSON; `bench.fit`
runs it once for each row of its table, because libtpu may abort the process.
"""

import dataclasses
import fractions
import functools
import json
import math
import re
import sys
import time

import jax
from jax import lax
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from bench.fit import fixed_chunks
from bench.fit.model_sizes import ModelSize
from bench.tpu import aot
from bench.tpu.host_schedule import Schedule
import pallas_stash as ps
from pallas_stash.kernels import host
from pallas_stash.kernels.tiling import round_up, SUBLANES
from reference import model, moe

WAYS = ("remat", "save", "offload", "chunks", "stash", "stash_host", "grouped_mlp")
CHUNK_MARGIN = 1.5
# Of the compiler, public: its scheduler starts and ends copies to the host further apart.
SCHEDULER_FLAG = "xla_tpu_enable_all_experimental_scheduler_features"
AXES = ("fsdp", "expert")

struct = jax.ShapeDtypeStruct
policies = jax.checkpoint_policies
save_only = policies.save_only_these_names


@dataclasses.dataclass(frozen=True)
class Step:
  """What to compile.

  Attributes:
    size: a `ModelSize`.
    topology: as libtpu names it, such as "v5p:8x8x4".
    way: how residuals are kept, one of `WAYS`.
    residuals: names of the residuals that are kept; none for "remat".
    weights_before_down_projection: of the model; then nothing needs "mlpwo".
    imbalance: rows that the stash has room for, as a multiple of the rows of perfect balance.
    staged: of "stash_host", the part of a layer's rows of perfect balance that goes to the host.
    has_expected_rows: whether grouped matmuls declare the cost of the rows of perfect balance.
    has_scheduler_flag: whether the compiler is given `SCHEDULER_FLAG`.
    tiling: of megablox.
  """

  size: ModelSize
  topology: str
  way: str
  residuals: tuple[str, ...]
  weights_before_down_projection: bool
  imbalance: float = 1.0
  staged: float = 0.45
  has_expected_rows: bool = False
  has_scheduler_flag: bool = False
  tiling: tuple[int, int, int] = (512, 1024, 1024)

  @property
  def config(self):
    size = self.size
    return model.Config(
      vocab=256,
      width=size.width,
      hidden=size.hidden,
      num_experts=size.num_experts,
      top_k=size.top_k,
      layers=size.layers,
      fsdp_axis="fsdp",
      dtype=jnp.bfloat16,
      grouped_matmul=lambda lhs, rhs, sizes: gmm(lhs, rhs, sizes, lhs.dtype, self.tiling),
      weights_before_down_projection=self.weights_before_down_projection,
    )

  @property
  def routing(self):
    """The arguments of the functions of `pallas_stash.sizing`."""
    size = self.size
    return size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts

  @property
  def expected_rows(self):
    """Rows of a layer, of perfect balance and of the worst case."""
    return ps.sizing.expected_rows(*self.routing), ps.sizing.worst_case_rows(*self.routing)

  @property
  def capacity_rows(self):
    return ps.sizing.capacity_rows(*self.routing, layers=self.size.layers, margin=self.imbalance)

  @property
  def staging_rows(self):
    """Rows that a layer of "stash_host" sends to the host, of `staged` the next tile."""
    return round_up(math.ceil(self.staged * ps.sizing.expected_rows(*self.routing)), SUBLANES)

  @property
  def tier_rows(self):
    """The rows of both tiers of "stash_host": those of "stash", shared out."""
    layers = self.size.layers
    return ps.sizing.tier_rows(self.capacity_rows // layers, self.staging_rows, layers)

  @property
  def row_structs(self):
    """A row of each residual."""
    width = lambda name: self.size.width if name == "mlpwo" else self.size.hidden
    return [struct((width(name),), jnp.bfloat16) for name in self.residuals]

  @property
  def stash_bytes(self):
    """Bytes of HBM of a stash for all layers."""
    rows = self.capacity_rows
    if self.way == "stash_host":
      rows = self.tier_rows.capacity_rows + self.staging_rows
    return ps.sizing.residual_bytes(rows, self.row_structs)

  @property
  def stash_host_bytes(self):
    """Bytes of host memory of a stash for all layers: rows, and room for one copy behind them."""
    if self.way != "stash_host":
      return 0
    chunks = [host.chunk_rows(math.prod(row.shape), row.dtype.itemsize) for row in self.row_structs]
    rows = self.tier_rows.host_capacity_rows + max(self.staging_rows, *chunks)
    return ps.sizing.residual_bytes(rows, self.row_structs)

  @property
  def worst_case_bytes(self):
    """Bytes of the residuals of all layers at worst-case size."""
    rows = self.size.layers * ps.sizing.worst_case_rows(*self.routing)
    return ps.sizing.residual_bytes(rows, self.row_structs)


def _way(step):
  """Returns the buffers of a stash, its stage, and what makes `model.loss` keep residuals so."""
  names = step.residuals
  expert_ffn = moe.ffn_of(step.config)
  if step.way == "remat":
    return [], [], {"policy": None}
  if step.way == "save":
    return [], [], {"policy": save_only(*names)}
  if step.way == "offload":
    policy = policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=list(names),
      offload_src="device",
      offload_dst="pinned_host",
    )
    return [], [], {"policy": policy}
  if step.way in ("stash", "stash_host"):
    f = ps.checkpoint(expert_ffn, policy=save_only(*names))

    def ffn(stash, group_sizes, tokens, row_choices, *args):
      ragged = ps.RaggedRows(group_sizes, row_choices.shape[0])
      return f(stash, ragged, tokens, row_choices, *args)

    make = functools.partial(ps.Stash.empty, step.capacity_rows, step.row_structs)
    if step.way == "stash_host":
      rows = step.tier_rows._asdict() | {"staging_rows": step.staging_rows}
      make = functools.partial(ps.Stash.empty, residuals=step.row_structs, **rows)
    slot_name, seal = ps.SLOT_NAME, ps.seal
  elif step.way == "grouped_mlp":
    if names != ("mlpwi_0", "mlpwi_1"):
      raise ValueError(f"{step.residuals=} must be mlpwi_0 and mlpwi_1: those it keeps.")

    def ffn(stash, group_sizes, tokens, row_choices, choice_rows, weights, _, experts):
      rows = moe.rows_of(tokens, row_choices, weights)
      out, stash = ps.grouped_mlp(
        stash,
        rows,
        *(experts[name] for name in ("wi_0", "wi_1", "wo")),
        group_sizes,
        row_weights=moe.row_weights_of(weights, row_choices),
        tiling=step.tiling,
      )
      live = jnp.arange(len(rows), dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
      out = jnp.where(live[:, None], out, 0)
      return moe.sum_of_choices(out, choice_rows, jnp.ones_like(weights), tokens.dtype), stash

    make = functools.partial(ps.Stash.empty, step.capacity_rows, step.row_structs)
    slot_name, seal = ps.SLOT_NAME, ps.seal
  elif step.way == "chunks":
    chunk_rows = ps.sizing.capacity_rows(*step.routing, layers=1, margin=CHUNK_MARGIN)
    chunk_rows = min(chunk_rows, ps.sizing.worst_case_rows(*step.routing))
    f = fixed_chunks.checkpoint(expert_ffn, save_only(*names), chunk_rows)

    def ffn(chunks, group_sizes, tokens, row_choices, *args):
      return f(chunks, (jnp.sum(group_sizes), row_choices), tokens, row_choices, *args)

    make = functools.partial(fixed_chunks.empty, step.capacity_rows, chunk_rows, step.row_structs)
    slot_name, seal = fixed_chunks.SLOT_NAME, fixed_chunks.seal
  else:
    raise ValueError(f"{step.way=} must be one of {WAYS}")
  state = jax.eval_shape(make)
  tier = state.host if step.way == "stash_host" else None
  buffers = [*state.buffers, *(tier.buffers if tier else ())]
  stage = list(tier.stage if tier else ())
  return buffers, stage, {"policy": save_only(slot_name), "ffn": ffn, "make": make, "finish": seal}


def build(step):
  """Returns the gradient of the loss, shapes of its arguments, and a stash's buffers and stage."""
  devices = topologies.get_topology_desc(topology_name=step.topology, platform="tpu").devices
  if len(devices) % step.size.expert_axis:
    raise ValueError(f"{len(devices)=} must be a multiple of {step.size.expert_axis=}")
  grid = np.array(devices).reshape(-1, step.size.expert_axis)
  mesh, config = jax.sharding.Mesh(grid, AXES), step.config
  buffers, stage, options = _way(step)
  make = options.pop("make", lambda: None)

  def device_loss(params, tokens):
    loss, _ = model.loss(params, tokens, config=config, state=make(), **options)
    return lax.pmean(loss, AXES)

  specs = model.param_specs(config)
  loss = jax.shard_map(
    device_loss, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P(), check_vma=False
  )
  params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
  tokens = struct((len(devices) * step.size.batch, step.size.seq + 1), jnp.int32)
  args = (aot.place(params, mesh, specs), aot.place(tokens, mesh, P(AXES)))
  fun = jax.value_and_grad(loss)
  if step.has_expected_rows:
    fun = ps.with_expected_rows(fun, *step.expected_rows)
  return fun, args, buffers, stage


def compile_step(step):
  """Compiles a step; returns what the compiler says of it.

  Returns:
    A dict, all of one device, None where not known:
      fits: whether the compiler takes it.
      weight_bytes: of the weights and their gradients.
      stash_bytes: of HBM, the rows that there is room for; those of perfect balance, unless asked.
      stash_host_bytes: of host memory, likewise.
      layer_bytes: of one layer's residuals at worst-case size.
      peak_bytes: of HBM, those included; as `aot.Program.hbm_bytes`.
      host_bytes: of host memory.
      needed_bytes: of HBM, or else of host memory, if it does not fit.
      stash_copies: instructions that make another array of the shape of a stash buffer, in HBM or
        in host memory.
      stage_copies: likewise of the rows on their way to the host, or back; what loads them is none.
      flops: of matmuls, of the worst case, where no layer is recomputed for want of room.
      beside: of "stash_host", what a layer runs while the staged rows of another one go to the
        host, "forward", and back, "backward": grouped matmuls, of how many, and collectives.
      trace_seconds, compile_seconds: wall time.
      cpu_seconds: of this process, for both, which other processes disturb less.
  """
  start, cpu_start = time.perf_counter(), time.process_time()
  fun, args, buffers, stage = build(step)
  lowered = jax.jit(fun).lower(*args)
  traced = time.perf_counter()
  # The arguments, and gradients like all of them but the tokens.
  weight_bytes = 2 * sum(map(_device_bytes, jax.tree.leaves(args[0])))
  row = {"weight_bytes": weight_bytes, "stash_bytes": step.stash_bytes}
  row["stash_host_bytes"] = step.stash_host_bytes
  row["layer_bytes"] = step.worst_case_bytes // step.size.layers
  row["trace_seconds"] = traced - start
  unknown = "peak_bytes", "host_bytes", "needed_bytes", "stash_copies", "stage_copies", "flops"
  row |= dict.fromkeys((*unknown, "beside", "compile_seconds"))
  try:
    compiled = lowered.compile({SCHEDULER_FLAG: True} if step.has_scheduler_flag else None)
  except jax.errors.JaxRuntimeError as error:
    return row | {"fits": False} | refusal(str(error))
  row["compile_seconds"] = time.perf_counter() - traced
  row["cpu_seconds"] = time.process_time() - cpu_start
  program, beside = aot.Program(compiled), None
  if step.way == "stash_host":
    schedule, rows = Schedule(compiled.as_text()), step.staging_rows
    passes = {"forward": "store", "backward": "load"}
    beside = {name: schedule.beside(kind, rows) for name, kind in passes.items()}
  host_bytes = program.memory.host_temp_size_in_bytes
  expected, worst_case = step.expected_rows
  of_kernels = fractions.Fraction(worst_case, expected) if step.has_expected_rows else 1
  return row | {
    "fits": True,
    "peak_bytes": program.hbm_bytes,
    "host_bytes": host_bytes,
    "stash_copies": len(program.copies(*buffers)),
    "stage_copies": sum(": dynamic-slice-done" not in copy for copy in program.copies(*stage)),
    "flops": program.flops(of_kernels),
    "beside": beside,
  }


def _device_bytes(array):
  return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def refusal(message):
  """Reads out of the compiler's refusal what the program would need, weights and all."""
  if host := re.search(r"Allocation \(size=(\d+)\) would exceed memory", message):
    return {"host_bytes": int(host[1]), "needed_bytes": int(host[1])}
  # What the compiler calls temporaries here are all of its allocations, arguments and results too.
  if everything := re.search(r"required for HLO temporaries \(([\d.]+)G\)", message):
    return {"needed_bytes": round(float(everything[1]) * 2**30)}
  if everything := re.search(r"Used ([\d.]+)G of [\d.]+G hbm", message):
    return {"needed_bytes": round(float(everything[1]) * 2**30)}
  raise RuntimeError(message)


def main():
  fields = json.loads(sys.argv[1])
  fields["size"] = ModelSize(**fields["size"])
  for name in ("residuals", "tiling"):  # JSON has no tuples
    fields[name] = tuple(fields[name])
  print(json.dumps(compile_step(Step(**fields))))


if __name__ == "__main__":
  main()
