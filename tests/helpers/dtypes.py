"""The dtypes of jax, and who is to move each: one table for the tests of all that moves rows."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Dtype:
  """What is promised of a dtype.

  Attributes:
    name: as jax spells it.
    bits: of one element.
    stored_as: the dtype in which a stash keeps it; None if `Stash.empty` refuses it.
    tpu: what moves it in a program lowered for a TPU: "kernel", "xla", or None for a ValueError.
    mosaic: whether `implementation="mosaic"` moves it.
  """

  name: str
  bits: int
  stored_as: str | None
  tpu: str | None
  mosaic: bool

  @property
  def needs_x64(self):
    return self.bits == 128 or (self.bits == 64 and self.name != "complex64")

  def context(self):
    """Returns a context in which jax has the dtype."""
    return jax.enable_x64(self.needs_x64)


def _kernel(name, bits, stored_as=None):
  return Dtype(name, bits, stored_as, "kernel", True)


TABLE = [
  # Mosaic takes them.
  _kernel("float32", 32, "float32"),
  _kernel("bfloat16", 16, "bfloat16"),
  *(_kernel(name, 8, name) for name in ("float8_e4m3fn", "float8_e5m2")),
  *(_kernel(name, 8, name) for name in ("float8_e4m3b11fnuz", "float8_e8m0fnu")),
  *(_kernel(f"{sign}int{bits}", bits) for bits in (8, 16, 32) for sign in ("", "u")),
  # Mosaic does not; a stash keeps it as one that it takes.
  Dtype("float16", 16, "bfloat16", "xla", True),
  # Not on a TPU.
  *(
    Dtype(f"float8_{name}", 8, f"float8_{name}", None, True)
    for name in ("e3m4", "e4m3", "e4m3fnuz", "e5m2fnuz")
  ),
  Dtype("float64", 64, "float64", None, False),
  *(Dtype(f"{sign}int2", 2, None, None, False) for sign in ("", "u")),
  # No stash has them.
  Dtype("float4_e2m1fn", 4, None, "xla", False),
  *(Dtype(f"{sign}int{bits}", bits, None, "xla", False) for bits in (4, 64) for sign in ("", "u")),
  Dtype("bool", 1, None, "xla", False),
  Dtype("complex64", 64, None, "xla", False),
  Dtype("complex128", 128, None, "xla", False),
]

BY_NAME = {dtype.name: dtype for dtype in TABLE}

# Those that nothing moves.
NOT_MOVED = "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"


def dtypes_of_jax():
  """Returns the names of all dtypes that `jax.numpy` has."""
  scalars = [value for value in vars(jnp).values() if isinstance(value, type(jnp.float32))]
  return {jnp.dtype(scalar).name for scalar in scalars}
