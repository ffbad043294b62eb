"""A layer whose experts scale rows, by `permute`: with NaN in padding, wherever it may be.

Values are small integers: sums and products are exact, and compared in every bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_stash import permute


def choose(tokens, top_k, experts, to_one=False):
  """Returns int32[tokens, top_k], distinct experts of each token; or the last one, and no other."""
  order = np.argsort(np.random.default_rng(0).random((tokens, experts)), axis=1)
  if to_one:
    order[:], order[:, 0] = -1, experts - 1
  return order[:, :top_k].astype(np.int32)


@jax.custom_vjp
def poison(rows, live):
  """NaN in padding, in the rows and in their cotangents."""
  return jnp.where(live[:, None], rows, jnp.nan)


poison.defvjp(lambda *args: (poison(*args), args[1]), lambda live, d: (poison(d, live), None))


def experts_of(x, weights, scale, ids, alignment=1, before=False, first=0):
  """Each expert multiplies by its scale. Padding is poisoned on the way there and back."""
  p = permute.sort_rows(ids, scale.shape[0], align_groups_to=alignment, first_expert=first)
  live = p.row_choices < ids.size
  row, group_ends = jnp.arange(len(live)), p.group_starts + p.padded_group_sizes
  expert = jnp.sum(row[:, None] >= group_ends, axis=1)
  rows = poison(permute.to_experts(x, p), live)
  if before:
    rows = poison(rows * permute.row_weights(weights, p)[:, None].astype(rows.dtype), live)
  # Jax gathers scales and adds their gradients up: those of padding, by a mask.
  scales = jnp.where(live[:, None], permute.gather_rows(scale, expert), 0)
  rows = poison(jnp.where(live[:, None], rows, 0) * scales, live)
  return permute.to_tokens(rows, p, None if before else weights)


def operands_of(tokens, width, experts, top_k=2, dtype="float32", to_one=False):
  rng = np.random.default_rng(1)
  ids = choose(tokens, min(top_k, experts), experts, to_one)
  draw = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), dtype)
  return draw(tokens, width), draw(*ids.shape), draw(experts, width), ids


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(fun, *operands):
  *differentiable, ids = operands
  out, vjp = jax.vjp(lambda *args: fun(*args, ids), *differentiable)
  cotangent = jnp.asarray(np.random.default_rng(2).integers(-2, 3, out.shape), out.dtype)
  return out, vjp(cotangent)
