"""A step of a model's MoE layers in a pipeline, as the TPU compiler sees it.

The layers are cut into stages, each on a ring of devices along "expert" that shares the experts, as
in `gradient_step`; the other devices of a stage, along "fsdp", share each expert's weights. All
ranks run one program (`bench.pipeline`), so each has layers for the largest stage, and a stash for
the fullest rank. Every rank has the inputs of all microbatches, and their gradients.

As a program it compiles one step and prints what the compiler says, a line of JSON.
"""

import dataclasses
import functools
import json
import sys
import time

import jax
from jax.experimental import topologies
import jax.numpy as jnp

from bench.fit import gradient_step
from bench.fit.model_sizes import ModelSize
from bench.pipeline import stages
from bench.tpu import aot
import pallas_stash as ps
from pallas_stash import pipeline
from reference import model

SCHEDULES = {
  "1F1B": pipeline.one_f_one_b,
  "ZB-H1": pipeline.zero_bubble,
  "interleaved": lambda ranks, microbatches: pipeline.interleaved(ranks, 2, microbatches),
  "DualPipeV": pipeline.dual_pipe_v,
}
WAYS = "save", "stash"
RESIDUALS = "mlpwi_0", "mlpwi_1"  # those of `stages`

struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class PipelineStep:
  """What to compile.

  Attributes:
    size: a `ModelSize`; its batch is that of a microbatch.
    topology: as libtpu names it.
    schedule: one of `SCHEDULES`.
    ranks: of the pipeline.
    microbatches: of a step.
    way: "save", the residuals of the passes in flight at worst-case size, or "stash", in pages.
    imbalance: rows that the stash has room for, as a multiple of the rows of perfect balance.
  """

  size: ModelSize
  topology: str
  schedule: str
  ranks: int
  microbatches: int
  way: str
  imbalance: float = 1.0

  def make_schedule(self) -> pipeline.Schedule:
    return SCHEDULES[self.schedule](self.ranks, self.microbatches)

  @property
  def stage_layers(self) -> int:
    """Layers of the largest stage."""
    return max(pipeline.layer_partition(self.make_schedule(), [1] * self.size.layers))

  @property
  def page_rows(self) -> int:
    return ps.sizing.page_rows(self._expected_rows)

  @property
  def capacity_rows(self) -> int:
    options = {"pushes": self.stage_layers, "margin": self.imbalance, "page_rows": self.page_rows}
    return pipeline.capacity_rows(self.make_schedule(), None, self._expected_rows, **options)

  @property
  def stash_bytes(self) -> int:
    return ps.sizing.residual_bytes(self.capacity_rows, self._row)

  @property
  def worst_case_bytes(self) -> int:
    """Bytes of the residuals at worst-case size, of as many passes as a rank has in flight."""
    places = pipeline.tabulate(self.make_schedule()).places["saved"]
    rows = places * self.stage_layers * ps.sizing.worst_case_rows(*self._routing)
    return ps.sizing.residual_bytes(rows, self._row)

  @property
  def _row(self):
    return [struct((self.size.hidden,), jnp.bfloat16)] * len(RESIDUALS)

  @property
  def _routing(self):
    size = self.size
    return size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts

  @property
  def _expected_rows(self):
    return ps.sizing.expected_rows(*self._routing)


def build(step):
  """Returns the step, shapes of its arguments, and the buffers of the stash."""
  size, schedule = step.size, step.make_schedule()
  devices = tuple(topologies.get_topology_desc(step.topology, platform="tpu").devices)
  of_rank, rest = divmod(len(devices), step.ranks * size.expert_axis)
  if rest or not of_rank:
    raise ValueError(
      f"{len(devices)=} must be a multiple of {step.ranks=} times {size.expert_axis=}"
    )
  chunks, layers = schedule.chunks, step.stage_layers
  of_size = dataclasses.replace(size, layers=layers * chunks * step.ranks)
  config = gradient_step.Step(of_size, step.topology, "stash", RESIDUALS, True).config
  batch = size.batch * of_rank * size.expert_axis
  job = stages.Job(
    config,
    step.ranks,
    size.expert_axis,
    step.microbatches,
    batch,
    size.seq,
    devices,
    of_rank,
    False,
  )
  way = stages.Way(step.capacity_rows if step.way == "stash" else None, step.page_rows)
  run, specs = stages.on_mesh(job, schedule, way)
  params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
  by_stage = lambda leaf: struct((step.ranks, chunks, layers, *leaf.shape[1:]), leaf.dtype)
  shape = step.microbatches, batch, size.seq
  args = (
    jax.tree.map(by_stage, params["layers"]),
    {name: params[name] for name in ("norm", "head")},
    struct((*shape, size.width), config.dtype),
    struct(shape, jnp.int32),
  )
  buffers = []
  if step.way == "stash":
    buffers = [struct((step.capacity_rows, size.hidden), config.dtype)] * len(RESIDUALS)
  placed = [aot.place(arg, job.mesh, spec) for arg, spec in zip(args, specs, strict=True)]
  return run, placed, buffers


def compile_step(step):
  """Compiles a step; returns what the compiler says of it, as `gradient_step.compile_step` does."""
  start = time.perf_counter()
  run, args, buffers = build(step)
  row = {"stash_bytes": step.stash_bytes, "stage_layers": step.stage_layers}
  row |= {"capacity_rows": step.capacity_rows, "page_rows": step.page_rows}
  row |= dict.fromkeys(("peak_bytes", "needed_bytes", "stash_copies"))
  try:
    compiled = jax.jit(run).lower(*args).compile()
  except jax.errors.JaxRuntimeError as error:
    return row | {"fits": False} | gradient_step.refusal(str(error))
  program = aot.Program(compiled)
  row |= {"fits": True, "peak_bytes": program.memory.peak_memory_in_bytes}
  seconds = time.perf_counter() - start
  return row | {"stash_copies": len(program.copies(*buffers)), "seconds": seconds}


def main():
  fields = json.loads(sys.argv[1])
  fields["size"] = ModelSize(**fields["size"])
  print(json.dumps(compile_step(PipelineStep(**fields))))


if __name__ == "__main__":
  main()
