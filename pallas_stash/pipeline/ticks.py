"""When the passes of a schedule run, and the tick table by which an executor runs them."""

import collections
from collections.abc import Callable
import dataclasses
import itertools
import numbers
from typing import NamedTuple

import numpy as np

from pallas_stash.arguments import describe
from pallas_stash.pipeline.schedules import Pass, Schedule

KINDS = "", "B", "I", "W"  # Of backward passes, as numbers in the table.


class Timed(NamedTuple):
  """A step and when it runs: from `start` until `end`."""

  step: tuple[Pass, ...]
  start: float
  end: float


@dataclasses.dataclass(frozen=True)
class Table:
  """What each rank does at each tick, and where in its buffers it finds and leaves things.

  A rank has three buffers: "x" for inputs, "saved" for what forward passes leave to backward
  passes, and "dy" for gradients of outputs. Within a tick a forward pass comes first, then a
  backward pass; behind both, what they made travels along the routes. Inputs, too, stay until the
  last backward pass of the microbatch.

  Attributes:
    columns: of each name an int32[ticks, ranks]:
      "f", whether a forward pass runs; "b", which backward pass does, an index of `KINDS`;
      "f_chunk", "f_microbatch", "b_chunk", "b_microbatch", of what;
      "f_x", "f_saved", "b_x", "b_saved", "b_dy", places in the buffers that they read or write;
      `route_name(*route)` for each of `routes`, the place for what arrives behind the tick.
      A place that does not matter is the one behind the last: where no pass runs or nothing
      arrives, and of the inputs of the first stage, which are no other's output.
    routes: (what, shift) of everything that is ever sent, to the rank `shift` further around: "y",
      an output, to "x"; "dx", a gradient of inputs, and "d_loss", that of the last stage's output,
      to "dy".
    places: of "x", "saved" and "dy", how many a rank needs at most.
    in_flight: int[ranks, chunks], most microbatches between their forward and last backward pass.
  """

  columns: dict[str, np.ndarray]
  routes: tuple[tuple[str, int], ...]
  places: dict[str, int]
  in_flight: np.ndarray


def route_name(what: str, shift: int) -> str:
  """Returns the name of the column of a route, such as "y+1"."""
  return f"{what}{shift:+d}"


def timeline(
  schedule: Schedule, *, forward: float = 1, inputs: float = 1, weights: float = 1
) -> list[list[Timed]]:
  """Runs a schedule on paper: every step starts as soon as its rank and what it needs are there.

  A forward pass needs that of the stage before; a backward pass its own forward pass and the
  gradients of inputs of the stage behind; "W" its own "I". Sending takes no time.

  Args:
    schedule: to run.
    forward, inputs, weights: what passes "F", "I" and "W" take. "B" takes `inputs + weights`, and a
      step the sum of its passes: one core runs them one after the other.

  Returns:
    Of each rank, its steps and their times.

  Raises:
    ValueError: for programs that wait for each other, or times that are not positive.
  """
  times = {"F": forward, "I": inputs, "W": weights}
  for name, value in zip(("forward", "inputs", "weights"), times.values(), strict=True):
    if not isinstance(value, numbers.Real) or not value > 0:
      raise ValueError(f"{name}={describe(value)} must be a number above zero.")
  times["B"] = inputs + weights
  return _run(schedule, lambda step: sum(times[one.kind] for one in step))


def idle_share(
  schedule: Schedule, *, forward: float = 1, inputs: float = 1, weights: float = 1
) -> float:
  """Returns the share of their time, of all ranks until the last is done, in which ranks idle.

  Args: as for `timeline`.
  """
  runs = timeline(schedule, forward=forward, inputs=inputs, weights=weights)
  busy = sum(timed.end - timed.start for run in runs for timed in run)
  there = len(runs) * max(run[-1].end for run in runs)
  return (there - busy) / there


def tabulate(schedule: Schedule) -> Table:
  """Makes the table in which every rank does its next step at the first tick at which it can.

  What one tick makes, on whatever rank, can be used from the next tick on. A value takes the first
  place that is free, and its place is free behind its last use: a buffer has as many places as
  there are values in it at most, no more.

  Args:
    schedule: of any placement.

  Raises:
    ValueError: for programs that wait for each other; it says of each rank for what.
  """
  runs, ranks = _run(schedule, lambda step: 1), len(schedule.programs)
  passes = [
    (rank, tick, one) for rank, run in enumerate(runs) for step, tick, _ in run for one in step
  ]
  place_of = _places(_values(schedule, passes))
  places = dict.fromkeys(("x", "saved", "dy"), 0)
  for value, place in place_of.items():
    places[value.buffer] = max(places[value.buffer], place + 1)
  routes = tuple(sorted({value.route for value in place_of if value.route}))

  nothing = dict.fromkeys(("f", "b", "f_chunk", "f_microbatch", "b_chunk", "b_microbatch"), 0)
  nothing |= {f"{way}_{buffer}": places[buffer] for way, buffer in _READS}
  nothing |= {route_name(*route): places[_BUFFER_OF[route[0]]] for route in routes}
  ticks = max(run[-1].end for run in runs)
  columns = {name: np.full((ticks, ranks), number, np.int32) for name, number in nothing.items()}
  at = {}
  for value, place in place_of.items():
    at[value.buffer, value.rank, value.chunk, value.microbatch] = place
    if value.route:
      columns[route_name(*value.route)][value.first - 1, value.rank] = place
  for rank, tick, one in passes:
    way, of = "f" if one.kind == "F" else "b", (one.chunk, one.microbatch)
    columns[way][tick, rank] = 1 if way == "f" else KINDS.index(one.kind)
    columns[f"{way}_chunk"][tick, rank], columns[f"{way}_microbatch"][tick, rank] = of
    for other_way, buffer in _READS:
      if other_way == way:  # The first stage finds no input in a buffer.
        columns[f"{way}_{buffer}"][tick, rank] = at.get((buffer, rank, *of), places[buffer])

  in_flight = np.array([schedule.in_flight(rank).max(0) for rank in range(ranks)])
  return Table(columns, routes, places, in_flight)


_BUFFER_OF = {"y": "x", "dx": "dy", "d_loss": "dy"}  # Of what is sent.
_READS = ("f", "x"), ("f", "saved"), ("b", "x"), ("b", "saved"), ("b", "dy")  # Or writes.


class _Value(NamedTuple):
  """What is in a buffer of a rank, from tick `first` until `last`; by a route, if it was sent."""

  buffer: str
  rank: int
  chunk: int
  microbatch: int
  first: int
  last: int
  route: tuple[str, int] | None = None


def _values(schedule, passes):
  """Returns everything that is ever in a buffer, given (rank, tick, pass) of all passes."""
  tick_of = {}  # "W" stands for the last backward pass, be it "B" or "W".
  for rank, tick, one in passes:
    for kind in "IW" if one.kind == "B" else one.kind:
      tick_of[kind, schedule.stages[rank, one.chunk], one.microbatch] = tick
  placement, ranks, values = schedule.placement, len(schedule.programs), []
  back = (ranks - 1) // 2  # Shifts go the shorter way around.
  for stage, microbatch in itertools.product(range(len(placement)), range(schedule.microbatches)):
    rank, chunk = placement[stage]
    last = tick_of["W", stage, microbatch]
    values.append(_Value("saved", rank, chunk, microbatch, tick_of["F", stage, microbatch], last))
    is_last = stage == len(placement) - 1
    comes_from = [("d_loss", "F", stage) if is_last else ("dx", "I", stage + 1)]
    comes_from += [("y", "F", stage - 1)] if stage else []
    for what, kind, source in comes_from:
      first = tick_of[kind, source, microbatch] + 1
      route = what, (rank - placement[source][0] + back) % ranks - back
      values.append(_Value(_BUFFER_OF[what], rank, chunk, microbatch, first, last, route))
  return values


def _places(values):
  """Returns the place of each value: the first that is free when it comes."""
  place_of, taken_until = {}, collections.defaultdict(list)
  for value in sorted(values, key=lambda value: value.first):
    until = taken_until[value.buffer, value.rank]
    place = next((place for place, last in enumerate(until) if last < value.first), len(until))
    until[place : place + 1] = [value.last]
    place_of[value] = place
  return place_of


def _run(schedule: Schedule, time_of: Callable) -> list[list[Timed]]:
  """Returns the steps of each rank, as early as can be, where one takes `time_of(step)`."""
  ends, runs = {}, [[] for _ in schedule.programs]
  to_do = sum(map(len, schedule.programs))
  while to_do:
    before = to_do
    for rank, (run, steps) in enumerate(zip(runs, schedule.programs, strict=True)):
      for step in steps[len(run) :]:
        needs = [need for one in step for need in _needs(schedule, rank, one)]
        if any(need not in ends for need in needs):
          break
        start = max([run[-1].end if run else 0, *map(ends.get, needs)])
        run.append(Timed(step, start, start + time_of(step)))
        for one in step:
          done = one.kind.replace("B", "I"), schedule.stages[rank, one.chunk], one.microbatch
          ends[done] = run[-1].end
        to_do -= 1
    if to_do == before:
      raise ValueError(_deadlock(schedule, runs, ends))
  return runs


def _needs(schedule, rank, one):
  """Returns (kind, stage, microbatch) of what a pass needs; "B" is as good as "I"."""
  stage, microbatch = schedule.stages[rank, one.chunk], one.microbatch
  if one.kind == "F":
    return [("F", stage - 1, microbatch)] if stage else []
  if one.kind == "W":
    return [("I", stage, microbatch)]
  behind = [("I", stage + 1, microbatch)] if stage + 1 < len(schedule.placement) else []
  return [("F", stage, microbatch), *behind]


def _deadlock(schedule, runs, ends):
  waits = []
  for rank, (run, steps) in enumerate(zip(runs, schedule.programs, strict=True)):
    for one in steps[len(run)] if len(run) < len(steps) else ():
      for kind, stage, microbatch in _needs(schedule, rank, one):
        if (kind, stage, microbatch) not in ends:
          of_rank, chunk = schedule.placement[stage]
          way = "forward" if kind == "F" else "backward"
          waits.append(
            f"rank {rank}, step {len(run)}: {one} waits for the {way} pass of chunk {chunk},"
            f" microbatch {microbatch}, on rank {of_rank}"
          )
  return f"{schedule.name}: the programs wait for each other; {'; '.join(waits)}."
