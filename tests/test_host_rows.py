"""Rows between HBM and host memory: which go where, and the copies of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import host_tier
from pallas_stash.kernels import host
from tests.helpers.host_layers import HIDDEN, ragged_of, values_of
from tests.helpers.support import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_go_back_to_where_they_came_from(implementation):
  """By the kernels that move rows from the stage, and from a chunk, to gaps and in any order."""
  (value, _), ragged = values_of(0), ragged_of(5)
  first, last = 7, 33
  runs = jax.tree.map(np.asarray, ragged.runs_between(first, last, 0))
  sources = np.concatenate([s + np.arange(n) for s, _, n in zip(*runs, strict=True)])
  rows = np.full((40, 128), np.nan, value.dtype)
  rows[: last - first, :HIDDEN] = value[sources]
  blank = np.full_like(value, 5)
  expected = blank.copy()
  expected[sources] = value[sources]
  scatter = jax.jit(lambda *args: host.scatter(*args, implementation))
  np.testing.assert_array_equal(scatter(rows, blank, runs), expected)


@pytest.mark.once
@pytest.mark.parametrize("first, last", [(0, 1300), (7, 1289), (700, 701), (40, 40)])
def test_rows_of_several_chunks(first, last):
  """Behind each other in host memory, and back in their places, whatever is between groups."""
  sizes, starts = jnp.array([900, 0, 400], jnp.int32), jnp.array([500, 3, 20], jnp.int32)
  ragged = ps.RaggedRows(sizes, 1500, starts)
  rows = host.chunk_rows(128, 4)
  assert rows < 1300 / 2
  value = jax.random.normal(jax.random.key(0), (1500, HIDDEN))

  @jax.jit
  def there_and_back(first, last):
    stretch = host.Stretch(ragged, first, last, jnp.int32(64))
    buffer = host.fill(host.empty(2048, 128, jnp.float32), jnp.int32(0), 2048, jnp.nan)
    buffer = host.store_ragged(value, buffer, stretch, None)
    return host.load(buffer, jnp.int32(0), 2048), host.load_ragged(
      buffer, jnp.full_like(value, 5), stretch, None
    )

  there, back = map(np.asarray, there_and_back(jnp.int32(first), jnp.int32(last)))
  sources = np.concatenate([s + np.arange(n) for s, n in zip(starts, sizes, strict=True)])
  sources = sources[first:last]
  np.testing.assert_array_equal(there[64 : 64 + last - first, :HIDDEN], value[sources])
  end = 64 + -(-(last - first) // rows) * rows  # Whole chunks are stored.
  assert np.isnan(there[:64]).all() and np.isnan(there[end:]).all()
  expected = np.full_like(back, 5)
  expected[sources] = value[sources]
  np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("rows", range(0, 60, 4))
def test_a_split_wastes_nothing(rows):
  """What fits is known by what is free in both tiers together, and one part has a broken tile."""
  up = lambda count: -(-count // 8) * 8
  for staging in (0, 8, 16, 64):
    for device_free in (0, 8, 24, 64):
      for host_free in (0, 8, 16, 64):
        split = host_tier.split_rows(jnp.int32(rows), staging, device_free, host_free)
        head, device, spilled = map(int, split)
        assert head + device + spilled == rows and min(head, device, spilled) >= 0
        fits = spilled <= host_free - head
        assert fits == (rows <= device_free + host_free)
        if fits:
          assert up(head + spilled) + up(device) == up(rows)
          assert head <= staging and device <= device_free
          assert not spilled or head == min(staging, host_free)
