"""Buffers past 2^31 elements and 2^31 bytes, row numbers near 2^31, byte counts past 2^63."""

import functools
import os
import types

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash import sizing
from tests.helpers import ragged_rows
from tests.helpers.checks import long, OPTIMIZED
from tests.helpers.sampling import run_sampled
from tests.helpers.stashes import with_rows_taken
from tests.helpers.support import assert_same_bits, IMPLEMENTATIONS, ON_TPU, slice_rows, update_rows

INT32 = 2**31
GIB = 2**30
struct = jax.ShapeDtypeStruct
optimized = functools.partial(jax.jit, compiler_options=OPTIMIZED)  # What passes over 2 GiB.


def free_bytes():
  if ON_TPU:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"]
  return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needs(gib):
  if free_bytes() < gib * GIB:
    pytest.skip(f"needs {gib} GiB of memory, {free_bytes() / GIB:.1f} are free")


# Copies that run. A buffer is donated, so there is one of it.

WIDTH, ROWS = 128, 96
SIZES, STARTS = np.array([33, 0, 5, 1]), np.array([40, 3, 20, 2])
BEHIND = 37  # Rows from the start to the end of the buffer: two rows of the groups fall past it.
XLA, MOSAIC = IMPLEMENTATIONS


@pytest.mark.parametrize(
  "dtype, elements, implementation, gib",
  [
    long("int8", INT32, XLA, 3),
    long("bfloat16", INT32 // 2, XLA, 3),
    long("int8", 2 * INT32, XLA, 6),
    long("float32", INT32, XLA, 10),
    long("int8", INT32, MOSAIC, 12),
  ],
)
def test_rows_near_the_end(dtype, elements, implementation, gib):
  """They are written and read where they are, and no other row changes."""
  needs(gib)
  total_rows = elements // WIDTH + ROWS
  groups = np.int32(total_rows - BEHIND), SIZES, STARTS
  assert int(groups[0]) * WIDTH > elements
  operand = optimized(lambda: jnp.zeros((total_rows, WIDTH), dtype))()
  rows = np.random.default_rng(0).integers(1, 120, (ROWS, WIDTH), np.uint8).astype(dtype)
  update = jax.jit(update_rows.__wrapped__, static_argnums=5, donate_argnums=0)
  operand = update(operand, rows, *groups, implementation)

  nothing = np.zeros((ROWS, WIDTH), dtype)
  expected = ragged_rows.compact(rows, nothing, ROWS - BEHIND, SIZES, STARTS)
  assert_same_bits(operand[total_rows - ROWS :], expected)
  assert not optimized(lambda operand: jnp.any(operand[: total_rows - ROWS] != 0))(operand)
  expected = ragged_rows.expand(expected, ROWS - BEHIND, ROWS, SIZES, STARTS)
  assert_same_bits(slice_rows(operand, *groups, ROWS, implementation), expected)


@pytest.mark.parametrize(
  "dtype, elements, gib, page_rows",
  [
    long("bfloat16", INT32 // 2, 3, None),
    long("bfloat16", INT32 // 2, 3, 32),
    long("float32", INT32, 10, None),
  ],
)
def test_a_stash_filled_to_its_end(dtype, elements, gib, page_rows):
  """What is pushed behind element or byte 2^31 comes back, and what does not fit is counted."""
  needs(gib)
  spec = struct((WIDTH,), jnp.dtype(dtype))
  capacity = elements // WIDTH + ROWS
  stash = ps.Stash.empty(capacity, [spec], page_rows=page_rows)
  stash = with_rows_taken(stash, capacity - 64)  # As behind pushes that filled the rest.
  ragged = ps.RaggedRows(SIZES, ROWS, STARTS)
  push = jax.jit(lambda stash, *args: stash.push(*args), donate_argnums=0)
  rows = np.random.default_rng(0).integers(-8, 8, (ROWS, WIDTH)).astype(spec.dtype)
  stash, slot = push(stash, [rows], ragged)
  (restored,) = jax.jit(lambda stash, *args: stash.restore(*args))(stash, slot, ragged)
  is_row = ragged_rows.expand(np.ones((ROWS, 1)), 0, ROWS, SIZES, STARTS) == 1
  assert_same_bits(restored, np.where(is_row, rows, 0).astype(spec.dtype))
  if page_rows is None:
    assert int(slot.start[0]) == capacity - 64 > elements // WIDTH
  else:
    held = np.flatnonzero(stash.allocator.holder == slot.start + 1)
    assert held.tolist() == [capacity // page_rows - 2, capacity // page_rows - 1]
  stash, slot = push(stash, [rows], ragged)
  assert not slot.is_stored() and int(stash.stats().overflowed_pushes[0]) == 1


# Programs for TPUs, whose memory is larger than this host's.


def check_program(chip, dtype, width, gib, total_rows):
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  itemsize = jnp.dtype(dtype).itemsize
  spec = struct((width,), dtype)
  capacity = gib * GIB // (width * itemsize) // 32 * 32
  assert capacity * width > INT32 and capacity < INT32
  stash = jax.eval_shape(functools.partial(ps.Stash.empty, capacity, [spec]))
  rows, groups = struct((total_rows, width), dtype), [struct((8,), jnp.int32)] * 2
  slot = ps.Slot(stash.top, stash.top)

  def push(stash, rows, sizes, starts):
    return stash.push([rows], ps.RaggedRows(sizes, total_rows, starts))

  def restore(stash, slot, sizes, starts):
    return stash.restore(slot, ps.RaggedRows(sizes, total_rows, starts))

  mesh = aot.mesh(chip)
  pushed = aot.compile(push, *aot.place((stash, rows, *groups), mesh), donate_argnums=0)
  restored = aot.compile(restore, *aot.place((stash, slot, *groups), mesh))
  for program in pushed, restored:
    assert program.kernels().total() >= 1
    assert program.copies(*stash.buffers) == []
    assert program.memory.temp_size_in_bytes < 2**20


# The smallest and the largest rows; the last with 2^31 elements and more in the worst case too.
@pytest.mark.parametrize(
  "chip, dtype, width, gib, total_rows",
  [
    ("v5p", "float8_e4m3fn", 128, 90, 2**15),
    ("tpu7x", "bfloat16", 7168, 80, 2**19),
    long("v6e", "float32", 32 * 1024, 28, 2**13),
    long("v5e", "float8_e5m2", 7168, 14, 2**16),
    long("v5p", "float32", 7168, 60, 2**20),
    long("v5p", "bfloat16", 256, 90, 2**16),
  ],
)
def test_programs(chip, dtype, width, gib, total_rows):
  check_program(chip, dtype, width, gib, total_rows)


def test_a_global_stash_of_more_rows_than_an_int32_counts():
  """Each of 2048 devices numbers its own rows."""
  devices, rows, spec = 2048, 64, struct((WIDTH,), jnp.bfloat16)
  sharding = NamedSharding(AbstractMesh((devices,), ("expert",)), P("expert"))
  stash = jax.eval_shape(functools.partial(ps.Stash.empty, 3_801_088, [spec], devices))
  assert stash.buffers[0].shape[0] > INT32
  args = stash, struct((devices * rows, WIDTH), jnp.bfloat16), struct((devices,), jnp.int32)
  place = lambda leaf: struct(leaf.shape, leaf.dtype, sharding=sharding)

  @functools.partial(jax.shard_map, mesh=sharding.mesh, in_specs=P("expert"), out_specs=P("expert"))
  def round_trip(stash, values, sizes):
    ragged = ps.RaggedRows(sizes, rows)
    stash, slot = stash.push([values], ragged)
    return stash, stash.restore(slot, ragged)

  traced = jax.jit(round_trip).trace(*jax.tree.map(place, args))
  assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


# Row numbers and bytes, as arithmetic alone.

MOST = INT32 - 1


@st.composite
def far_layouts(draw):
  """total_rows, stash_rows, start, sizes and starts (or None), with large and small numbers."""
  total_rows = draw(st.sampled_from([MOST - 1, 2**30, 2**20, 3]))
  stash_rows = draw(st.sampled_from([MOST - total_rows, 2**30 - 8, 5]))
  stash_rows = min(stash_rows, MOST - total_rows)
  cuts = draw(st.lists(st.integers(0, total_rows) | st.integers(0, 9), min_size=8, max_size=8))
  cuts = sorted(min(cut, total_rows) for cut in cuts)
  sizes = [last - first for first, last in zip(cuts[::2], cuts[1::2], strict=True)]
  starts = cuts[::2] if draw(st.booleans()) else None
  near = st.sampled_from([0, stash_rows, -total_rows, MOST, -INT32, stash_rows - sum(sizes)])
  start = draw(near) + draw(st.integers(-9, 9))
  return total_rows, stash_rows, min(max(start, -INT32), MOST), sizes, starts


def occupied(runs):
  """Returns (source, destination, size) of each run that is not empty."""
  found = zip(*(field.tolist() for field in map(np.asarray, runs)), strict=True)
  return [run for run in found if run[2]]


def check_runs(layout):
  total_rows, stash_rows, start, sizes, starts = layout
  ragged = ps.RaggedRows(np.array(sizes), total_rows, None if starts is None else np.array(starts))
  to_stash = ragged.compact_runs(np.int32(start), stash_rows)
  to_rows = ragged.expand_runs(np.int32(start), stash_rows)
  expected, behind = [], 0
  for group, size in enumerate(sizes):
    row = behind if starts is None else starts[group]
    first, last = max(start + behind, 0), min(start + behind + size, stash_rows)
    if first < last:
      expected.append((row + first - start - behind, first, last - first))
    behind += size
  if starts is None and expected:  # One run of adjacent groups.
    expected = [(*expected[0][:2], sum(size for *_, size in expected))]
  assert occupied(to_stash) == expected
  assert occupied(to_rows) == sorted((to, of, size) for of, to, size in expected)


def test_runs_of_row_numbers_near_the_largest():
  run_sampled(check_runs, max_examples=100, layout=far_layouts())


@pytest.mark.parametrize(
  "layout",
  [
    (MOST - 1, 1, 1 - MOST + 1, [MOST - 1], None),
    (2**30, 2**30 - 1, 2**30 - 2, [2**30], [0]),
    (2**30, 2**30 - 1, -(2**30), [2**30 - 1, 1], [1, 0]),
  ],
)
def test_runs_of_the_largest_row_numbers(layout):
  check_runs(layout)


def test_byte_counts_are_exact():
  """Past 2^31, past 2^63, and from dimensions that are NumPy integers."""
  bfloat16 = lambda *shape: types.SimpleNamespace(shape=shape, dtype=jnp.bfloat16)
  deepseek = 58 * 65_536
  assert sizing.residual_bytes(deepseek, [bfloat16(7168)]) == 58 * 65_536 * 7168 * 2
  assert sizing.residual_bytes(deepseek, [bfloat16(np.int32(7168))]) == 58 * 65_536 * 7168 * 2
  assert sizing.residual_bytes(np.int32(2**30), [bfloat16(2**16, 2**16)]) == 2**63
  assert sizing.residual_bytes(2**40, [bfloat16(*2 * [np.int32(2**16)])]) == 2**73
  routing = dict(batch=2**20, seq=2**20, top_k=8, ep=2**10)
  assert sizing.worst_case_rows(**routing) == 2**53
  assert sizing.capacity_rows(**routing, layers=2**20, margin=1.5) == 3 * 2**62


def test_the_stash_takes_dimensions_that_are_numpy_integers():
  spec = struct((np.int32(2**16), np.int32(2**16)), jnp.bfloat16)
  stash = jax.eval_shape(lambda: ps.Stash.empty(8, [spec]))
  assert stash.buffers[0].shape == (8, 2**32)
