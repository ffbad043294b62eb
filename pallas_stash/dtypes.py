"""Which dtypes are moved as they are, and as what others are moved: bits in, bits out."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# What Mosaic takes as operands of a kernel, of one, two and four bytes: its compiler says so.
_OF_MOSAIC = {
  *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8"),
  *("bfloat16", "int16", "uint16"),
  *("float32", "int32", "uint32"),
}

# Of float6 XLA knows the names alone, and it has no arithmetic of one bit.
_NOT_MOVED = {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}

# XLA for a TPU takes the first apart, all of a stash for each push, and may abort on the others.
_NOT_MOVED_ON_TPU = {"float64", "int2", "uint2"} | {
  f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3fnuz", "e5m2fnuz")
}

# Mosaic takes no float16: a floating-point dtype of its size in which a stash keeps it.
_STORAGE = {"float16": jnp.dtype(jnp.bfloat16)}

_INTEGERS = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}

# Small floats that XLA on a CPU moves. It converts the others to wider ones and back, and a whole
# buffer where it should update a slice; that rewrites NaNs, and on some CPUs flushes subnormals.
_MOVED_BY_XLA = {"float16"} | ({"bfloat16"} if jax.__version_info__ >= (0, 12) else set())


def is_of_mosaic(dtype) -> bool:
  """Returns whether the Pallas TPU kernels take a dtype as it is."""
  return jnp.dtype(dtype).name in _OF_MOSAIC


def is_moved_by_mosaic(dtype) -> bool:
  """Returns whether the Pallas TPU kernels take a dtype, or the integers of its size."""
  return is_of_mosaic(dtype) or is_of_mosaic(integers(dtype))


def is_moved(dtype) -> bool:
  """Returns whether anything moves a dtype."""
  return jnp.dtype(dtype).name not in _NOT_MOVED


def check_is_moved_on_tpu(dtype) -> None:
  """Raises a ValueError for a dtype that neither Mosaic nor XLA moves in place on a TPU."""
  if jnp.dtype(dtype).name in _NOT_MOVED_ON_TPU:
    raise ValueError(
      f"Ragged rows of {jnp.dtype(dtype)} cannot be moved on a TPU, whose compiler moves none of"
      f" {', '.join(sorted(_NOT_MOVED_ON_TPU))} in place in all shapes: use another dtype."
    )


def storage(dtype) -> jnp.dtype:
  """Returns the dtype in which a stash keeps one: floating-point, of its size, for the kernels.

  So a kernel is given the stash as it is: a cast at its boundary would copy all of it.
  """
  dtype = jnp.dtype(dtype)
  return _STORAGE.get(dtype.name, dtype)


def moved_by_xla(dtype) -> jnp.dtype:
  """Returns a dtype if XLA on a CPU updates slices of it in place; else integers of its size."""
  return jnp.dtype(dtype) if jnp.dtype(dtype).name in _MOVED_BY_XLA else integers(dtype)


def integers(dtype) -> jnp.dtype:
  """Returns unsigned integers of the size of a small float; any other dtype as it is.

  XLA moves the larger floats, and computes with the small ones where it only is to select them.
  """
  dtype = jnp.dtype(dtype)
  bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 32
  return jnp.dtype(_INTEGERS.get(bits, dtype))


def bit_cast(array: jax.Array, dtype) -> jax.Array:
  """Returns the bits of `array` as another dtype of its size."""
  return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def as_integers(array: jax.Array) -> jax.Array:
  """Returns the bits of small floats as integers; of any other dtype, `array` as it is."""
  return bit_cast(array, integers(array.dtype))


def select(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Is `jnp.where` for arrays of one dtype, bit for bit."""
  return bit_cast(jnp.where(condition, as_integers(x), as_integers(y)), x.dtype)


def blank(dtype, shape: tuple[int, ...] = ()) -> jax.Array:
  """Returns what has no bit set: zero, but in float8_e8m0fnu, which has none, its least value."""
  return bit_cast(jnp.zeros(shape, integers(dtype)), dtype)


def has_nan(dtype) -> bool:
  """Returns whether a dtype has NaN."""
  is_inexact = jnp.issubdtype(dtype, jnp.inexact)
  return is_inexact and bool(np.isnan(np.full((), np.nan).astype(dtype)))


def is_of_stash(dtype) -> bool:
  """Returns whether a stash takes a dtype: it comes back as a cotangent, NaN if it was not stored.

  No integer has a cotangent, and no float4 or float6 is NaN.
  """
  return jnp.issubdtype(dtype, jnp.floating) and has_nan(dtype)


def blank_or_nan(is_blank: jax.Array, dtype) -> jax.Array:
  """Returns `blank` if `is_blank`, bool[]; else NaN, in a dtype that has it."""
  if not has_nan(dtype):
    return blank(dtype)
  return select(is_blank, blank(dtype), jnp.full((), jnp.nan, dtype))
