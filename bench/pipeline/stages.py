"""The model of the demo, cut into stages: pipelined, and as one piece to compare with."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from bench.pipeline import executor
import pallas_stash as ps
from pallas_stash import pipeline
from reference import model, moe
from reference.norm import rms_norm

STAGE = "stage"
NAMES = "mlpwi_0", "mlpwi_1"
save_only = jax.checkpoint_policies.save_only_these_names


@dataclasses.dataclass(frozen=True)
class Job:
  """A model and how it is trained.

  Attributes:
    config: of the model; the weights of choices are multiplied in before the down projection.
    ranks: of the pipeline.
    experts: devices that the experts of a layer are spread over, along `config.expert_axis`.
    microbatches: of a step.
    batch: sequences of a microbatch, of all devices of a rank together.
    seq: tokens of a sequence.
    devices: to run on; None for those of jax.
    fsdp: devices along `config.fsdp_axis`, if it has one: of a rank, `experts` times as many.
    check_vma: of the `shard_map`; megablox does not know it.
  """

  config: model.Config
  ranks: int
  experts: int
  microbatches: int
  batch: int
  seq: int
  devices: tuple[Any, ...] | None = None
  fsdp: int = 1
  check_vma: bool = True

  @property
  def data_axes(self) -> tuple[str, ...]:
    """The mesh axes of a rank, along which the batch is sharded."""
    config = self.config
    return tuple(axis for axis in (config.fsdp_axis, config.expert_axis) if axis)

  @property
  def mesh(self) -> Mesh:
    shape = self.ranks, self.fsdp, self.experts
    devices = np.array((self.devices or jax.devices())[: math.prod(shape)])
    shape = shape if self.config.fsdp_axis else (self.ranks, self.experts)
    return Mesh(devices.reshape(shape), (STAGE, *self.data_axes))

  @property
  def routing(self) -> tuple[int, ...]:
    """The arguments that `sizing` wants, for one push."""
    batch = self.batch // (self.fsdp * self.experts)
    return batch, self.seq, self.config.top_k, self.experts, self.config.num_experts


@dataclasses.dataclass(frozen=True)
class Way:
  """How residuals of the experts are kept: in a stash of so many rows, or all at worst-case size.

  Attributes:
    capacity_rows: of the stash of each device; None for none, and the worst case.
    page_rows: of a page.
    late: of the experts, the arguments whose gradients passes "I" leave to passes "W".
  """

  capacity_rows: int | None
  page_rows: int = 32
  late: tuple[str, ...] = ()


def pipelined(job: Job, schedule: pipeline.Schedule, way: Way) -> Callable[..., Any]:
  """Returns `(params, tokens) -> (loss, gradients, stats, rows)` of a step, run by a schedule.

  Params and gradients are those of `model.init`. `tokens` is int32[microbatches, batch, seq + 1].
  `stats` are the `StashStats` of all devices, and `rows` what each has in its stash behind each
  tick, int32[ticks, devices]; the devices of a rank are next to each other.
  """
  run, _ = on_mesh(job, schedule, way)
  chunks = range(schedule.chunks)
  order = [schedule.stages[rank, chunk] for rank in range(job.ranks) for chunk in chunks]

  def step(params, tokens):
    embed = lambda embedding: embedding[tokens[..., :-1]]
    inputs, pull_back = jax.vjp(embed, params["embedding"])
    head = {name: params[name] for name in ("norm", "head")}
    layers = jax.tree.map(lambda leaf: _by_stage(leaf, order, job.ranks), params["layers"])
    loss, (d_layers, d_head, d_inputs), (rows, stats) = run(layers, head, inputs, tokens[..., 1:])
    d_layers = jax.tree.map(lambda leaf: _by_layer(leaf, order), d_layers)
    (d_embedding,) = pull_back(d_inputs)
    return loss, {"embedding": d_embedding, "layers": d_layers, **d_head}, stats, rows

  return step


def on_mesh(job: Job, schedule: pipeline.Schedule, way: Way) -> tuple[Callable[..., Any], Any]:
  """Returns what runs a schedule, and how its arguments are sharded.

  It is `(layers, head, inputs, targets) -> (loss, gradients of the first three, (rows, stats))`,
  with `layers` [ranks, chunks, layers of a stage, ...], `inputs` [microbatches, batch, seq, width]
  and `targets` int32[microbatches, batch, seq].
  """
  config, table = job.config, pipeline.tabulate(schedule)
  every, data = (STAGE, *job.data_axes), P(None, job.data_axes)
  of_layers = lambda change: jax.tree.map(
    change, model.param_specs(config)["layers"], is_leaf=lambda spec: isinstance(spec, P)
  )
  specs = of_layers(lambda spec: P(STAGE, None, *spec)), P(), data, data

  def on_device(layers, head, inputs, targets):
    stage, stash = _stage(job, way)
    forward, backward = ps.split_passes(stage, axis_name=job.data_axes)
    run = executor.Model(
      forward,
      backward,
      backward.early,
      backward.late,
      loss=lambda head, y, target: _loss(head, y, target) / job.microbatches,
      observe=lambda stash: stash.stats().rows_in_use,
    )
    layers = jax.tree.map(lambda leaf: leaf[0], layers)
    result = executor.run(run, table, STAGE, layers, head, inputs, targets, stash)
    d_layers, d_head = result.d_params, result.d_head
    if not job.check_vma:  # Nothing else adds up the gradients of what devices of a rank share.
      d_layers = jax.tree.map(_add_up(job), of_layers(lambda spec: spec), d_layers)
      d_head = _add_up(job)(P(), d_head)
    d_layers = jax.tree.map(lambda leaf: leaf[None], d_layers)
    # The loss of a device is that of its own sequences: the mean over devices is that of all.
    devices = job.fsdp * job.experts
    mean = lambda leaf: (leaf / devices).astype(leaf.dtype)
    gradients = jax.tree.map(mean, (d_layers, d_head, result.d_inputs))
    observed = result.observed, result.state.stats()
    return lax.pmean(result.loss, job.data_axes), gradients, observed

  sharded = jax.shard_map(
    on_device,
    mesh=job.mesh,
    in_specs=specs,
    out_specs=(P(), specs[:3], (P(None, every), P(every))),
    check_vma=job.check_vma,
  )
  return sharded, specs


def in_one_piece(job: Job) -> Callable[..., Any]:
  """Returns `(params, tokens) -> (loss, gradients)` of a step without a pipeline or a stash."""
  config = job.config
  mesh = Mesh(np.array(jax.devices()[: job.experts]), (config.expert_axis,))
  ffn = _saving_ffn(config)

  def loss(params, tokens):
    def of_microbatch(total, tokens):
      value, _ = model.loss(params, tokens, config=config, ffn=ffn, policy=save_only(*NAMES))
      return total + value / job.microbatches, None

    zero = lax.pcast(jnp.float32(0), (config.expert_axis,), to="varying")
    total, _ = lax.scan(jax.checkpoint(of_microbatch), zero, tokens)
    return lax.pmean(total, config.expert_axis)

  specs = model.param_specs(config), P(None, config.expert_axis)
  return jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()))


def _stage(job, way):
  """Returns a stage `(stash, layers, x) -> (x, stash)`, and its stash."""
  config = job.config
  ffn, residuals = stashing_ffn(job, way.late)
  names = (ps.SLOT_NAME,)
  if way.capacity_rows is None:
    ffn, names = _saving_ffn(config), NAMES
  stash = ps.Stash.empty(way.capacity_rows or 0, residuals, page_rows=way.page_rows)
  axes = STAGE, *job.data_axes
  stash = jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), stash)

  def layer(carry, layer_params):
    x, stash, _ = model.decoder_layer(*carry, layer_params, config=config, ffn=ffn)
    return (x, stash), None

  layer = jax.checkpoint(layer, policy=save_only(*names), prevent_cse=False)
  return lambda stash, layers, x: lax.scan(layer, (x, stash), layers)[0], stash


def stashing_ffn(job: Job, late: tuple[str, ...] = ()) -> tuple[Callable[..., Any], list[Any]]:
  """Returns the experts `(stash, sizes, *args) -> (out, stash)`, and the residuals of the stash."""
  config = job.config
  f = ps.checkpoint(moe.ffn_of(config), policy=save_only(*NAMES), late_argnames=late)
  tokens, local = job.batch // job.fsdp * job.seq, config.num_experts // job.experts
  args = moe.expert_ffn_shapes(config, tokens, local)
  rows = ps.sizing.worst_case_rows(*job.routing)
  ffn = lambda stash, sizes, *args: f(stash, ps.RaggedRows(sizes, rows), *args)
  return ffn, f.residuals(ps.RaggedRows(args[4], rows), *args)


def _saving_ffn(config):
  saving = jax.checkpoint(moe.ffn_of(config), policy=save_only(*NAMES))
  return lambda state, sizes, *args: (saving(*args), state)


def _loss(head, y, targets):
  logits = (rms_norm(y, head["norm"]) @ head["head"]).astype(jnp.float32)
  return model.cross_entropy(logits, targets)


def _add_up(job):
  """Returns what sums up a tree over the data axes that its spec does not shard it over."""

  def add_up(spec, tree):
    axes = tuple(axis for axis in job.data_axes if axis not in spec)
    return lax.psum(tree, axes) if axes else tree

  return add_up


def _by_stage(leaf, order, ranks):
  """Returns [ranks, chunks, layers of a stage, ...] of [layers, ...]; `order` is stages by rank."""
  stages = leaf.reshape(len(order), -1, *leaf.shape[1:])
  return stages[np.array(order)].reshape(ranks, len(order) // ranks, *stages.shape[1:])


def _by_layer(leaf, order):
  """Undoes `_by_stage`."""
  stages = leaf.reshape(len(order), *leaf.shape[2:])
  return stages[np.argsort(order)].reshape(-1, *leaf.shape[3:])
