"""The tick loop of a pipeline, compiled for TPUs: what it copies."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from bench.pipeline import stages
from bench.tpu import aot
from pallas_stash import pipeline
from reference import model

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

struct = jax.ShapeDtypeStruct
CONFIG = model.Config(
  vocab=256,
  width=1024,
  hidden=384,
  num_experts=8,
  top_k=2,
  layers=4,
  dtype=jnp.bfloat16,
  weights_before_down_projection=True,
)
RANKS, MICROBATCHES = 2, 4
SCHEDULES = {
  "1F1B": pipeline.one_f_one_b(RANKS, MICROBATCHES),
  "interleaved": pipeline.interleaved(RANKS, 2, MICROBATCHES),
  "ZB-H1": pipeline.zero_bubble(RANKS, MICROBATCHES),
  "DualPipeV": pipeline.dual_pipe_v(RANKS, MICROBATCHES),
}
# Too much for VMEM, into which XLA would bring a small stash or ring.
CAPACITY = 3 * 2**16
BATCH, SEQ = 8, 4096


def job_on(chip):
  devices = tuple(aot.mesh(chip, 4).devices.flat)
  return stages.Job(CONFIG, RANKS, 2, MICROBATCHES, batch=BATCH, seq=SEQ, devices=devices)


@pytest.mark.parametrize(
  "chip, name, late",
  [
    *(("v5p", name, ()) for name in SCHEDULES),
    *((chip, "DualPipeV", ()) for chip in aot.TOPOLOGIES if chip != "v5p"),
    *((chip, "ZB-H1", ("experts",)) for chip in aot.TOPOLOGIES),
    ("v5p", "DualPipeV", ("experts",)),
  ],
)
@pytest.mark.long
def test_neither_stash_nor_ring_is_copied(chip, name, late):
  job, schedule = job_on(chip), SCHEDULES[name]
  way = stages.Way(CAPACITY, page_rows=128, late=late)
  params = jax.eval_shape(functools.partial(model.init, CONFIG), jax.random.key(0))
  tokens = struct((MICROBATCHES, job.batch, job.seq + 1), jnp.int32)
  args = aot.place((params, tokens), job.mesh, P())
  program = aot.compile(stages.pipelined(job, schedule, way), *args)

  places = pipeline.tabulate(schedule).places["saved"]
  layers = CONFIG.layers // len(schedule.placement)
  x = layers, job.batch // job.experts, job.seq, CONFIG.width  # What a stage keeps of each layer.
  ring = struct((places, *x), CONFIG.dtype)
  _, residuals = stages.stashing_ffn(job, late)
  stash = [struct((CAPACITY, *residual.shape), residual.dtype) for residual in residuals]
  assert program.kernels()["stash_compact"] and program.kernels()["stash_expand"]
  assert program.copies(*stash) == []
  if chip != "tpu7x":  # Whose compiler gives the ring other tiles in some branches than in others.
    assert program.copies(ring) == []
