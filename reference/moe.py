"""A ring-of-experts mixture-of-experts (MoE) layer in plain JAX.

Each of the `ep` devices of the expert axis holds `num_experts // ep` experts. It gathers the tokens
of all devices, sorts those that chose its experts into a worst-case buffer, applies the experts,
and sends the weighted sums back. No token is dropped.

The layer's parameters are a pytree. Each device holds its own experts; with `config.fsdp_axis`
between uses only a part of each, of the axis behind the experts':

  router: [width, num_experts]
  experts: {"wi_0": [local_experts, width, hidden], "wi_1": [local_experts, width, hidden],
            "wo": [local_experts, hidden, width]}
"""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def param_specs(config):
  """How the layer's parameters are sharded, as a pytree prefix of `PartitionSpec`s."""
  experts = PartitionSpec(config.expert_axis, config.fsdp_axis)
  return {"router": PartitionSpec(), "experts": experts}


def expert_ffn(
  tokens,
  row_choices,
  choice_rows,
  weights,
  group_sizes,
  experts,
  *,
  grouped_matmul,
  weights_before_down_projection=False,
  **options,
):
  """The experts of one device, applied to the rows routed to them.

  Rows from `sum(group_sizes)` on are padding. What padding holds, in the arguments, in what
  `grouped_matmul` returns and in the cotangent of its `lhs`, does not matter, NaN included: it is
  deselected wherever it enters, never multiplied by zero. What the backward pass needs is named
  for checkpoint policies, as `expert_mlp` says.

  Args:
    tokens: [num_tokens, width].
    row_choices: int32[total_rows], the choice that each row is of, counted as `weights` has them
      when flat; each once. The rows are in the order of their experts.
    choice_rows: int32[num_tokens, top_k], the row of each choice; in the padding or behind it for
      choices of other devices' experts.
    weights: float32[num_tokens, top_k], the weight of each choice in the sum for its token.
    group_sizes: int32[local_experts], the rows of each expert.
    experts: the experts' parameters.
    grouped_matmul: `(lhs [total_rows, k], rhs [local_experts, k, n], group_sizes) -> [total_rows,
      n]`, each group of rows times its own matrix.
    weights_before_down_projection: whether the hidden rows are multiplied by their weights, rather
      than what is made of them. The result is the same to rounding. The backward pass then needs no
      "mlpwo": the gradient of the weight of a row is the sum over its hidden features.
    **options: of `expert_mlp`.

  Returns:
    [num_tokens, width], the weighted sum of the experts' outputs for each token.
  """
  rows, row_weights = rows_of(tokens, row_choices, weights), None
  if weights_before_down_projection:
    row_weights = row_weights_of(weights, row_choices)
    weights = jnp.ones_like(weights)
  options["grouped_matmul"] = grouped_matmul
  out = expert_mlp(rows, group_sizes, experts, row_weights, **options)
  return sum_of_choices(out, choice_rows, weights, tokens.dtype)


def expert_ffn_shapes(config, num_tokens, local_experts):
  """Returns the shape of each argument of `expert_ffn`, as `moe_block` calls it.

  Args:
    config: a `model.Config`.
    num_tokens: of all devices of the ring together.
    local_experts: the experts of a device.
  """
  struct, width, hidden = jax.ShapeDtypeStruct, config.width, config.hidden
  rows, choices = num_tokens * min(config.top_k, local_experts), (num_tokens, config.top_k)
  shapes = {"wi_0": (width, hidden), "wi_1": (width, hidden), "wo": (hidden, width)}
  return (
    struct((num_tokens, width), config.dtype),
    struct((rows,), jnp.int32),
    struct(choices, jnp.int32),
    struct(choices, jnp.float32),
    struct((local_experts,), jnp.int32),
    {name: struct((local_experts, *shape), config.dtype) for name, shape in shapes.items()},
  )


def expert_mlp(
  rows,
  group_sizes,
  experts,
  row_weights=None,
  *,
  grouped_matmul,
  is_fused=False,
  prefix="",
):
  """The gated MLP of each expert, applied to its rows.

  The results of the grouped matmuls that the backward pass needs are named "mlpwi_0", "mlpwi_1" and
  "mlpwo"; those of a trainer whose dense layers have these names already have a prefix.

  Args:
    rows: [total_rows, width], sorted by expert; then padding, which may hold anything.
    group_sizes, experts, grouped_matmul: as of `expert_ffn`.
    row_weights: float32[total_rows], what to multiply the hidden rows with; None for nothing.
    is_fused: whether one grouped matmul makes the first two, side by side, "mlpwi".
    prefix: of the names, such as "moe_"; with one the rows, too, have a name, "x_sorted" behind it.

  Returns:
    [total_rows, width], zero in padding.
  """
  live = (jnp.arange(rows.shape[0]) < jnp.sum(group_sizes))[:, None]

  def mask(rows):
    return jnp.where(live, rows, 0)

  def project(rows, weights):
    return grouped_matmul(rows, weights, group_sizes)

  def hidden_of(rows, weights, name):
    return mask(checkpoint_name(project(rows, weights), f"{prefix}mlp{name}"))

  rows = mask(rows)
  if prefix:
    rows = checkpoint_name(rows, f"{prefix}x_sorted")
  if is_fused:
    both = jnp.concatenate([experts["wi_0"], experts["wi_1"]], axis=-1)
    gate, up = jnp.split(hidden_of(rows, both, "wi"), 2, axis=-1)
  else:
    gate, up = (hidden_of(rows, experts[name], name) for name in ("wi_0", "wi_1"))
  hidden = jax.nn.silu(gate) * up
  if row_weights is None:
    return hidden_of(hidden, experts["wo"], "wo")
  # Masked for the cotangent's sake, of which the gradient of the weights is a sum.
  return mask(project(mask((hidden * row_weights[:, None]).astype(hidden.dtype)), experts["wo"]))


def rows_of(tokens, row_choices, weights):
  """Returns [total_rows, width], the token of each row; of padding, any."""
  return tokens.at[row_choices // weights.shape[1]].get(mode="promise_in_bounds")


def row_weights_of(weights, row_choices):
  """Returns float32[total_rows], the weight of each row; of padding, any."""
  # Each choice has one row: the gradient need not sort them.
  options = {"mode": "promise_in_bounds", "unique_indices": True}
  return weights.reshape(-1).at[row_choices].get(**options)


def sum_of_choices(out, choice_rows, weights, dtype):
  """Returns [num_tokens, width] of a dtype, the sum of the rows of each token by their weights.

  Args:
    out: [total_rows, width], zero in padding.
    choice_rows, weights: as of `expert_ffn`.
    dtype: of the result.
  """
  # What is not here weighs nothing: were it filled by the gather, the gradient would leave it to a
  # scatter to drop rows.
  is_row = choice_rows < out.shape[0]
  weights = jnp.where(is_row, weights, 0)
  chosen = out.at[jnp.where(is_row, choice_rows, 0)].get(mode="promise_in_bounds")
  return jnp.sum(chosen * weights[:, :, None], axis=1).astype(dtype)


def ffn_of(config):
  """Returns `expert_ffn` with the options of a `model.Config`."""
  return functools.partial(
    expert_ffn,
    grouped_matmul=config.grouped_matmul,
    weights_before_down_projection=config.weights_before_down_projection,
  )


def route(x, router, config):
  """Chooses `top_k` experts for each token.

  Args:
    x: [tokens, width].
    router: [width, num_experts].
    config: a `model.Config`.

  Returns:
    expert_ids: int32[tokens, top_k], distinct for each token.
    weights: float32[tokens, top_k], the softmax over all experts, renormalised over the chosen.
  """
  logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
  weights, expert_ids = lax.top_k(jax.nn.softmax(logits), config.top_k)
  return expert_ids, weights / jnp.sum(weights, axis=-1, keepdims=True)


def sort_rows(expert_ids, first_expert, local_experts):
  """Sorts what the tokens chose by the experts of one device.

  Choices of other devices' experts come last: they fill the padding, with real tokens.

  Args:
    expert_ids: int32[tokens, top_k], distinct for each token.
    first_expert: int32 scalar, the first expert of the device.
    local_experts: a Python integer, how many experts the device holds from there on.

  Returns:
    row_choices: int32[total_rows], the choice that each row is of, `token * top_k + its number`;
      `total_rows` is `tokens * min(top_k, local_experts)`.
    choice_rows: int32[tokens, top_k], the row of each choice, past `total_rows` for some of other
      devices' experts.
    group_sizes: int32[local_experts].
  """
  num_tokens, top_k = expert_ids.shape
  total_rows = num_tokens * min(top_k, local_experts)
  group = (expert_ids - first_expert).reshape(-1)
  group = jnp.where((0 <= group) & (group < local_experts), group, local_experts)
  order = jnp.argsort(group, stable=True)
  choice_rows = jnp.argsort(order).reshape(num_tokens, top_k)
  group_sizes = jnp.sum(group[:, None] == jnp.arange(local_experts), axis=0, dtype=jnp.int32)
  return order[:total_rows], choice_rows, group_sizes


def gather_experts(experts, config):
  """Returns whole parameters of this device's experts, from the parts along `config.fsdp_axis`."""
  if config.fsdp_axis is None:
    return experts
  gather = functools.partial(lax.all_gather, axis_name=config.fsdp_axis, axis=1, tiled=True)
  return jax.tree.map(gather, experts)


def moe_block(x, layer_params, state, *, config, ffn=None):
  """The layer on one device. Call it inside a `shard_map` over the axes that `config` names.

  Args:
    x: [..., width], this device's tokens.
    layer_params: this device's parameters of the layer.
    state: any pytree, passed through `ffn`.
    config: a `model.Config`.
    ffn: `(state, group_sizes, *args) -> (out, state)`, `args` being the positional arguments of
      `expert_ffn`. By default `ffn_of(config)`, and `state` is left alone.

  Returns:
    y: [..., width].
    state: as `ffn` returned it.
    group_sizes: int32[local_experts], the rows that this device's experts received.
  """
  local_experts = config.num_experts // lax.axis_size(config.expert_axis)
  first_expert = lax.axis_index(config.expert_axis) * local_experts
  tokens = x.reshape(-1, x.shape[-1])
  gathered = lax.all_gather(tokens, config.expert_axis, tiled=True)
  expert_ids, weights = route(gathered, layer_params["router"], config)
  row_choices, choice_rows, group_sizes = sort_rows(expert_ids, first_expert, local_experts)
  experts = gather_experts(layer_params["experts"], config)
  args = (gathered, row_choices, choice_rows, weights, group_sizes, experts)
  if ffn is None:
    out = ffn_of(config)(*args)
  else:
    out, state = ffn(state, group_sizes, *args)
  out = lax.psum_scatter(out, config.expert_axis, tiled=True)
  return out.reshape(x.shape), state, group_sizes
