"""Five ways to spread one mixture-of-experts layer over devices.

All compute the layer of `moe` of the same parameters, none drops a token:

  ring: experts are spread over devices. Each gathers the tokens of all, and sums go back.
  all_to_all: experts are spread. Each token's rows go to their experts' devices, and back: unsort.
  fsdp: every device has its own tokens and, while it computes, all experts.
  dense_fsdp: as fsdp, with each expert applied to every token, and most results weighted by zero.
  dense_ep: as ring, with each expert applied to every token.

The blocks are called as `moe.moe_block` is, inside a `shard_map` over the axes that the config
names. The expert axis has one device in the modes that do not spread the experts. The results that
the backward pass needs are named "mlpwi_0", "mlpwi_1" and "mlpwo", as those of `moe.expert_ffn`.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from reference import local_experts, moe
from reference.exchange import exchange_rows


@dataclasses.dataclass(frozen=True)
class Mode:
  """One of the ways.

  Attributes:
    block: `(x, layer_params, state, *, config, ffn=None) -> (y, state, group_sizes)`.
    ffn_of: `config -> function`, what the block calls `ffn` in place of: `ffn(state, group_sizes,
      *args) -> (out, state)`, with the arguments of that function, and the rows that are in use of
      each group of its worst-case buffers, in order.
    total_rows: `(num_tokens, devices, config) -> int`, the rows of a worst-case buffer, from the
      tokens of one device and the devices of the expert axis.
    spreads_experts: whether different devices hold different experts.
    has_collectives: whether there are any, along the expert axis, in what `ffn_of` returns.
  """

  block: Callable
  ffn_of: Callable
  total_rows: Callable
  spreads_experts: bool
  has_collectives: bool = False


def ring_block(x, layer_params, state, *, config, ffn=None):
  """The ring of experts: what `moe.moe_block` is, from one sort of the rows of all experts."""
  tokens = lax.all_gather(_tokens_of(x), config.expert_axis, tiled=True)
  expert_ids, weights = moe.route(tokens, layer_params["router"], config)
  order, rows, group_sizes = moe.sort_rows(expert_ids, 0, config.num_experts)
  first, local = _local_experts(config)
  total_rows = len(tokens) * min(config.top_k, local)
  row_choices = local_experts.ring_buffer(order, group_sizes, first, total_rows)
  choice_rows = (rows - local_experts.first_row(group_sizes, first)) % len(order)
  experts = moe.gather_experts(layer_params["experts"], config)
  local_sizes = local_experts.local_group_sizes(group_sizes, first, local)
  args = (tokens, row_choices, choice_rows, weights, group_sizes, first, experts)
  out, state = _run(ffn, ring_ffn_of(config), state, local_sizes, args)
  out = lax.psum_scatter(out, config.expert_axis, tiled=True)
  return out.reshape(x.shape), state, local_sizes


def ring_ffn_of(config):
  """Returns `moe.expert_ffn` of the sizes of all devices' groups, and of the first local one."""

  def ffn(tokens, row_choices, choice_rows, weights, group_sizes, group_offset, experts):
    def matmul(lhs, rhs, local_sizes):
      del local_sizes
      options = {"grouped_matmul": config.grouped_matmul}
      return local_experts.local_grouped_matmul(lhs, rhs, group_sizes, group_offset, **options)

    local = experts["wo"].shape[0]
    local_sizes = local_experts.local_group_sizes(group_sizes, group_offset, local)
    args = (tokens, row_choices, choice_rows, weights, local_sizes, experts)
    is_before = config.weights_before_down_projection
    return moe.expert_ffn(*args, grouped_matmul=matmul, weights_before_down_projection=is_before)

  return ffn


class Plan(NamedTuple):
  """Where the rows of an all-to-all are, on one device.

  Attributes:
    choice_rows: int32[tokens, top_k], the row of each choice among those that it sends.
    received_rows: int32[total_rows], the row of the experts that each received row is.
    sizes: int32[devices, devices], how many rows each device sends to each.
  """

  choice_rows: jax.Array
  received_rows: jax.Array
  sizes: jax.Array


def all_to_all_block(x, layer_params, state, *, config, ffn=None):
  """Rows go to the devices of their experts, and back."""
  tokens = _tokens_of(x)
  expert_ids, weights = moe.route(tokens, layer_params["router"], config)
  rows, group_sizes, plan = send_to_experts(tokens, expert_ids, config)
  experts = moe.gather_experts(layer_params["experts"], config)
  args = (rows, plan, weights, group_sizes, experts)
  out, state = _run(ffn, all_to_all_ffn_of(config), state, group_sizes, args)
  return out.reshape(x.shape), state, group_sizes


def send_to_experts(tokens, expert_ids, config):
  """Sends a row for each choice to the device of its expert, and sorts there what came.

  Args:
    tokens: [tokens, width].
    expert_ids: int32[tokens, top_k], distinct for each token.
    config: a `model.Config`.

  Returns:
    rows: [total_rows, width], of the first local expert, the second, and so on; then padding.
    group_sizes: int32[local_experts].
    plan: a `Plan`.
  """
  axis_name, devices = config.expert_axis, lax.axis_size(config.expert_axis)
  first, local = _local_experts(config)
  order, choice_rows, sent = moe.sort_rows(expert_ids, 0, config.num_experts)
  sent = lax.all_gather(sent, axis_name)  # [devices, num_experts]
  sizes = jnp.sum(sent.reshape(devices, devices, local), axis=2)
  total_rows = devices * len(tokens) * min(config.top_k, local)
  received = exchange_rows(tokens[order // config.top_k], sizes, total_rows, axis_name)
  # They came in runs, of each expert from the first device, of each from the second, and so on.
  runs = lax.dynamic_slice_in_dim(sent, first, local, axis=1)  # [devices, local]
  run = jnp.searchsorted(jnp.cumsum(runs), jnp.arange(total_rows), side="right")
  expert = jnp.where(run < runs.size, run % local, local)  # Padding last.
  order = jnp.argsort(expert, stable=True)
  plan = Plan(choice_rows, jnp.argsort(order), sizes)
  return received[order], jnp.sum(runs, axis=0), plan


def unsort(out, plan, axis_name):
  """Sends back what the experts made of the rows that `send_to_experts` sent.

  Args:
    out: [total_rows, width], in the order of the experts; then padding, which may hold anything.
    plan: a `Plan`.
    axis_name: the mesh axis that the experts are spread over.

  Returns:
    [tokens * top_k, width], where `plan.choice_rows` says: no padding.
  """
  return exchange_rows(out[plan.received_rows], plan.sizes.T, plan.choice_rows.size, axis_name)


def all_to_all_ffn_of(config):
  """Returns the experts of one device, the way back, and the sums, as one function."""
  _check_order_of_weights(config)

  def ffn(rows, plan, weights, group_sizes, experts):
    options = {"grouped_matmul": config.grouped_matmul}
    out = moe.expert_mlp(rows, group_sizes, experts, **options)
    returned = unsort(out, plan, config.expert_axis)
    return moe.sum_of_choices(returned, plan.choice_rows, weights, rows.dtype)

  return ffn


def fsdp_block(x, layer_params, state, *, config, ffn=None):
  """All experts, for the tokens of this device."""
  tokens = _tokens_of(x)
  expert_ids, weights = moe.route(tokens, layer_params["router"], config)
  row_choices, choice_rows, group_sizes = moe.sort_rows(expert_ids, 0, config.num_experts)
  experts = moe.gather_experts(layer_params["experts"], config)
  args = (tokens, row_choices, choice_rows, weights, group_sizes, experts)
  out, state = _run(ffn, moe.ffn_of(config), state, group_sizes, args)
  return out.reshape(x.shape), state, group_sizes


def dense_block(x, layer_params, state, *, config, ffn=None):
  """Each of this device's experts on every token: dense_fsdp where it has all, else dense_ep."""
  tokens = lax.all_gather(_tokens_of(x), config.expert_axis, tiled=True)
  expert_ids, weights = moe.route(tokens, layer_params["router"], config)
  first, local = _local_experts(config)
  is_chosen = expert_ids[..., None] == first + jnp.arange(local)  # [tokens, top_k, local]
  weights = jnp.sum(jnp.where(is_chosen, weights[..., None], 0), axis=1)
  experts = moe.gather_experts(layer_params["experts"], config)
  every_token = jnp.full(local, len(tokens), jnp.int32)
  args = (tokens, weights, experts)
  out, state = _run(ffn, dense_ffn_of(config), state, every_token, args)
  out = lax.psum_scatter(out, config.expert_axis, tiled=True)
  return out.reshape(x.shape), state, jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.int32)


def dense_ffn_of(config):
  """Returns `dense_ffn`."""
  _check_order_of_weights(config)
  return dense_ffn


def dense_ffn(tokens, weights, experts):
  """Every expert on every token. What is named has a row for each pair, sorted by expert.

  Args:
    tokens: [num_tokens, width].
    weights: float32[num_tokens, local_experts], zero for experts that the token did not choose.
    experts: the experts' parameters.

  Returns:
    [num_tokens, width], the weighted sum of the experts' outputs for each token.
  """

  def named(rows, name):  # [local_experts, num_tokens, features]
    return checkpoint_name(rows.reshape(-1, rows.shape[-1]), name).reshape(rows.shape)

  gate = named(jnp.einsum("nw,ewh->enh", tokens, experts["wi_0"]), "mlpwi_0")
  up = named(jnp.einsum("nw,ewh->enh", tokens, experts["wi_1"]), "mlpwi_1")
  out = named(jnp.einsum("enh,ehw->enw", jax.nn.silu(gate) * up, experts["wo"]), "mlpwo")
  return jnp.einsum("enw,ne->nw", out, weights).astype(tokens.dtype)


def _tokens_of(x):
  return x.reshape(-1, x.shape[-1])


def _local_experts(config):
  """Returns the first expert of this device, int32[], and how many it holds."""
  local = config.num_experts // lax.axis_size(config.expert_axis)
  return lax.axis_index(config.expert_axis) * local, local


def _check_order_of_weights(config):
  if config.weights_before_down_projection:
    raise ValueError("weights_before_down_projection=True is for the modes ring and fsdp alone.")


def _run(ffn, default, state, group_sizes, args):
  return (default(*args), state) if ffn is None else ffn(state, group_sizes, *args)


def _rows_of_choices(num_tokens, devices, config):
  return devices * num_tokens * min(config.top_k, config.num_experts // devices)


def _rows_of_pairs(num_tokens, devices, config):
  return num_tokens * config.num_experts  # Of all devices' tokens with a part of the experts.


MODES = {
  "ring": Mode(ring_block, ring_ffn_of, _rows_of_choices, True),
  "all_to_all": Mode(all_to_all_block, all_to_all_ffn_of, _rows_of_choices, True, True),
  "fsdp": Mode(fsdp_block, moe.ffn_of, _rows_of_choices, False),
  "dense_fsdp": Mode(dense_block, dense_ffn_of, _rows_of_pairs, False),
  "dense_ep": Mode(dense_block, dense_ffn_of, _rows_of_pairs, True),
}
