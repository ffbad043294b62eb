"""Every dtype of jax in programs for a TPU, in 64-bit mode and not. Nothing runs here."""

import functools

import jax
import jax.numpy as jnp
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import once
from tests.helpers.dtypes import TABLE

CHIPS = list(aot.TOPOLOGIES)
ROWS, WIDTH = 64, 128
# More than any VMEM holds, where the compiler would put it first.
OPERAND_ROWS = 2**21
struct = jax.ShapeDtypeStruct
SIZES, START = struct((4,), jnp.int32), struct((), jnp.int32)


def each(table):
  return pytest.mark.parametrize("dtype", table, ids=[dtype.name for dtype in table])


def update_and_slice(operand, update, start, sizes, starts):
  groups = {"group_sizes": sizes, "group_starts": starts}
  operand = ps.dynamic_update_slice(operand, update, (start, 0), **groups)
  return operand, ps.dynamic_slice(operand, (start, 0), update.shape, **groups)


def push_and_restore(stash, value, sizes, starts):
  ragged = ps.RaggedRows(sizes, value.shape[0], starts)
  stash, slot = stash.push([value], ragged)
  return stash, stash.restore(slot, ragged)


def drop_in_of(dtype, rows=ROWS):
  """Returns a function and its arguments."""
  scalar = getattr(jnp, dtype.name)
  return update_and_slice, (
    *(struct((n, WIDTH), scalar) for n in (rows, ROWS)),
    START,
    SIZES,
    SIZES,
  )


def stash_of(dtype, rows=ROWS):
  """Returns a function and its arguments."""
  scalar = getattr(jnp, dtype.name)
  stash = jax.eval_shape(functools.partial(ps.Stash.empty, rows, [struct((WIDTH,), scalar)]))
  return push_and_restore, (stash, struct((ROWS, WIDTH), scalar), SIZES, SIZES)


def in_both_modes(table):
  """Returns parameters: each dtype in one mode, by turns, and in the other in the long target."""
  return [
    pytest.param(
      *(dtype, x64), id=f"{dtype.name}-{x64}", marks=() if i % 2 == x64 else pytest.mark.long
    )
    for i, dtype in enumerate(table)
    for x64 in (False, True)
  ]


def lowered(fun, args):
  return jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype, x64", in_both_modes(TABLE))
def test_the_drop_in_pair_lowers(dtype, x64):
  with jax.enable_x64(x64 or dtype.needs_x64):
    fun, args = drop_in_of(dtype)
    if dtype.tpu is None:
      with pytest.raises(ValueError, match=f"rows of {dtype.name} cannot be moved on a TPU"):
        lowered(fun, args)
      return
    kernels = lowered(fun, args).count("tpu_custom_call")
    assert kernels == (2 if dtype.tpu == "kernel" else 0)


@pytest.mark.parametrize("dtype, x64", in_both_modes([d for d in TABLE if d.stored_as]))
def test_a_stash_lowers(dtype, x64):
  with jax.enable_x64(x64 or dtype.needs_x64):
    fun, args = stash_of(dtype)
    if dtype.tpu is None:
      with pytest.raises(ValueError, match=f"rows of {dtype.name} cannot be moved on a TPU"):
        lowered(fun, args)
      return
    assert lowered(fun, args).count("tpu_custom_call") == 2


def compiled(chip, fun, args):
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  return aot.compile(fun, *aot.place(args, aot.mesh(chip)), donate_argnums=0)


def compiles(tables):
  """Returns parameters: each dtype on one chip, by turns, and on the others in the long target."""
  return [
    pytest.param(
      dtype, chip, id=f"{dtype.name}-{chip}", marks=() if chip == CHIPS[i % 4] else pytest.mark.long
    )
    for i, dtype in enumerate(tables)
    for chip in CHIPS
  ]


KEPT_AS_ANOTHER = [d for d in TABLE if d.stored_as not in (None, d.name)]
OF_KERNELS = [d for d in TABLE if d.stored_as == d.name and d.tpu]


@pytest.mark.parametrize("dtype, chip", compiles(KEPT_AS_ANOTHER + OF_KERNELS))
def test_a_stash_compiles_without_a_copy(dtype, chip):
  fun, args = stash_of(dtype, OPERAND_ROWS)
  (buffer,) = args[0].buffers
  program = compiled(chip, fun, args)
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}
  assert program.copies(buffer) == []
  assert program.memory.temp_size_in_bytes < 2**20
  assert program.memory.alias_size_in_bytes >= buffer.size * buffer.dtype.itemsize


@pytest.mark.parametrize("dtype, chip", compiles([d for d in TABLE if d.tpu == "xla"]))
def test_what_no_kernel_takes_compiles(dtype, chip):
  with dtype.context():
    program = compiled(chip, *drop_in_of(dtype))
  assert program.kernels() == {}


@pytest.mark.parametrize("name", ["float32", once("bfloat16"), once("int8")])
def test_kernels_compile_in_64_bit_mode(name):
  (dtype,) = (dtype for dtype in TABLE if dtype.name == name)
  with jax.enable_x64(True):
    program = compiled("v5p", *drop_in_of(dtype, OPERAND_ROWS))
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}
