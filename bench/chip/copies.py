"""The steps of `bench.chip` that copy rows and compare their bits with the reference."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from reference import ragged_rows

# Of all layouts, so that they are one program: several tiles for each of two cores.
ROWS, GROUPS = 2560, 32

# The reference.
compact = jax.jit(ragged_rows.compact)
expand = jax.jit(ragged_rows.expand, static_argnums=2)


def update(operand, rows, start, sizes, starts, *, implementation):
  groups = {"group_sizes": sizes, "group_starts": starts, "implementation": implementation}
  return ps.dynamic_update_slice(operand, rows, (start, 0), **groups)


def slice_(operand, start, sizes, starts, *, total_rows, implementation, padding="zero"):
  groups = {"group_sizes": sizes, "group_starts": starts, "implementation": implementation}
  shape = total_rows, operand.shape[1]
  return ps.dynamic_slice(operand, (start, 0), shape, padding=padding, **groups)


def random_bits(rng, shape, dtype):
  dtype = jnp.dtype(dtype)
  return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def assert_same_bits(actual, expected, what):
  actual, expected = np.asarray(actual), np.asarray(expected)
  bits = np.dtype(f"uint{8 * expected.dtype.itemsize}")
  is_other = (actual.view(bits) != expected.view(bits)).any(axis=1)
  if is_other.any():
    rows = np.flatnonzero(is_other)
    raise AssertionError(f"{what}: {rows.size} rows differ, the first are {rows[:8].tolist()}")


@functools.cache
def jitted(implementation, padding):
  """Returns the functions that write and read rows."""
  options = {"implementation": implementation}
  read = functools.partial(slice_, total_rows=ROWS, padding=padding, **options)
  return jax.jit(functools.partial(update, **options)), jax.jit(read)


def check_copies(scale, dtype, layouts, padding="zero", less=(0, 0)):
  """Writes and reads rows of random bits in every layout, and compares with the reference.

  The stash has so many rows, and all rows so many columns, `less` than whole HBM tiles.
  """
  write, read = jitted(scale.implementation, padding)
  rng = np.random.default_rng(0)
  bits = lambda rows: random_bits(rng, (rows, scale.width - less[1]), dtype)
  for start, sizes, starts in layouts:
    padded = [np.pad(np.array(x, np.int32), (0, GROUPS - len(x))) for x in (sizes, starts)]
    rows, stash = bits(ROWS), bits(ROWS - less[0])
    groups = np.int32(start), *padded
    what = f"{dtype} {start=} {sizes=} {starts=}"
    expected = compact(rows, stash, *groups)
    assert_same_bits(write(stash, rows, *groups), expected, f"compact {what}")
    is_row = np.asarray(expand(np.ones((ROWS, 1)), groups[0], ROWS, *padded)) == 1
    actual = np.asarray(read(expected, *groups))
    expected = np.asarray(expand(expected, groups[0], ROWS, *padded))
    there = is_row[:, 0] if padding == "undefined" else slice(None)
    assert_same_bits(actual[there], expected[there], f"expand {what}")


def bits(scale):
  layouts = [
    (8, [64, 0, 32], [0, 64, 128]),
    (0, [200], [0]),
    (5, [187], [13]),
    (33, [1, 2, 9, 40], [31, 90, 7, 110]),
    (ROWS - 20, [50], [3]),
  ]
  for dtype in scale.dtypes:
    check_copies(scale, dtype, layouts)
    check_copies(scale, dtype, layouts[2:], less=(5, 28))
  return f"{len(layouts)} layouts of {', '.join(scale.dtypes)}"


def order(scale):
  """Groups of a few rows each: every register is merged from several loads and stores."""
  rng = np.random.default_rng(1)
  layouts = []
  for _ in range(scale.rounds):
    sizes = rng.integers(1, 24, GROUPS)
    starts = np.cumsum(sizes + rng.integers(0, 3, GROUPS)) - sizes
    layouts.append((int(rng.integers(0, 40)), sizes.tolist(), starts.tolist()))
  for dtype in scale.dtypes:
    check_copies(scale, dtype, layouts)
    check_copies(scale, dtype, layouts[:2], padding="undefined")
  return f"{scale.rounds} layouts of {GROUPS} small groups, of {len(scale.dtypes)} dtypes"


def cores(scale):
  """Windows of every length around that of a tile: the halves of two cores meet anywhere."""
  lengths = [512, 513, 1023, 1024, 1025, 1536, 2048, 2047][: 4 * scale.rounds]
  layouts = [(start, [rows], [3]) for rows in lengths for start in (0, 7)]
  for dtype in scale.dtypes[:2]:
    check_copies(scale, dtype, layouts)
  return f"{len(layouts)} windows of up to {max(lengths)} rows"


def bounds(scale):
  with ps.debug():
    return bits(dataclasses.replace(scale, dtypes=scale.dtypes[:2]))


def many_calls(scale):
  """A semaphore that is not zero behind a kernel, or a lost store, shows in one of many calls."""
  total_rows, calls = 256, 50 * scale.rounds
  options = {"implementation": scale.implementation}

  def step(carry, i):
    stash, rows = carry
    groups = i % 37, jnp.array([60, 31]) + i % 3, jnp.array([100, 1]) + i % 5
    stash = update(stash, rows, *groups, **options)
    again = slice_(stash, *groups, total_rows=total_rows, **options)
    # Bits are turned around, so that a call that did nothing does not look right.
    return (stash, jnp.where(again == 0, rows, ~again)), None

  @jax.jit
  def run(stash, rows):
    return lax.scan(step, (stash, rows), jnp.arange(calls))[0]

  rng = np.random.default_rng(2)
  stash, rows = (random_bits(rng, (n, scale.width), "int32") for n in (320, total_rows))
  actual = run(stash, rows)
  for i in range(calls):
    start, *groups = i % 37, np.array([60, 31]) + i % 3, np.array([100, 1]) + i % 5
    stash = compact(rows, stash, start, *groups)
    again = np.asarray(expand(stash, start, total_rows, *groups))
    rows = np.where(again == 0, rows, ~again)
  for found, right in zip(actual, (stash, rows), strict=True):
    assert_same_bits(found, right, f"after {calls} calls")
  return f"{2 * calls} kernels in one program"
