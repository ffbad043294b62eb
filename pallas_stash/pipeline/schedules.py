"""Schedules: what each rank of a pipeline runs, in order."""

import collections
import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

from pallas_stash.arguments import positive_int


class Pass(NamedTuple):
  """One pass of one microbatch through one stage, named by the rank's chunk.

  Attributes:
    kind: "F" forward; "B" backward; or the backward pass in two: "I" for gradients of inputs, which
      the stage before waits for, and later "W" for gradients of weights, which nothing waits for.
    chunk: of the rank.
    microbatch: of the step.
  """

  kind: str
  chunk: int
  microbatch: int

  def __str__(self):
    return f"{self.kind} of chunk {self.chunk}, microbatch {self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
  """What each rank runs, and which stages it holds. Whether it can be run, `tabulate` finds out.

  Attributes:
    name: for people.
    programs: of each rank, its steps in order. A step is a tuple of passes that run at once: at
      most one forward pass and at most one of the others.
    placement: (rank, chunk) of each stage.
  """

  name: str
  programs: tuple[tuple[tuple[Pass, ...], ...], ...]
  placement: tuple[tuple[int, int], ...]

  def __post_init__(self):
    ranks, microbatches = range(len(self.programs)), range(self.microbatches)
    if not microbatches:
      raise ValueError(f"{self.name}: programs={self.programs} must run a pass.")
    if {rank for rank, _ in self.placement} != set(ranks):
      raise ValueError(f"{self.name}: placement={self.placement} must use ranks {[*ranks]}, all.")
    if len(self.stages) < len(self.placement):
      raise ValueError(f"{self.name}: placement={self.placement} must not name a chunk twice.")
    for rank, steps in enumerate(self.programs):
      kinds = collections.defaultdict(str)
      for step in steps:
        if not step or len({one.kind == "F" for one in step}) < len(step):
          raise ValueError(
            f"{self.name}: rank {rank} runs {' + '.join(map(str, step)) or 'nothing'} in one step,"
            " which must be one forward pass, one of the others, or both."
          )
        for one in step:
          kinds[one.chunk, one.microbatch] += one.kind
      held = {chunk for of_rank, chunk in self.placement if of_rank == rank}
      for key in sorted(kinds.keys() | set(itertools.product(held, microbatches))):
        if key[0] not in held or "".join(sorted(kinds[key])) not in ("BF", "FIW"):
          raise ValueError(
            f"{self.name}: rank {rank} runs '{kinds[key]}' of chunk {key[0]}, microbatch {key[1]};"
            f" it must run F and B, or F, I and W, once each, of its chunks {sorted(held)} only."
          )

  @functools.cached_property
  def stages(self) -> dict[tuple[int, int], int]:
    """The stage of each (rank, chunk)."""
    return {place: stage for stage, place in enumerate(self.placement)}

  @property
  def chunks(self) -> int:
    """The most chunks that a rank holds."""
    return 1 + max(chunk for _, chunk in self.placement)

  @functools.cached_property
  def microbatches(self) -> int:
    """The microbatches of a step, numbered from 0."""
    return len({one.microbatch for steps in self.programs for step in steps for one in step})

  def in_flight(self, rank: int) -> np.ndarray:
    """Counts what a rank must keep for backward passes to come.

    The order of the steps alone decides it, not how long they take. A step that runs a forward and
    a backward pass at once holds both.

    Args:
      rank: of the pipeline.

    Returns:
      int[steps, chunks]: in each step, the microbatches between the forward pass and the last
      backward pass ("B" or "W"), both included.
    """
    counts, of_steps = np.zeros(self.chunks, int), []
    for step in self.programs[rank]:
      for one in step:
        counts[one.chunk] += one.kind == "F"
      of_steps.append(counts.copy())
      for one in step:
        counts[one.chunk] -= one.kind in "BW"
    return np.array(of_steps)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
  """1F1B: a stage a rank, which alternates forward and backward passes once it has filled.

  As in Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush).
  In flight are at most `min(ranks - rank, microbatches)` microbatches.

  Args:
    ranks: of the pipeline.
    microbatches: of a training step.

  Raises:
    ValueError: for arguments that are not positive.
  """
  ranks, microbatches = _sizes(ranks=ranks, microbatches=microbatches)

  def program(rank):
    warmup = min(ranks - 1 - rank, microbatches)
    return "F0 " * warmup + "F0 B0 " * (microbatches - warmup) + "B0 " * warmup

  return _schedule("1F1B", map(program, range(ranks)), _ring(ranks))


def interleaved(ranks: int, chunks: int, microbatches: int) -> Schedule:
  """Interleaved 1F1B: `chunks` stages a rank, which fills in a fraction of the time.

  As in Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
  Megatron-LM", section 2.2. In flight are, of all chunks together, at most
  `2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1` microbatches, or all there are,
  `chunks * microbatches`, if they are fewer: that is with `microbatches == ranks` only.

  Args:
    ranks: of the pipeline.
    chunks: of a rank, which holds every `ranks`-th stage.
    microbatches: of a training step, a multiple of `ranks`.

  Raises:
    ValueError: for arguments that are not positive, or another number of microbatches.
  """
  ranks, chunks, microbatches = _sizes(ranks=ranks, chunks=chunks, microbatches=microbatches)
  if microbatches % ranks:
    raise ValueError(f"{microbatches=} must be a multiple of {ranks=}.")
  rounds = microbatches // ranks
  forward = [f"F{chunk}" for chunk in range(chunks) for _ in range(ranks)] * rounds
  backward = [f"B{chunk}" for chunk in reversed(range(chunks)) for _ in range(ranks)] * rounds

  def program(rank):
    warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forward))
    pairs = zip(forward[warmup:], backward, strict=False)
    steady = [name for pair in pairs for name in pair]
    return " ".join(forward[:warmup] + steady + backward[len(forward) - warmup :])

  return _schedule("interleaved 1F1B", map(program, range(ranks)), _ring(ranks, chunks))


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
  """Zero bubble, ZB-H1: 1F1B whose gradients of weights wait for time that 1F1B leaves idle.

  As in Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.1: no rank keeps more than the
  first of 1F1B does, and each may keep as much. So rank r runs the gradients of weights r
  microbatches behind those of inputs, and `min(ranks, microbatches)` microbatches are in flight on
  each rank. Where the three passes take the same time, one unit, a rank idles for `ranks - 1`
  units, of 1F1B for `3 * (ranks - 1)`.

  Args: as for `one_f_one_b`.

  Raises:
    ValueError: for arguments that are not positive.
  """
  ranks, microbatches = _sizes(ranks=ranks, microbatches=microbatches)

  def program(rank):
    warmup, late = min(ranks - 1 - rank, microbatches), min(rank, microbatches)
    names = ["F0"] * warmup
    for microbatch in range(microbatches):
      names += ["F0"] * (microbatch < microbatches - warmup) + ["I0"] + ["W"] * (microbatch >= rank)
    return " ".join(names + ["W"] * late)

  return _schedule("ZB-H1", map(program, range(ranks)), _ring(ranks))


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
  """DualPipeV: a forward pass of one chunk runs at once with a backward pass of the other.

  As in `dualpipev.py` of github.com/deepseek-ai/DualPipe, whose eight phases these are. Stages go
  down the ranks and up again: a rank holds stage `rank` and stage `2 * ranks - 1 - rank`. In flight
  are at most `2 * ranks - rank` microbatches of the first and `rank + 1` of the second.

  Args:
    ranks: of the pipeline.
    microbatches: of a training step, at least `2 * ranks`.

  Raises:
    ValueError: for arguments that are not positive, or too few microbatches.
  """
  ranks, microbatches = _sizes(ranks=ranks, microbatches=microbatches)
  if microbatches < 2 * ranks:
    raise ValueError(f"{microbatches=} must be at least {2 * ranks}, twice {ranks=}.")

  def program(rank):
    below, above = ranks - 1 - rank, rank + 1
    steady = "F0+B1 F1+B0 " * (microbatches - 2 * ranks + above)
    if not below:  # As there: the last rank begins one after the other.
      steady = steady.replace("F0+B1", "F0 B1", 1)
    drain = "B1 B0 " * above  # From the middle on, gradients of weights are left for later gaps.
    middle = len(drain) // 2
    drain = drain[:middle] + drain[middle:].replace("B", "I")
    fill = "F0 " * (2 * below) + "F0 F1 " * above + "I1 W F1 " * below
    return fill + steady + "B1 F1+B0 " * below + drain + "W I0 " * below + "W " * above

  down = [(rank, 0) for rank in range(ranks)]
  up = [(rank, 1) for rank in reversed(range(ranks))]
  return _schedule("DualPipeV", map(program, range(ranks)), (*down, *up))


def _sizes(**values):
  return [positive_int(name, value) for name, value in values.items()]


def _ring(ranks, chunks=1):
  """Returns the placement in which a rank holds every `ranks`-th stage."""
  return tuple((rank, chunk) for chunk in range(chunks) for rank in range(ranks))


def _schedule(name, programs, placement):
  return Schedule(name, tuple(map(_steps, programs)), placement)


def _steps(program):
  """Returns the steps that a text such as "F0 F0+I1 W" means.

  A name is a kind and a chunk; "W" belongs to the first "I" that has none yet. Every chunk takes
  its microbatches in order, forward and backward.
  """
  counts, without_weights = collections.Counter(), collections.deque()

  def next_pass(name):
    if name == "W":
      return without_weights.popleft()._replace(kind="W")
    way = name.replace("I", "B")
    one = Pass(name[0], int(name[1:]), counts[way])
    counts[way] += 1
    if one.kind == "I":
      without_weights.append(one)
    return one

  return tuple(tuple(map(next_pass, names.split("+"))) for names in program.split())
