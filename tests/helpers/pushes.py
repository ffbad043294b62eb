"""What the tests push outside autodiff: rows of three residuals, and what must come back."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps

TOTAL_ROWS = 64
SPECS = [
  jax.ShapeDtypeStruct((128,), jnp.bfloat16),
  jax.ShapeDtypeStruct((3, 5), jnp.float32),
  jax.ShapeDtypeStruct((128,), jnp.float16),
]


push, restore, pop = map(jax.jit, (ps.Stash.push, ps.Stash.restore, ps.Stash.pop))


def values_of(specs, seed, ragged):
  """Returns random rows with NaN in padding, and the same with zero there."""
  rng = np.random.default_rng(seed)
  row = np.arange(ragged.total_rows)
  sizes = np.asarray(ragged.group_sizes)
  starts = np.cumsum(sizes) - sizes if ragged.group_starts is None else ragged.group_starts
  live = np.zeros(ragged.total_rows, bool)
  for start, size in zip(np.asarray(starts), sizes, strict=True):
    live |= (row >= start) & (row < start + size)
  poisoned, expected = [], []
  for spec in specs:
    rows = rng.standard_normal((ragged.total_rows, *spec.shape)).astype(spec.dtype)
    mask = live.reshape(-1, *[1] * len(spec.shape))
    poisoned.append(np.where(mask, rows, np.nan).astype(spec.dtype))
    expected.append(np.where(mask, rows, 0).astype(spec.dtype))
  return poisoned, expected


def ragged_of(sizes, starts=None, total_rows=TOTAL_ROWS):
  starts = None if starts is None else jnp.array(starts, jnp.int32)
  return ps.RaggedRows(jnp.array(sizes, jnp.int32), total_rows, starts)


def stats_of(stash):
  return [int(x[0]) for x in stash.stats()[:4]]
