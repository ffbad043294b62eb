"""Kernels and the real TPU compiler: what it accepts, and what it copies.

Nothing runs here. Every program is compiled ahead of time for chips that this host does not have.
"""

import functools
import itertools
import re

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash import kernels
from pallas_stash.kernels.tiling import choose_tiling
from tests.helpers.checks import long, once
from tests.helpers.deepseek import CAPACITY, num_bytes, WIDTH, WORST_CASE_ROWS

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

CHIPS = list(aot.TOPOLOGIES)
DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "int32"]
WIDTHS = [7168, 2048, 128, 1000, 100, "split"]
MIB = 2**20

struct = jax.ShapeDtypeStruct
SIZES, START = struct((8,), jnp.int32), struct((), jnp.int32)


def empty_stash(capacity, residuals, page_rows=None):
  empty = functools.partial(ps.Stash.empty, capacity, residuals, page_rows=page_rows)
  return jax.eval_shape(empty)


def push(stash, values, sizes):
  return stash.push(values, ps.RaggedRows(sizes, values[0].shape[0]))


def push_and_free(stash, values, sizes):
  stash, slot = push(stash, values, sizes)
  return stash.free(slot)


def restore(stash, slot, sizes, total_rows):
  return stash.restore(slot, ps.RaggedRows(sizes, total_rows))


def update(operand, rows, start, sizes, starts=None):
  return ps.dynamic_update_slice(operand, rows, (start, 0), group_sizes=sizes, group_starts=starts)


def slice_(operand, start, sizes, starts=None, *, total_rows):
  shape = (total_rows, operand.shape[1])
  return ps.dynamic_slice(operand, (start, 0), shape, group_sizes=sizes, group_starts=starts)


def kernel_compact(stash, rows, start, sizes):
  runs = ps.RaggedRows(sizes, rows.shape[0]).compact_runs(start, stash.shape[0])
  return kernels.compact(rows, stash, runs, None)


def kernel_expand(stash, start, sizes, *, total_rows):
  runs = ps.RaggedRows(sizes, total_rows).expand_runs(start, stash.shape[0])
  blank = jnp.zeros((), stash.dtype)
  return kernels.expand(stash, runs, total_rows, stash.shape[1], blank, None)


@pytest.mark.parametrize(
  "chip, way",
  [
    *(("v5p", "stash"), ("tpu7x", "stash"), once("v5e", "stash"), once("v6e", "stash")),
    *(once("v5p", "drop-in"), once("tpu7x", "kernels")),
    *(once("tpu7x", "pages"), *(long(chip, "pages") for chip in CHIPS if chip != "tpu7x")),
    *(long(chip, "drop-in") for chip in CHIPS if chip != "v5p"),
    *(long(chip, "kernels") for chip in CHIPS if chip != "tpu7x"),
  ],
)
def test_deepseek_size(chip, way):
  rows = struct((WORST_CASE_ROWS, WIDTH), jnp.bfloat16)
  spare = int(aot.HBM_GIB[chip] * 2**30) - num_bytes(rows) - 16 * MIB
  capacity = min(CAPACITY, spare // (WIDTH * 2) // 8192 * 8192)
  stash = empty_stash(capacity, [struct((WIDTH,), jnp.bfloat16)], 512 if way == "pages" else None)
  (buffer,) = stash.buffers
  number = stash.counters.pushes
  slot = ps.Slot(number, number, None, number)
  compact, compact_args, expand, expand_args = {
    "stash": (push, (stash, [rows], SIZES), restore, (stash, slot, SIZES)),
    "pages": (push_and_free, (stash, [rows], SIZES), restore, (stash, slot, SIZES)),
    "drop-in": (update, (buffer, rows, START, SIZES), slice_, (buffer, START, SIZES)),
    "kernels": (
      kernel_compact,
      (buffer, rows, START, SIZES),
      kernel_expand,
      (buffer, START, SIZES),
    ),
  }[way]

  mesh = aot.mesh(chip)
  compacted = aot.compile(compact, *aot.place(compact_args, mesh), donate_argnums=0)
  expand = functools.partial(expand, total_rows=WORST_CASE_ROWS)
  expanded = aot.compile(expand, *aot.place(expand_args, mesh))
  assert compacted.kernels() == {"stash_compact": 1}
  assert expanded.kernels() == {"stash_expand": 1}
  assert compacted.copies(buffer) == expanded.copies(buffer) == []
  assert compacted.memory.temp_size_in_bytes < MIB
  assert expanded.memory.temp_size_in_bytes < MIB
  # Scalars of the stash are donated too.
  assert 0 <= compacted.memory.alias_size_in_bytes - num_bytes(buffer) < MIB


def width_of(width, dtype):
  """A static width; "split" is one that takes two kernel calls, each for some of the columns."""
  return 32 * 1024 // jnp.dtype(dtype).itemsize + 128 if width == "split" else width


def every_chip_dtype_and_width():
  """Parameters: every dtype on one chip, every chip and every width for quick; all for long."""
  widths = ["split", 7168, 128, 1000, 128, 2048, 100]
  marked = dict.fromkeys(itertools.product(CHIPS, DTYPES, WIDTHS), long)
  marked |= dict.fromkeys(zip(itertools.cycle(CHIPS), DTYPES, widths), pytest.param)
  return [mark(*case) for case, mark in marked.items()]


@pytest.mark.parametrize("chip, dtype, width", every_chip_dtype_and_width())
def test_dtypes_and_widths(chip, dtype, width):
  width = width_of(width, dtype)
  itemsize = jnp.dtype(dtype).itemsize
  # More than any VMEM holds, where the compiler would put it first.
  operand_rows = 2**29 // (width * itemsize) // 32 * 32
  operand, rows = struct((operand_rows, width), dtype), struct((2048, width), dtype)
  args = aot.place((operand, rows, START, SIZES, SIZES), aot.mesh(chip))
  updated = aot.compile(update, *args, donate_argnums=0)
  sliced = aot.compile(functools.partial(slice_, total_rows=2048), args[0], *args[2:])
  calls = len(choose_tiling(-(-width // 128) * 128, itemsize).column_blocks)
  if dtype == "float16":  # Mosaic takes none, so XLA copies the rows.
    calls = 0
  assert updated.kernels().total() == updated.kernels()["stash_compact"] == calls
  assert sliced.kernels().total() == sliced.kernels()["stash_expand"] == calls
  if width % 128 == 0:
    assert updated.memory.alias_size_in_bytes == num_bytes(operand)
    assert updated.memory.temp_size_in_bytes < num_bytes(operand) / 2
    if calls:
      assert updated.copies(operand) == sliced.copies(operand) == []


@pytest.mark.parametrize("chip", [*map(long, CHIPS[:3]), *CHIPS[3:]])
def test_several_residuals(chip):
  residuals = [
    struct((1000,), jnp.float16),
    struct((4, 128), jnp.float8_e4m3fn),
  ]
  stash = empty_stash(2**19, residuals)
  values = [struct((2048, *r.shape), r.dtype) for r in residuals]
  args = aot.place((stash, values, SIZES, ps.Slot(stash.top, stash.top)), aot.mesh(chip))
  stash, values, sizes, slot = args
  pushed = aot.compile(push, stash, values, sizes, donate_argnums=0)
  restored = aot.compile(functools.partial(restore, total_rows=2048), stash, slot, sizes)
  assert pushed.kernels() == {"stash_compact": len(residuals)}
  assert restored.kernels() == {"stash_expand": len(residuals)}
  assert pushed.copies(*stash.buffers) == restored.copies(*stash.buffers) == []
  assert 0 <= pushed.memory.alias_size_in_bytes - num_bytes(*stash.buffers) < MIB


@pytest.mark.parametrize(
  "chip, dtype",
  [
    pytest.param("tpu7x", "bfloat16", marks=pytest.mark.both),
    *(long(chip, "bfloat16") for chip in CHIPS if chip != "tpu7x"),
    *(long(chip, dtype) for chip in CHIPS for dtype in ("float32", "int8", "float8_e4m3fn")),
  ],
)
def test_beside_matmuls_of_xla(chip, dtype):
  """On tpu7x they read and write tiles of other rows, which the kernel does not take."""
  rows, width = 8192, 512

  def run(operand, x, weights, start, sizes):
    made = lax.dot(x, weights, preferred_element_type=jnp.float32).astype(dtype)
    operand = update(operand, made, start, sizes)
    read = slice_(operand, start, sizes, total_rows=rows)
    return operand, lax.dot(read, weights.T, preferred_element_type=jnp.float32)

  shapes = (2 * rows, width), (rows, width), (width, width)
  args = *(struct(shape, dtype) for shape in shapes), START, SIZES
  program = aot.compile(run, *aot.place(args, aot.mesh(chip)), donate_argnums=0)
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}


def write_and_read(rows, width, dtype, starts, sizes):
  """Writes rows of a loop's own to a buffer that it carries, and reads them there again."""

  def step(operand, start):
    made = jnp.broadcast_to((start * jnp.arange(width)).astype(dtype), (rows // 4, width))
    operand = update(operand, made, start, sizes)
    return operand, jnp.max(slice_(operand, start, sizes, total_rows=rows // 4).astype(jnp.float32))

  # Not the buffer: results are laid out with the longer axis last, if that takes less room.
  return lax.scan(step, jnp.zeros((rows, width), dtype), starts)[1]


@pytest.mark.parametrize(
  "chip, dtype, rows, width",
  [
    ("v5p", "float32", 65_539, 1000),
    ("tpu7x", "float32", 65_539, 2048),
    once("v6e", "bfloat16", 65_541, 2880),
    once("v5e", "int8", 65_536, 2880),
    once("v5e", "bfloat16", 9, 100),
    *(long(chip, "bfloat16", 65_541, 2880) for chip in ("v5e", "v5p")),
    *(long(chip, "float32", 12, 100) for chip in CHIPS),
  ],
)
def test_shapes_that_end_inside_of_a_tile(chip, dtype, rows, width):
  """The kernel moves the last tiles as they lie in HBM, whole: nothing is copied to pad it."""
  run = functools.partial(write_and_read, rows, width, dtype)
  args = aot.place((struct((8,), jnp.int32), struct((4,), jnp.int32)), aot.mesh(chip))
  program = aot.compile(run, *args)
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}
  # Of rows of two bytes and more the tile is of 8, whatever the rows: as the kernel takes it.
  tiles = {
    re.search(r"T\([\d,]+\)", shape)[0]
    for kernel in program.instructions
    for shape in (*kernel.operands, kernel.result)
    if kernel.is_ours and f",{width}]" in shape
  }
  assert tiles <= {"T(8,128)"} or dtype == "int8"
  # The buffer, and the rows that are written and read.
  row_bytes = -(-width // 128) * 128 * jnp.dtype(dtype).itemsize
  assert program.memory.temp_size_in_bytes < 1.01 * (rows + 2 * (rows // 4)) * row_bytes + MIB
