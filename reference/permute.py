"""What sorting rows by experts means, in Python lists, and what it is for, in plain jnp."""

import jax.numpy as jnp
import numpy as np


def layout(expert_ids, first_expert, local_experts, alignment):
  """Lists the choices of each expert, one group behind the other.

  Args:
    expert_ids: int[tokens, top_k]; choices are numbered as they are when flat.
    first_expert: the first expert that is here.
    local_experts: how many are here.
    alignment: a group is filled up to a multiple of it.

  Returns:
    row_choices: the choice of each row, in a list; None in padding.
    group_sizes, group_starts: of each group, in lists.
  """
  row_choices, group_sizes, group_starts = [], [], []
  for expert in range(first_expert, first_expert + local_experts):
    choices = np.flatnonzero(expert_ids == expert).tolist()
    group_starts.append(len(row_choices))
    group_sizes.append(len(choices))
    row_choices += choices + [None] * (-len(choices) % alignment)
  return row_choices, group_sizes, group_starts


def scaled_sum(x, weights, scale, expert_ids):
  """Returns [tokens, width] of the dtype of `x`, what the experts make of it if each only scales.

  It is computed in float32 at least and rounded once.

  Args:
    x: [tokens, width].
    weights: [tokens, top_k], of each choice.
    scale: [experts, width], what each expert multiplies by.
    expert_ids: int[tokens, top_k]; -1 is of no expert.
  """
  x_, weights, scale = (
    a.astype(jnp.promote_types(a.dtype, "float32")) for a in (x, weights, scale)
  )
  scales = jnp.where((expert_ids >= 0)[..., None], scale[expert_ids], 0)
  return jnp.sum(x_[:, None] * scales * weights[..., None], axis=1).astype(x.dtype)
