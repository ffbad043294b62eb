"""How many rows a buffer needs, and how many bytes they are.

Everything here counts the rows of one device, in exact integer arithmetic. `batch` is the batch
of one device, `seq` the tokens of a sequence, `top_k` the experts that each token chooses, and `ep`
the devices that the experts are spread over (expert parallelism). A ring of experts gathers the
tokens of all `ep` devices on each of them.
"""

from collections.abc import Sequence
import fractions
import math
import numbers
from typing import Any

from pallas_stash.arguments import describe, row_specs
from pallas_stash.kernels.tiling import round_up

__all__ = ["worst_case_rows", "expected_rows", "capacity_rows", "residual_bytes"]


def worst_case_rows(
  batch: int, seq: int, top_k: int, ep: int, num_experts: int | None = None
) -> int:
  """The most rows that routing can send to one device: the size of a dropless compute buffer.

  A token chooses an expert at most once, so at most `num_experts // ep` of its `top_k` rows land on
  one device. With `num_experts` that counts, and the bound is tight: it is reached when all tokens
  prefer the experts of one device. Without, it is the ring-of-experts bound, under which every
  choice of every token may land there. The two differ only where `num_experts // ep < top_k`. Pass
  `num_experts` where the layer sizes its buffer by it.

  Args:
    batch: sequences of one device.
    seq: tokens of a sequence.
    top_k: experts a token.
    ep: devices that the experts are spread over.
    num_experts: experts of all devices together, a multiple of `ep`.

  Returns:
    `ep * batch * seq * min(top_k, num_experts // ep)`, or without `num_experts`
    `batch * ep * seq * top_k`.
  """
  batch, seq, top_k, ep, num_experts = _routing(batch, seq, top_k, ep, num_experts)
  choices = top_k if num_experts is None else min(top_k, num_experts // ep)
  return ep * batch * seq * choices


def expected_rows(batch: int, seq: int, top_k: int, ep: int, num_experts: int | None = None) -> int:
  """The rows that a device receives when the routing is perfectly balanced.

  The tokens of `ep` devices make `ep * batch * seq * top_k` choices, which `ep` devices share.

  Args: as for `worst_case_rows`.

  Returns:
    `batch * seq * top_k`.
  """
  batch, seq, top_k, _, _ = _routing(batch, seq, top_k, ep, num_experts)
  return batch * seq * top_k


def capacity_rows(
  batch: int,
  seq: int,
  top_k: int,
  ep: int,
  num_experts: int | None = None,
  *,
  layers: int,
  margin: numbers.Real = 1.0,
  row_alignment: int = 8,
) -> int:
  """The rows of a stash that holds the routed rows of `layers` layers.

  Args:
    batch, seq, top_k, ep, num_experts: as for `worst_case_rows`.
    layers: layers that push into the stash.
    margin: the rows to have room for, as a multiple of the expected rows. It is read as written:
      1.1 is eleven tenths, not the float nearest to it. Layers share the room: what one leaves
      unused is there for the others.
    row_alignment: each push starts on a multiple of this many rows: 8, or 32 if any residual has
      one-byte elements.

  Returns:
    `layers` times the rows of a layer, which are the expected rows times `margin`, rounded up, but
    not more than the worst case, and then rounded up to `row_alignment`.
  """
  layers, row_alignment = _positive_ints(layers=layers, row_alignment=row_alignment)
  expected = expected_rows(batch, seq, top_k, ep, num_experts)
  rows = math.ceil(expected * _positive_fraction(margin))
  rows = min(rows, worst_case_rows(batch, seq, top_k, ep, num_experts))
  return layers * round_up(rows, row_alignment)


def residual_bytes(rows: int, residuals: Sequence[Any]) -> int:
  """The bytes of `rows` rows of each of `residuals`.

  Args:
    rows: rows of every residual, for instance the capacity of a stash.
    residuals: objects with the `shape` of one row and a `dtype`, such as
      `jax.ShapeDtypeStruct((width,), jnp.bfloat16)`.

  Returns:
    `rows * sum(prod(shape) * itemsize)` over the residuals. A `Stash`, like any array on a TPU,
    takes rows that are no multiple of 128 elements wide as if they were the next multiple.
  """
  if not _is_integer(rows) or rows < 0:
    raise ValueError(f"rows={describe(rows)} must be an integer, zero or more")
  row_bytes = sum(math.prod(r.shape) * r.dtype.itemsize for r in row_specs(residuals))
  return int(rows) * row_bytes


def _routing(batch, seq, top_k, ep, num_experts):
  batch, seq, top_k, ep = _positive_ints(batch=batch, seq=seq, top_k=top_k, ep=ep)
  if num_experts is not None:
    (num_experts,) = _positive_ints(num_experts=num_experts)
    if num_experts % ep:
      raise ValueError(f"{num_experts=} must be a multiple of {ep=}")
    if top_k > num_experts:
      raise ValueError(f"{top_k=} must be at most {num_experts=}")
  return batch, seq, top_k, ep, num_experts


def _positive_ints(**values) -> list[int]:
  for name, value in values.items():
    if not _is_integer(value) or value <= 0:
      raise ValueError(f"{name}={describe(value)} must be a positive integer")
  # Python integers do not overflow; NumPy's do.
  return [int(value) for value in values.values()]


def _is_integer(value):
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _positive_fraction(margin) -> fractions.Fraction:
  try:
    # Through the decimal text: Fraction(1.1) is above 11/10, and its ceiling one row too many.
    fraction = fractions.Fraction(str(margin))
  except ValueError:
    fraction = fractions.Fraction(0)  # "nan", "inf" and whatever is not a number
  if fraction <= 0:
    raise ValueError(f"margin={describe(margin)} must be a finite number above zero")
  return fraction
