"""Every dtype of jax: bit for bit by each implementation, or an error that names it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import dtypes
from tests.helpers import ragged_rows
from tests.helpers.dtypes import BY_NAME, dtypes_of_jax, NOT_MOVED, TABLE
from tests.helpers.stashes import with_rows_taken
from tests.helpers.support import (
  assert_same_bits,
  IMPLEMENTATIONS,
  long_if_interpreted,
  ON_TPU,
  random_bits,
  slice_rows,
  update_rows,
)

OPERAND_ROWS, TOTAL_ROWS, WIDTH = 40, 32, 5
# The second is smaller than a chunk, and starts and ends inside a word of the kernel.
GROUPS = np.int32(3), np.array([0, 3, 18], np.int32), np.array([9, 1, 12], np.int32)
IN_STASH = [dtype for dtype in TABLE if dtype.stored_as]
struct = jax.ShapeDtypeStruct


def each(table):
  return pytest.mark.parametrize("dtype", table, ids=[dtype.name for dtype in table])


def takes(dtype, implementation):
  return dtype.mosaic or implementation in (None, "xla")


def test_the_table_has_every_dtype():
  assert dtypes_of_jax() == {*BY_NAME, *NOT_MOVED}


# Of those that are moved alike, and are in other tests, all but these are for the long target.
FIRST = "bfloat16", "float8_e8m0fnu", "float8_e4m3", "float64", "float4_e2m1fn", "uint2", "bool"


def cases(implementations, table):
  """Returns parameters; those that are moved as others, or interpreted, are marked as long."""

  def case(implementation, dtype):
    is_quick = implementation != "mosaic_interpret" and dtype.name in FIRST
    marks = [pytest.mark.long] if takes(dtype, implementation) and not is_quick else []
    return pytest.param(implementation, dtype, marks=marks, id=f"{implementation}-{dtype.name}")

  return [case(implementation, dtype) for implementation in implementations for dtype in table]


def nothing_but(is_row, rows):
  """Returns the rows that are some, among others without a bit set."""
  no_bits = np.zeros((*rows.shape[:-1], rows.shape[-1] * rows.itemsize), np.uint8)
  return np.where(is_row, rows, no_bits.view(rows.dtype))


@functools.partial(jax.jit, static_argnums=0)
def update_and_slice(implementation, operand, update, start, sizes, starts):
  options = {"group_sizes": sizes, "group_starts": starts, "implementation": implementation}
  updated = ps.dynamic_update_slice(operand, update, (start, 0), **options)
  return updated, ps.dynamic_slice(updated, (start, 0), update.shape, **options)


@pytest.mark.parametrize("implementation, dtype", cases(IMPLEMENTATIONS, TABLE))
def test_drop_in(implementation, dtype):
  rng, (start, *layout) = np.random.default_rng(0), GROUPS
  with dtype.context():
    operand, update = (random_bits(rng, (n, WIDTH), dtype.name) for n in (OPERAND_ROWS, TOTAL_ROWS))
    if not takes(dtype, implementation):
      with pytest.raises(ValueError, match=f"{implementation=} moves no rows of {dtype.name}"):
        update_rows(operand, update, *GROUPS, implementation)
      with pytest.raises(ValueError, match=f"{implementation=} moves no rows of {dtype.name}"):
        slice_rows(operand, *GROUPS, TOTAL_ROWS, implementation)
      return
    updated, sliced = update_and_slice(implementation, operand, update, *GROUPS)
  assert_same_bits(updated, ragged_rows.compact(update, operand, start, *layout))
  is_row = ragged_rows.expand(np.ones((OPERAND_ROWS, 1)), start, TOTAL_ROWS, *layout) == 1
  assert_same_bits(sliced, nothing_but(is_row, update))


@pytest.mark.parametrize("name", NOT_MOVED)
def test_drop_in_refuses_what_nothing_moves(name):
  sizes = struct((2,), jnp.int32)
  operand = struct((8, 2), getattr(jnp, name))
  for fun in (
    lambda x, sizes: ps.dynamic_update_slice(x, x, (0, 0), group_sizes=sizes),
    lambda x, sizes: ps.dynamic_slice(x, (0, 0), (8, 2), group_sizes=sizes),
  ):
    with pytest.raises(ValueError, match=f"operand of dtype {name} must have another"):
      jax.eval_shape(fun, operand, sizes)


@functools.partial(jax.jit, static_argnums=0)
def push_and_restore(implementation, stash, value, ragged):
  stash, slot = stash.push([value], ragged, implementation=implementation)
  (restored,) = stash.restore(slot, ragged, implementation=implementation)
  return slot, restored


@pytest.mark.parametrize("implementation, dtype", cases((None, *IMPLEMENTATIONS[1:]), IN_STASH))
def test_stash(implementation, dtype):
  with dtype.context():
    stash = ps.Stash.empty(32, [struct((WIDTH,), getattr(jnp, dtype.name))])
    assert stash.buffers[0].dtype == dtype.stored_as
    ragged = ps.RaggedRows(GROUPS[1], TOTAL_ROWS, GROUPS[2])
    value = random_bits(np.random.default_rng(1), (TOTAL_ROWS, WIDTH), dtype.name)
    if not takes(dtype, implementation):
      with pytest.raises(ValueError, match=f"{implementation=} moves no rows of {dtype.name}"):
        push_and_restore(implementation, stash, value, ragged)
      return
    _, restored = push_and_restore(implementation, stash, value, ragged)
    assert_same_bits(restored, nothing_but(np.asarray(ragged.is_in_group())[:, None], value))
    stash = with_rows_taken(stash, 32)  # Nothing fits any more.
    slot, lost = push_and_restore(implementation, stash, value, ragged)
  assert not slot.is_stored() and np.isnan(np.asarray(lost)).all()


@pytest.mark.parametrize(
  "implementation, name",
  [
    ("xla", "int8"),
    *(long_if_interpreted(IMPLEMENTATIONS[1], name) for name in ("bfloat16", "float32", "int8")),
  ],
)
def test_drop_in_in_64_bit_mode(implementation, name):
  rng, (start, *layout) = np.random.default_rng(2), GROUPS
  operand, update = (random_bits(rng, (n, WIDTH), name) for n in (OPERAND_ROWS, TOTAL_ROWS))
  with jax.enable_x64(True):
    updated, sliced = update_and_slice(implementation, operand, update, *GROUPS)
  assert_same_bits(updated, ragged_rows.compact(update, operand, start, *layout))
  is_row = ragged_rows.expand(np.ones((OPERAND_ROWS, 1)), start, TOTAL_ROWS, *layout) == 1
  assert_same_bits(sliced, nothing_but(is_row, update))


def test_a_stash_in_64_bit_mode():
  rng, names = np.random.default_rng(3), ("float32", "bfloat16", "float16", "float64")
  with jax.enable_x64(True):
    values = [random_bits(rng, (TOTAL_ROWS, WIDTH), name) for name in names]
    ragged = ps.RaggedRows(GROUPS[1], TOTAL_ROWS, GROUPS[2])
    stash = ps.Stash.empty(32, [struct((WIDTH,), value.dtype) for value in values])
    stash, slot = jax.jit(ps.Stash.push)(stash, values, ragged)
    restored = jax.jit(ps.Stash.restore)(stash, slot, ragged)
    is_row = np.asarray(ragged.is_in_group())[:, None]
  for value, rows in zip(values, restored, strict=True):
    assert_same_bits(rows, nothing_but(is_row, value))


@pytest.mark.skipif(ON_TPU, reason="reads what XLA makes of it for a CPU")
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3", "float32"])
def test_reading_passes_over_no_stash(name):
  """Rows are read without a copy of all the stash, in integers or in wider floats."""
  stash, rows = struct((2**14, 128), name), 2**9

  def read(stash, sizes):
    return ps.dynamic_slice(stash, (0, 0), (rows, 128), group_sizes=sizes)

  compiled = jax.jit(read).lower(stash, struct((4,), jnp.int32)).compile()
  # An array of the rows that are read, and integers, of four chunks.
  assert (
    compiled.memory_analysis().temp_size_in_bytes < 2 * stash.dtype.itemsize * rows * 128 + 2**15
  )


REFUSED = [dtype.name for dtype in TABLE if not dtype.stored_as] + list(NOT_MOVED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_stash_refuses(name):
  with (
    jax.enable_x64(True),
    pytest.raises(ValueError, match=f"{name}.* must have a floating-point"),
  ):
    ps.Stash.empty(8, [struct((4,), getattr(jnp, name))])


def test_gradients_of_scales():
  """Padding of float8_e8m0fnu, which has no zero, is its least value and never NaN."""
  scales = np.full((OPERAND_ROWS, 2), 2, jnp.float8_e8m0fnu)

  def loss(scales):
    rows = slice_rows(scales, *GROUPS, TOTAL_ROWS)
    return jnp.sum(rows.astype(jnp.float32))

  value, gradient = jax.value_and_grad(loss)(scales)
  assert value == 2 * 2 * sum(GROUPS[1])  # Padding is 2**-127.
  is_row = np.arange(OPERAND_ROWS) - GROUPS[0] < sum(GROUPS[1])
  is_row &= np.arange(OPERAND_ROWS) >= GROUPS[0]
  np.testing.assert_array_equal(np.asarray(gradient)[is_row].astype(np.float32), 1)
  assert_same_bits(np.asarray(gradient)[~is_row], np.asarray(dtypes.blank(scales.dtype, (19, 2))))
