"""Which layers of a model each stage of a pipeline gets."""

from collections.abc import Callable, Iterable, Sequence
import fractions
import itertools
import math
import numbers
import operator
from typing import Any, NamedTuple

from pallas_stash.arguments import as_list, check_type, describe
from pallas_stash.pipeline.schedules import Schedule


def layer_partition(
  schedule: Schedule,
  layer_times: Sequence[numbers.Real],
  *,
  budget_bytes: int | Sequence[int] | None = None,
  weight_bytes: int | Sequence[int] = 0,
  activation_bytes: int | Sequence[int] = 0,
  stage_times: numbers.Real | Sequence[numbers.Real] = 0,
  stage_bytes: int | Sequence[int] = 0,
) -> list[int]:
  """Cuts the layers of a model into stages, as evenly in time as the memory of the ranks allows.

  What is balanced is a part: one stage; or in the placement of `dual_pipe_v` both stages of a rank,
  s and S-1-s of S, which it runs forward and backward for each microbatch. The time of a part is
  the sum over its layers, and over its stages of `stage_times`. Its bytes are the sum over its
  stages of

      sum(weight_bytes) + live * sum(activation_bytes) + stage_bytes

  where `live` is the most microbatches in flight, of `Schedule.in_flight`. A part may take the
  budget of its rank; of interleaved chunks, each stage an equal share of it.

  Among all partitions into stages of one layer or more that keep within the budgets, it is one of
  which the slowest part is fastest, because all wait for that; among those, of the least sum of
  squared times of stages; then with the fewest layers in the last stage, then in the first, which
  have the loss and the embedding besides; then with more layers in early parts. That is exact, by
  dynamic programming over where stages begin, in integers. With uniform layers, stages of one part
  each differ by one layer at most, and those at the ends have no more than others.

  Args:
    schedule: whose stages these are.
    layer_times: of each layer, for a forward and a backward pass, in any unit.
    budget_bytes: of a rank, one for all or one each; None for no limit.
    weight_bytes: of a layer, one for all or one each: parameters, gradients, optimizer state.
    activation_bytes: of a layer, one for all or one each: what a microbatch in flight keeps.
    stage_times: what a stage takes besides its layers, one for all or one each.
    stage_bytes: what a stage needs besides, one for all or one each.

  Returns:
    The number of layers of each stage.

  Raises:
    ValueError: for negative numbers, or another count of them; for fewer layers than stages; and
      for budgets that no partition keeps. It then says how many bytes more are needed, and where,
      for the partition that exceeds a budget by least.
  """
  check_type("schedule", schedule, Schedule, "a Schedule")
  layers = len(as_list("layer_times", layer_times, "numbers"))
  ranks, stages = len(schedule.programs), len(schedule.placement)
  if layers < stages:
    raise ValueError(f"layer_times of {layers} layers must be of {stages} or more, one a stage.")
  layer_times = each("layer_times", layer_times, layers, exact_number)
  stage_times = each("stage_times", stage_times, stages, exact_number)
  # In a unit of which all are multiples: integers are exact, and fast.
  unit = math.lcm(*(time.denominator for time in (*layer_times, *stage_times)))
  rank_of = [rank for rank, _ in schedule.placement]
  is_vee = stages == 2 * ranks and rank_of == rank_of[::-1]
  parts = [(s, stages - 1 - s) for s in range(ranks)] if is_vee else [(s,) for s in range(stages)]
  if budget_bytes is None:
    budgets = [math.inf] * len(parts)
  else:
    budgets = each("budget_bytes", budget_bytes, ranks, whole_number)
    shares = len(parts) // ranks  # Of a rank's budget, one for each of its parts.
    budgets = [budgets[rank_of[part[0]]] // shares for part in parts]
  weights = each("weight_bytes", weight_bytes, layers, whole_number)
  activations = each("activation_bytes", activation_bytes, layers, whole_number)
  peaks = [schedule.in_flight(rank).max(0) for rank in range(ranks)]
  live = [int(peaks[rank][chunk]) for rank, chunk in schedule.placement]
  model = _Model(
    parts=parts,
    budgets=budgets,
    times=_sums(int(time * unit) for time in layer_times),
    bytes=[_sums(w + n * a for w, a in zip(weights, activations, strict=True)) for n in live],
    stage_times=[int(time * unit) for time in stage_times],
    stage_bytes=each("stage_bytes", stage_bytes, stages, whole_number),
  )

  # The slowest part is hardly slower than the mean, mostly: few partitions are to be looked at.
  whole = model.times[-1] + sum(model.stage_times)
  mean = whole // len(parts)
  most_time = mean + mean // 8 + 1
  while not (fastest := _best(model, max, lambda share: share.time, -1, most_time)):
    if most_time >= whole:
      excess, part = _least_excess(model, whole)
      where = f"rank {rank_of[part[0]]}, stage{'s' * is_vee} {' and '.join(map(str, part))}"
      raise ValueError(
        f"budget_bytes={describe(budget_bytes)} must be more: no partition of {layers} layers keeps"
        f" within it, and the one that exceeds it by least needs {excess} bytes more on {where}."
      )
    most_time += most_time - mean

  def unevenness(share):
    sizes = dict(zip(parts[share.part], share.sizes, strict=True))
    ends = sizes.get(stages - 1, 0), sizes.get(0, 0)
    return sum(time**2 for time in share.times), *ends

  add = lambda one, other: tuple(map(operator.add, one, other))
  _, negative_sizes = _best(model, add, unevenness, (0, 0, 0), fastest[0])
  of_stage = dict(zip(itertools.chain(*parts), negative_sizes, strict=True))
  return [-of_stage[stage] for stage in range(stages)]


class _Share(NamedTuple):
  """What a part may get: layers and time of each of its stages, and bytes above its budget."""

  part: int
  sizes: list[int]
  times: list[int]
  excess: int

  @property
  def time(self):
    return sum(self.times)


class _Model(NamedTuple):
  """Layers to be cut, and limits.

  Attributes:
    parts: the stages of each. A part takes layers from the front of those that the parts before it
      have left, for its first stage, and if it has a second, from the back for that.
    budgets: of each part.
    times: of the layers, sums over those before each, and over all.
    bytes: such sums for each stage, which may have other microbatches in flight.
    stage_times, stage_bytes: of each stage, besides.
  """

  parts: list[tuple[int, ...]]
  budgets: list[int | float]
  times: list[int]
  bytes: list[list[int]]
  stage_times: list[int]
  stage_bytes: list[int]

  def share(self, part: int, spans: list[tuple[int, int]]) -> _Share:
    """Returns the share of a part whose stages get the layers [first, last) of these spans."""
    spans = spans[: len(self.parts[part])]
    times, excess = [], -self.budgets[part]
    for stage, (first, last) in zip(self.parts[part], spans, strict=True):
      times.append(self.times[last] - self.times[first] + self.stage_times[stage])
      excess += self.bytes[stage][last] - self.bytes[stage][first] + self.stage_bytes[stage]
    return _Share(part, [last - first for first, last in spans], times, excess)


def _best(
  model: _Model,
  join: Callable,
  cost: Callable[[_Share], Any],
  nothing: Any,
  most_time: float,
  most_excess: float = 0,
) -> tuple[Any, tuple[int, ...]] | None:
  """Returns the least cost of a partition, and the negative sizes of its stages, part by part.

  Of the parts so far only the best counts of those that leave the same layers, [front, back). Of
  equal costs that is the one with more layers in early parts. None if no partition is within the
  limits.

  Args:
    model: to be cut.
    join: of the costs of several parts, one.
    cost: of what a part gets.
    nothing: the cost of no parts.
    most_time, most_excess: that any part may have.
  """
  found, later = {(0, len(model.times) - 1): (nothing, ())}, sum(map(len, model.parts))
  for part, of_part in enumerate(model.parts):
    is_pair, later = len(of_part) == 2, later - len(of_part)  # Each takes a layer at least.
    rest = most_time * (len(model.parts) - part - 1)
    reached = {}
    for (front, back), (before, sizes) in found.items():
      for stop in range(front + 1, back - later - is_pair + 1):
        for start in range(back - 1, stop + later - 1, -1) if is_pair else [back]:
          share = model.share(part, [(front, stop), (start, back)])
          if share.time > most_time or share.excess > most_excess:
            break  # More layers take more.
          if model.times[start] - model.times[stop] > rest or (not later and stop < start):
            continue
          option = join(before, cost(share)), (*sizes, *(-size for size in share.sizes))
          reached[stop, start] = min(option, reached.get((stop, start), option))
    found = reached
  return min(found.values(), default=None)


def _least_excess(model, most_time):
  """Returns how many bytes too many the fullest part has, at least, and the stages of that part."""
  fullest = lambda share: (share.excess, model.parts[share.part])
  most_excess = max(sums[-1] for sums in model.bytes) // 64 + 1
  while not (least := _best(model, max, fullest, (-math.inf,), most_time, most_excess)):
    most_excess *= 2
  return least[0]


def _sums(values: Iterable[int]) -> list[int]:
  return [0, *itertools.accumulate(values)]


def each(name: str, values: Any, count: int, convert: Callable) -> list:
  """Returns `count` numbers: those that are given, or as many of the one that is."""
  if isinstance(values, numbers.Real):
    return [convert(name, values)] * count
  values = as_list(name, values, "numbers")
  if len(values) != count:
    raise ValueError(f"{name}={describe(values)} must be one number, or {count}.")
  return [convert(f"{name}[{index}]", value) for index, value in enumerate(values)]


def whole_number(name: str, value: Any) -> int:
  """Returns an integer, zero or more."""
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
    raise ValueError(f"{name}={describe(value)} must be an integer, zero or more.")
  return int(value)


def exact_number(name: str, value: Any) -> fractions.Fraction:
  """Returns a number, zero or more, of which nothing is rounded."""
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_number or not 0 <= value < math.inf:
    raise ValueError(f"{name}={describe(value)} must be a finite number, zero or more.")
  is_integer = isinstance(value, numbers.Integral)  # NumPy's may have no ratio.
  return fractions.Fraction(*((int(value),) if is_integer else value.as_integer_ratio()))
