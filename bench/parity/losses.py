"""The loss of a model in one of the five modes, its residuals saved or in a stash."""

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_stash as ps
from reference import model
from reference.modes import MODES

DEVICES = 8
AXES = "expert", "fsdp"  # As the config of the model names them.
NAMES = "mlpwi_0", "mlpwi_1", "mlpwo"  # The residuals: with them, no matmul is repeated.
save_only = jax.checkpoint_policies.save_only_these_names


def mesh_of(mode):
  """Returns a mesh of all devices, along the one axis that the mode uses."""
  shape = (DEVICES, 1) if MODES[mode].spreads_experts else (1, DEVICES)
  return Mesh(np.array(jax.devices()[:DEVICES]).reshape(shape), AXES)


def total_rows(mode, config, num_tokens):
  """Returns the rows of a worst-case buffer of one layer, from the tokens of one device."""
  return MODES[mode].total_rows(num_tokens, mesh_of(mode).shape["expert"], config)


def sufficient_rows(mode, config, num_tokens):
  """Returns rows of a stash with room for the worst case of every layer: each starts on a tile."""
  return config.layers * -(-total_rows(mode, config, num_tokens) // 8) * 8


def saving_ffn(mode, config):
  """Keeps what is named at worst-case size."""
  saving = jax.checkpoint(MODES[mode].ffn_of(config), policy=save_only(*NAMES))
  return lambda state, group_sizes, *args: (saving(*args), state)


def stashing_ffn(mode, config, rows):
  """Keeps what is named in a stash; `rows` are those of a worst-case buffer."""
  axis_name = config.expert_axis if MODES[mode].has_collectives else None
  f = ps.checkpoint(MODES[mode].ffn_of(config), policy=save_only(*NAMES), axis_name=axis_name)
  return lambda stash, group_sizes, *args: f(stash, ps.RaggedRows(group_sizes, rows), *args)


def empty_stash(config, capacity_rows):
  """Returns a stash of one device for what is named, the same in every mode. In a `shard_map`."""
  features = {"mlpwi_0": config.hidden, "mlpwi_1": config.hidden, "mlpwo": config.width}
  residuals = [jax.ShapeDtypeStruct((features[name],), config.dtype) for name in NAMES]
  stash = ps.Stash.empty(capacity_rows, residuals)
  return jax.tree.map(lambda leaf: lax.pcast(leaf, AXES, to="varying"), stash)


def loss_of(mode, config, capacity_rows=None):
  """Returns a loss, `(params, tokens) -> (loss, (stats, group_sizes))`, in one `shard_map`.

  Args:
    mode: of `MODES`.
    config: a `model.Config` whose axes are `AXES`.
    capacity_rows: of the stash of each device; None saves the residuals instead.

  `params` are as `model.init` makes them, `tokens` int32[batch, seq + 1] of all devices together.
  `stats` are the stash's, with one entry a device, or None; `group_sizes` int32[layers, experts],
  the rows that the router sends to each expert.
  """
  by_device = P(AXES)

  def device_loss(params, tokens):
    rows = total_rows(mode, config, tokens[:, 1:].size)
    options = dict(config=config, moe=MODES[mode].block)
    if capacity_rows is None:
      options |= dict(ffn=saving_ffn(mode, config), policy=save_only(*NAMES))
      summarize = lambda state: state
    else:
      options |= dict(ffn=stashing_ffn(mode, config, rows), policy=save_only(ps.SLOT_NAME))
      options |= dict(state=empty_stash(config, capacity_rows), finish=ps.seal)
      summarize = ps.Stash.stats
    loss, (state, sizes) = model.loss(params, tokens, **options)
    return lax.pmean(loss, AXES), (summarize(state), lax.psum(sizes, "fsdp"))

  return jax.shard_map(
    device_loss,
    mesh=mesh_of(mode),
    in_specs=(model.param_specs(config), by_device),
    out_specs=(P(), (by_device, P(None, "expert"))),
  )
