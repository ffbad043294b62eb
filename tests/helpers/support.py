"""What the tests that copy rows share: implementations, layouts, random bits to compare."""

import functools

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import long
from tests.helpers.dtypes import BY_NAME

ON_TPU = jax.default_backend() == "tpu"
IMPLEMENTATIONS = ("xla", "mosaic" if ON_TPU else "mosaic_interpret")
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "int32")
GROUPS = 8


def long_if_interpreted(*values):
  """Values of parameters, the kernels among them: to interpret takes long, to run on a TPU not."""
  return pytest.param(*values) if ON_TPU else long(*values)


# Rows in a group or a gap: none, one, and on both sides of the blocks that the kernels move.
SIZES = st.sampled_from([0, 0, 1, 1, 2, 7, 8, 9, 16, 31, 32, 33, 64]) | st.integers(0, 400)


@st.composite
def layouts(draw, total_rows):
  """Sizes and starts (None: a prefix) of `GROUPS` groups: a valid layout of one of four kinds."""
  kind = draw(st.sampled_from(["prefix", "run", "buckets", "any"]))
  room = total_rows

  def take():
    nonlocal room
    taken = min(draw(SIZES), room)
    room -= taken
    return taken

  if kind == "prefix":
    return [take() for _ in range(GROUPS)], None
  if kind == "run":
    start = take()
    return [take()] + [0] * (GROUPS - 1), [start] * GROUPS
  if kind == "buckets":
    capacity = total_rows // GROUPS
    sizes = [min(draw(SIZES), capacity) for _ in range(GROUPS)]
    return sizes, [group * capacity for group in range(GROUPS)]
  groups = [(total_rows - room + take(), take()) for _ in range(GROUPS)]
  starts, sizes = zip(*draw(st.permutations(groups)), strict=True)
  return list(sizes), list(starts)


def start_rows(stash_rows):
  """Stash rows to start at: on a tile boundary or anywhere, before the first, past the last."""
  tiles = st.integers(0, stash_rows // 32).map(lambda tile: 32 * tile)
  return tiles | st.integers(-40, stash_rows + 8)


def as_rows(rows):
  """Rows as an int32 array, to be traced; None stays None."""
  return None if rows is None else np.asarray(rows, np.int32)


def nan_of(dtype):
  """NaN with all its bits set, or -1 in an integer dtype."""
  return np.full(jnp.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)[0]


def random_bits(rng, shape, dtype):
  """An array of random bits: every value, infinities, NaNs of every payload."""
  dtype = jnp.dtype(dtype)
  values = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  return (values & _bits_that_count(dtype)).view(dtype)[..., 0]


def _bits_that_count(dtype):
  """A mask of the bits of a byte that count, where arrays on the host are in bytes."""
  return np.uint8((1 << min(8, BY_NAME[dtype.name].bits)) - 1)


def assert_same_bits(actual, expected, message=""):
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.dtype == expected.dtype
  itemsize = expected.dtype.itemsize

  def bits_of(array):
    array = np.ascontiguousarray(array)[..., None].view(f"uint{8 * min(itemsize, 8)}")
    return array & _bits_that_count(expected.dtype) if itemsize == 1 else array

  assert actual.shape == expected.shape
  np.testing.assert_array_equal(bits_of(actual), bits_of(expected), message)


def integers(seed, *shape):
  """Small integers as float32: their sums and products are exact."""
  return np.random.default_rng(seed).integers(-50, 50, shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames="implementation")
def update_rows(operand, update, start, sizes, starts, implementation="xla"):
  groups = {"group_sizes": sizes, "group_starts": starts, "implementation": implementation}
  return ps.dynamic_update_slice(operand, update, (start, 0), **groups)


@functools.partial(jax.jit, static_argnames=("total_rows", "implementation", "padding"))
def slice_rows(operand, start, sizes, starts, total_rows, implementation="xla", padding="zero"):
  options = {"group_sizes": sizes, "group_starts": starts, "implementation": implementation}
  options["padding"] = padding
  return ps.dynamic_slice(operand, (start, 0), (total_rows, operand.shape[1]), **options)
