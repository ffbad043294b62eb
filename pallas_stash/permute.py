"""Rows to expert order and back, keeping indices only.

`sort_rows` makes a `Permutation` of the experts that tokens chose: integers. `to_experts` gathers
the rows of each expert by it, and `to_tokens` sums them for each token. One is the gradient of the
other: it gathers too, and keeps no row. Only the gradient of weights in `to_tokens` needs rows.
`gather_rows` takes any index, and its gradient adds up.

Padding is every row whose index leads nowhere. Of a `Permutation` it is behind the rows of each
group, up to the next multiple of the alignment, and behind all groups. Of `gather_rows` it is each
row whose index is not one of `x`, and the tail: behind `n` rows, as many as make `n` a multiple of
`pad_to_multiple`, none if it is one.

- What is returned is zero in padding: every bit is.
- What is given, rows or cotangents, may hold anything there, NaN included. Nothing depends on it,
  and the gradient of it is zero.

Rows are copied bit for bit. Sums, in gradients too, are of float32 where rows are narrower, and
rounded once, in the end. All is differentiable in reverse mode, any number of times.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_stash import gathers
from pallas_stash.arguments import (
  as_array,
  as_integer,
  check_integers,
  check_type,
  positive_int,
)
from pallas_stash.kernels.tiling import round_up
from pallas_stash.ragged import as_int32, RaggedRows
from pallas_stash.varying import refuse_sharded, vary_alike

__all__ = ["sort_rows", "Permutation", "to_experts", "to_tokens", "row_weights", "gather_rows"]


class Permutation(NamedTuple):
  """Which choice each row of a worst-case buffer is of, and where the row of each choice is.

  A choice is an expert of a token, numbered `token * top_k` plus its column. Properties are
  `group_sizes`, the rows of each expert, and `group_starts`, multiples of the alignment.

  Attributes:
    row_choices: int32[total_rows], the choice that each row is of, ascending in each group;
      `tokens * top_k` in padding.
    choice_rows: int32[tokens, top_k], the row of each choice; `total_rows` if its expert is not
      here, and -1 if there is no room for it (see `distinct` of `sort_rows`).
    padded_group_sizes: int32[local_experts], the rows from the start of each group to the next: for
      a grouped matmul that wants multiples of the alignment. Of a group without rows, none.
    ragged: `RaggedRows`, for a stash: where the rows of each group are, without padding.
  """

  row_choices: jax.Array
  choice_rows: jax.Array
  padded_group_sizes: jax.Array
  ragged: RaggedRows

  @property
  def group_sizes(self) -> jax.Array:
    return self.ragged.group_sizes

  @property
  def group_starts(self) -> jax.Array:
    return _starts(self.padded_group_sizes)


def sort_rows(
  expert_ids: jax.Array,
  local_experts: int,
  *,
  first_expert: Any = 0,
  align_groups_to: int = 1,
  distinct: bool = True,
) -> Permutation:
  """Sorts what the tokens chose by the experts of one device.

  Args:
    expert_ids: int[tokens, top_k]. Those of experts that are not here, or of none, have no row.
    local_experts: static int, the experts of this device.
    first_expert: int[], the first of them.
    align_groups_to: static int; each group starts at a multiple of it, with padding in between.
    distinct: static, whether a token chooses an expert at most once, as by `lax.top_k`, so that it
      has at most `local_experts` rows. If that is not so, and rows do not fit, `to_tokens` gives
      NaN for their tokens, and a stash takes the groups for invalid.

  Returns:
    A `Permutation`. Its `total_rows` is static, a multiple of `align_groups_to`, one at least: the
    most that `tokens * min(top_k, local_experts)` rows, or `tokens * top_k` if not `distinct`, need
    in groups that are aligned.

  Raises:
    ValueError: for what is no array of integers, another rank than 2, no columns, numbers that are
      not static or not positive, and rows that int32 does not number.
  """
  expert_ids = _as_indices("expert_ids", expert_ids, "tokens", "top_k")
  first_expert = as_int32(as_integer("first_expert", first_expert))
  groups = positive_int("local_experts", local_experts)
  alignment = positive_int("align_groups_to", align_groups_to)
  check_type("distinct", distinct, bool, "True or False")
  tokens, top_k = expert_ids.shape
  choices = tokens * top_k
  if not top_k:
    raise ValueError(f"expert_ids of shape {expert_ids.shape} must have a column for each choice.")
  if choices + groups * alignment >= 2**31:
    raise ValueError(
      f"expert_ids of shape {expert_ids.shape}, and {local_experts=} times {align_groups_to=}, must"
      " sum to less than 2**31: row numbers are int32."
    )
  total_rows = _aligned_rows(
    tokens * min(top_k, groups) if distinct else choices, groups, alignment
  )

  group = (expert_ids - first_expert).reshape(-1)
  group = jnp.where((group >= 0) & (group < groups), group, groups)
  each = jnp.arange(groups, dtype=jnp.int32)
  group_sizes = jnp.sum(group[:, None] == each, axis=0, dtype=jnp.int32)
  padded_group_sizes = round_up(group_sizes, alignment)
  # What fills a group up is sorted with the choices, and comes behind those of its group.
  is_filler = jnp.arange(alignment) < (padded_group_sizes - group_sizes)[:, None]
  fillers = jnp.where(is_filler, each[:, None], groups).reshape(-1)
  order = jnp.argsort(jnp.concatenate([group, fillers]), stable=True).astype(jnp.int32)

  in_groups = jnp.arange(total_rows) < jnp.sum(padded_group_sizes, dtype=jnp.int32)
  row_choices = jnp.where(in_groups, jnp.minimum(order[:total_rows], choices), choices)
  rows = jnp.argsort(order)[:choices].astype(jnp.int32)
  rows = jnp.where(rows < total_rows, rows, -1)
  choice_rows = jnp.where(group < groups, rows, total_rows).reshape(tokens, top_k)
  # Without starts, groups are known to be tight: one run of rows for a stash to copy.
  starts = None if alignment == 1 else _starts(padded_group_sizes)
  ragged = RaggedRows(group_sizes, total_rows, starts)
  return Permutation(row_choices, choice_rows, padded_group_sizes, ragged)


def to_experts(x: jax.Array, permutation: Permutation) -> jax.Array:
  """Gathers the row of its token for each row of the experts.

  The gradient of a token is the sum of the cotangents of its rows: that of `to_tokens`, no scatter.

  Args:
    x: [tokens, ...].
    permutation: of `sort_rows`.

  Returns:
    [total_rows, ...] of the dtype of `x`, zero in padding.
  """
  indices = _indices(permutation)
  x = _as_rows("x", x, indices[1].shape[:1])
  return gathers.spread(*vary_alike(x, *indices))


def to_tokens(
  rows: jax.Array, permutation: Permutation, weights: jax.Array | None = None
) -> jax.Array:
  """Sums the rows of each token, by their weights.

  With weights, `rows` are kept for their gradient. To keep none, multiply by `row_weights` where
  rows are narrow, before the down projection, and sum without.

  Args:
    rows: [total_rows, ...], of a floating-point dtype.
    permutation: of `sort_rows`.
    weights: [tokens, top_k], of any floating-point dtype. None: all are 1.

  Returns:
    [tokens, ...] of the dtype of `rows`; zero for a token none of whose experts is here.
  """
  row_choices, choice_rows = _indices(permutation)
  rows = _as_floats("rows", _as_rows("rows", rows, row_choices.shape))
  if weights is not None:
    weights = _as_weights(weights, choice_rows)
  return gathers.total(*vary_alike(rows, weights, row_choices, choice_rows))


def row_weights(weights: jax.Array, permutation: Permutation) -> jax.Array:
  """Gathers the weight of its choice for each row of the experts.

  Args:
    weights: [tokens, top_k].
    permutation: of `sort_rows`.

  Returns:
    [total_rows] of the dtype of `weights`, zero in padding.
  """
  row_choices, choice_rows = _indices(permutation)
  weights = _as_weights(weights, choice_rows).reshape(-1)
  return gathers.spread(*vary_alike(weights, row_choices, choice_rows.reshape(-1, 1)))


def gather_rows(x: jax.Array, index: jax.Array, *, pad_to_multiple: int = 1) -> jax.Array:
  """Gathers rows by an index, and pads them to a multiple; the gradient adds up.

  The gradient of a row is the sum of the cotangents of its copies: a scatter, for which cotangents
  that are narrower are converted to float32. `to_experts` needs neither. All that is kept is the
  index.

  Args:
    x: [rows, ...], of any dtype.
    index: int[n], the row of `x` for each row of the result. Negative ones do not count from the
      end: they are of padding.
    pad_to_multiple: static int.

  Returns:
    [m, ...] of the dtype of `x`, `m` being the least multiple of `pad_to_multiple` that is `n` or
    more; zero in padding, from row `n` on too.

  Raises:
    ValueError: for a scalar `x`, an index that is no array of integers or of another rank than 1,
      and a `pad_to_multiple` that is not static or not positive.
  """
  x, index = _as_rows("x", x), _as_indices("index", index, "n")
  tail = -index.shape[0] % positive_int("pad_to_multiple", pad_to_multiple)
  index = jnp.pad(index, (0, tail), constant_values=-1)
  return gathers.gather(x.shape[0], *vary_alike(x, index))


def _starts(sizes):
  return jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes


def _aligned_rows(rows, groups, alignment):
  """Returns the most rows of aligned groups: as many as can have one row past a multiple."""
  begun = min(rows, groups)
  return alignment * max(1, begun + (rows - begun) // alignment)


def _indices(permutation):
  check_type("permutation", permutation, Permutation, "a Permutation, of sort_rows")
  return permutation.row_choices, permutation.choice_rows


def _as_indices(name, value, *axes):
  array = as_array(name, value)
  check_integers(name, array, axes)
  refuse_sharded(**{name: array})
  return as_int32(array)


def _as_rows(name, value, rows=None):
  """Returns an array of `rows`, (number,), along its first axis; None: of any number."""
  array = as_array(name, value)
  if not array.ndim or array.shape[:1] != (rows or array.shape[:1]):
    what = "rows" if rows is None else f"{rows[0]} rows, as permutation has it"
    raise ValueError(f"{name} of shape {array.shape} must have {what}.")
  refuse_sharded(**{name: array})
  return array


def _as_weights(weights, choice_rows):
  weights = _as_floats("weights", _as_rows("weights", weights))
  if weights.shape != choice_rows.shape:
    raise ValueError(f"{weights.shape=} must be {choice_rows.shape}: [tokens, top_k].")
  return weights


def _as_floats(name, array):
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(f"{name} of dtype {array.dtype} must have a floating-point dtype.")
  return array
