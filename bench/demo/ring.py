"""The model of the demo, its experts spread over a ring of devices, and its two losses."""

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_stash as ps
from reference import model, moe

CONFIG = model.Config(
  vocab=256,
  width=128,
  hidden=256,
  num_experts=8,
  top_k=2,
  layers=8,
  num_heads=2,
  weights_before_down_projection=True,
)
BATCH, SEQ = 8, 128  # of all devices together
NAMES = ("mlpwi_0", "mlpwi_1")  # the residuals: with them the backward pass repeats no matmul

DEVICES = max(n for n in (1, 2, 4) if n <= jax.device_count())
MESH = Mesh(np.array(jax.devices()[:DEVICES]), (CONFIG.expert_axis,))
BY_DEVICE = P(CONFIG.expert_axis)
ROUTING = (BATCH // DEVICES, SEQ, CONFIG.top_k, DEVICES, CONFIG.num_experts)
WORST_CASE_ROWS = ps.sizing.worst_case_rows(*ROUTING)  # of one layer on one device, like the next
EXPECTED_ROWS = ps.sizing.expected_rows(*ROUTING)

save_only = jax.checkpoint_policies.save_only_these_names
expert_ffn = moe.ffn_of(CONFIG)
stashed_ffn = ps.checkpoint(expert_ffn, policy=save_only(*NAMES))


def ring_loss(params, tokens, state, summarize, **options):
  """The loss of all devices, the whole model inside one `shard_map`.

  Args:
    params: as `model.init` makes them.
    tokens: int32[BATCH, SEQ + 1].
    state: a pytree whose leaves have one block for each device.
    summarize: what to return of the state after the last layer.
    **options: keyword arguments of `model.loss`.

  Returns:
    A float32 scalar, and (what `summarize` returned, group sizes int32[layers, experts]).
  """

  def device_loss(params, tokens, state):
    loss, (state, sizes) = model.loss(params, tokens, config=CONFIG, state=state, **options)
    return lax.pmean(loss, CONFIG.expert_axis), (summarize(state), sizes)

  return jax.shard_map(
    device_loss,
    mesh=MESH,
    in_specs=(model.param_specs(CONFIG), BY_DEVICE, BY_DEVICE),
    out_specs=(P(), (BY_DEVICE, P(None, CONFIG.expert_axis))),
  )(params, tokens, state)


def saving_loss(params, tokens):
  """The loss of a model whose residuals JAX keeps: a row for every row of the worst case."""

  def ffn(state, group_sizes, *args):
    del group_sizes
    return jax.checkpoint(expert_ffn, policy=save_only(*NAMES))(*args), state

  return ring_loss(params, tokens, None, lambda state: state, ffn=ffn, policy=save_only(*NAMES))


def stashing_loss(capacity_rows, params, tokens):
  """The loss of the same model with a stash of `capacity_rows` on each device."""

  def ffn(stash, group_sizes, *args):
    return stashed_ffn(stash, ps.RaggedRows(group_sizes, WORST_CASE_ROWS), *args)

  shapes = moe.expert_ffn_shapes(CONFIG, BATCH * SEQ, CONFIG.num_experts // DEVICES)
  residuals = stashed_ffn.residuals(ps.RaggedRows(shapes[4], WORST_CASE_ROWS), *shapes)
  stash = ps.Stash.empty(capacity_rows, residuals, num_shards=DEVICES)
  options = dict(ffn=ffn, policy=save_only(ps.SLOT_NAME), finish=ps.seal)
  return ring_loss(params, tokens, stash, ps.Stash.stats, **options)
