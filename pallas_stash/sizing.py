"""How many rows a buffer needs, and how many bytes they are.

Everything here counts the rows of one device, in exact integer arithmetic. `batch` is the batch
of one device, `seq` the tokens of a sequence, `top_k` the experts that each token chooses, and `ep`
the devices that the experts are spread over (expert parallelism). A ring of experts gathers the
tokens of all `ep` devices on each of them.
"""

from collections.abc import Sequence
import math
import numbers
import statistics
from typing import Any, NamedTuple

from pallas_stash.arguments import describe, positive_fraction, row_specs
from pallas_stash.kernels import tiling
from pallas_stash.kernels.tiling import round_up

__all__ = [
  "worst_case_rows",
  "expected_rows",
  "bucket_rows",
  "capacity_rows",
  "page_rows",
  "margin",
  "residual_bytes",
  "hidden_rows",
  "tier_rows",
]


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


def bucket_rows(num_experts: int, capacity: int, ep: int = 1) -> int:
  """The rows of a device's buffer in which each of its experts has a bucket of `capacity` rows.

  Such a layer drops what does not fit into a bucket. The rows that it keeps are ragged rows:

      total_rows = sizing.bucket_rows(num_experts, capacity, ep)
      group_starts = capacity * jnp.arange(num_experts // ep)
      ragged = RaggedRows(jnp.minimum(group_sizes, capacity), total_rows, group_starts)

  Args:
    num_experts: experts of all devices together, a multiple of `ep`.
    capacity: rows of a bucket.
    ep: devices that the experts are spread over.

  Returns:
    `num_experts // ep * capacity`.
  """
  num_experts, capacity, ep = _positive_ints(num_experts=num_experts, capacity=capacity, ep=ep)
  if num_experts % ep:
    raise ValueError(f"{num_experts=} must be a multiple of {ep=}")
  return num_experts // ep * capacity


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
      one-byte elements; or with pages those of a page.

  Returns:
    `layers` times the rows of a layer, which are the expected rows times `margin`, rounded up, but
    not more than the worst case, and then rounded up to `row_alignment`.
  """
  layers, row_alignment = _positive_ints(layers=layers, row_alignment=row_alignment)
  expected = expected_rows(batch, seq, top_k, ep, num_experts)
  rows = math.ceil(expected * positive_fraction("margin", margin))
  rows = min(rows, worst_case_rows(batch, seq, top_k, ep, num_experts))
  return layers * round_up(rows, row_alignment)


def page_rows(expected_rows: int) -> int:
  """The rows of a page for pushes of so many rows.

  A push holds whole pages, so half a page on average is held for nothing: under one percent of a
  push of 64 pages. Smaller pages cost more to look up, and a kernel moves tiles of at most 512 rows
  anyway.

  Args:
    expected_rows: of a push, see `expected_rows`.

  Returns:
    The first power of two from `expected_rows / 64` on, but at least 128 and at most 512.
  """
  (expected_rows,) = _positive_ints(expected_rows=expected_rows)
  return min(max(128, 1 << (-(-expected_rows // 64) - 1).bit_length()), 512)


def margin(
  mean_rows: numbers.Real,
  spread_rows: numbers.Real,
  *,
  expected_rows: int,
  layers: int,
  recomputed_share: numbers.Real = 0.001,
) -> float:
  """The `margin` of `capacity_rows` that observed rows call for.

  The model: the rows of a layer on a device are independent of those of other layers, and normal
  with the same mean and spread. The layers share one capacity `C` and push in order; a push that
  does not fit stores nothing.

  The first k layers then have `S_k` rows, normal with mean `k * mean_rows` and spread `sqrt(k) *
  spread_rows`. Layer k fits if all up to it do, `S_k <= C`. So the probability that layer k is
  recomputed is at most `P(S_k > C)` (as in renewal theory, where `N(C) < k` is `S_k > C`), and
  the share of layers that is recomputed at most the mean of that over k. This is the least `C` for
  which that bound is `recomputed_share`. Later layers that still fit make the share smaller, by
  little where it is small: mostly the last layer is the only one.

  The model is wrong where layers are alike. If the same experts are popular in all of them, rows do
  not even out: the spread of the sum is up to `layers * spread_rows`, not `sqrt(layers) *
  spread_rows`, and this margin is too small. The busiest device decides; take its own mean and
  spread, over layers and steps, if devices differ for long. Then compare with `sufficient_rows` of
  `Stash.stats`, which assumes nothing.

  Args:
    mean_rows: mean of the rows of a layer on a device, over layers, steps and devices. A push
      takes whole tiles of the stash, half a tile more on average; add that where it matters.
    spread_rows: their standard deviation.
    expected_rows: of perfect balance, what `margin` is a multiple of: see `expected_rows`.
    layers: layers that push into the stash.
    recomputed_share: the share of layers, over devices and steps, that may be recomputed.

  Returns:
    The margin. `capacity_rows` limits it to the worst case.
  """
  mean_rows = _number("mean_rows", mean_rows, "above zero", lambda x: x > 0)
  spread_rows = _number("spread_rows", spread_rows, "zero or more", lambda x: x >= 0)
  share = _number("recomputed_share", recomputed_share, "between 0 and 1", lambda x: 0 < x < 1)
  expected_rows, layers = _positive_ints(expected_rows=expected_rows, layers=layers)
  if not spread_rows:
    return mean_rows / expected_rows
  sums = [
    statistics.NormalDist(k * mean_rows, math.sqrt(k) * spread_rows) for k in range(1, layers + 1)
  ]
  # P(S_k > rows), mirrored at the mean: of 1 - cdf, what is small would be lost to rounding.
  is_enough = lambda rows: sum(s.cdf(2 * s.mean - rows) for s in sums) <= share * layers
  low, high = 0.0, layers * mean_rows
  while not is_enough(high):
    low, high = high, 2 * high
  while high - low > 1e-6 * mean_rows:
    middle = (low + high) / 2
    low, high = (low, middle) if is_enough(middle) else (middle, high)
  return high / (layers * expected_rows)


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
  rows = _zero_or_more("rows", rows)
  row_bytes = sum(math.prod(r.shape) * r.dtype.itemsize for r in row_specs(residuals))
  return rows * row_bytes


def hidden_rows(
  seconds: numbers.Real, residuals: Sequence[Any], host_bytes_per_second: numbers.Real
) -> int:
  """The rows of each of `residuals` that a link to the host moves, one way, in so many seconds.

  The `staging_rows` of a stash at which no layer waits for the link: the first rows of a push go to
  the host while the next layer runs, and come back while the layer behind it runs backward. So the
  seconds are those of the shorter of the two, which is the forward pass of a layer.

  Args:
    seconds: that a layer runs.
    residuals: as for `residual_bytes`; at least one.
    host_bytes_per_second: of the link of one device, in one direction, while it moves nothing in
      the other.

  Returns:
    `seconds * host_bytes_per_second / row_bytes`, rounded down to a tile: 8 rows, or 32 if any
    residual has one-byte elements. `row_bytes` are those of a row of all residuals as a stash
    holds it, each as wide as the next multiple of 128 elements.
  """
  specs = row_specs(residuals)
  width = lambda spec: round_up(math.prod(spec.shape), tiling.LANES)
  row_bytes = sum(width(spec) * spec.dtype.itemsize for spec in specs)
  if not row_bytes:
    raise ValueError(f"residuals={describe(residuals)} must have elements: nothing is to be moved")
  seconds = positive_fraction("seconds", seconds)
  speed = positive_fraction("host_bytes_per_second", host_bytes_per_second)
  tile = max(tiling.row_alignment(spec.dtype.itemsize) for spec in specs)
  return math.floor(seconds * speed / row_bytes) // tile * tile


class TierRows(NamedTuple):
  """The rows of a stash's two tiers, arguments of `Stash.empty`.

  Attributes:
    capacity_rows: in HBM. What is staged is beside them, `staging_rows`.
    host_capacity_rows: in host memory.
  """

  capacity_rows: int
  host_capacity_rows: int


def tier_rows(
  rows_per_layer: int, staging_rows: int, layers: int, *, row_alignment: int = 8
) -> TierRows:
  """The rows of HBM and of host memory that hold the rows of `layers` layers, none recomputed.

  Each push sends its first `staging_rows` rows to the host, or all if it has no more, and keeps the
  others in HBM. The rows that the last push staged are still in the stage when the stash is sealed;
  room for them in host memory is needed all the same, because a push stages no more than that has
  room for.

  Both are shared by all layers. Of a push that has more rows, HBM takes what is not staged as far
  as it reaches, and host memory the rest, at once, with nothing to hide behind; it is stored if its
  tiles are no more than what is free in both. So the sum over all layers counts, as with one tier,
  and `rows_per_layer` may be the expected rows times a `margin`.

  Args:
    rows_per_layer: rows of a push.
    staging_rows: of `Stash.empty`, zero or more; see `hidden_rows`. Rounded up to `row_alignment`.
    layers: layers that push into the stash.
    row_alignment: each part of a push starts on a multiple of this many rows: 8, or 32 if any
      residual has one-byte elements. A stash of two tiers has no pages.

  Returns:
    `layers * (rows - staged)` and `layers * staged`, with `rows` those of a push in whole tiles and
    `staged` the smaller of `rows` and `staging_rows`.
  """
  rows_per_layer, layers, row_alignment = _positive_ints(
    rows_per_layer=rows_per_layer, layers=layers, row_alignment=row_alignment
  )
  staging_rows = _zero_or_more("staging_rows", staging_rows)
  rows = round_up(rows_per_layer, row_alignment)
  staged = min(rows, round_up(staging_rows, row_alignment))
  return TierRows(layers * (rows - staged), layers * staged)


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


def _zero_or_more(name, value) -> int:
  if not _is_integer(value) or value < 0:
    raise ValueError(f"{name}={describe(value)} must be an integer, zero or more")
  return int(value)


def _is_integer(value):
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(name, value, what, is_right) -> float:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_number or not math.isfinite(value) or not is_right(value):
    raise ValueError(f"{name}={describe(value)} must be a finite number, {what}")
  return float(value)
