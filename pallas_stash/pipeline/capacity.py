"""How many rows a stash needs under a schedule."""

from collections.abc import Sequence
import math
import numbers

import numpy as np

from pallas_stash.arguments import check_type, positive_fraction, positive_int, static_int
from pallas_stash.kernels.tiling import round_up
from pallas_stash.pipeline.partition import each, whole_number
from pallas_stash.pipeline.schedules import Schedule


def capacity_rows(
  schedule: Schedule,
  rank: int | None,
  expected_rows: int,
  *,
  pushes: int | Sequence[int] = 1,
  margin: numbers.Real = 1,
  page_rows: int | None = None,
  row_alignment: int = 8,
) -> int:
  """The rows of a stash that holds what the schedule keeps in flight.

  A forward pass pushes the rows of each layer of its stage, and the last backward pass of the same
  microbatch frees them. So the rows that a rank holds at once are, at the step of its program at
  which this is most,

      sum(in_flight of chunk * pushes of its stage) * rows of a push

  over its chunks. That is exact: chunks that are not fullest together share the rows.

  Args:
    schedule: that the ranks run.
    rank: of the pipeline. None for the largest of all ranks: under SPMD one program runs on every
      rank, whose stash has one size, and that of each rank's own would be too small for others.
    expected_rows: of a push, see `sizing.expected_rows`.
    pushes: of a forward pass through a stage, one for all stages or one each: its layers that push
      into the stash, as of `layer_partition`.
    margin: the rows to have room for, as a multiple of the expected rows, read as written: 1.1 is
      eleven tenths. Pushes share it.
    page_rows: of the stash. A push takes whole pages, half a page more than its rows on average; so
      each is rounded up.
    row_alignment: without pages, what each push is rounded up to: 8, or 32 if any residual has
      one-byte elements.

  Returns:
    The rows, a multiple of `page_rows` or `row_alignment`.

  Raises:
    ValueError: for a rank that is not there, or numbers that are not positive. Stages may push
      nothing.
  """
  check_type("schedule", schedule, Schedule, "a Schedule")
  ranks = range(len(schedule.programs))
  if rank is not None:
    if static_int("rank", rank) not in ranks:
      raise ValueError(f"{rank=} must be one of {len(ranks)}, 0 to {len(ranks) - 1}, or None.")
    ranks = [rank]
  expected_rows = positive_int("expected_rows", expected_rows)
  unit = "row_alignment" if page_rows is None else "page_rows"
  unit = positive_int(unit, row_alignment if page_rows is None else page_rows)
  rows = round_up(math.ceil(expected_rows * positive_fraction("margin", margin)), unit)
  of_stage = each("pushes", pushes, len(schedule.placement), whole_number)
  most = 0
  for of_rank in ranks:
    of_chunk = np.zeros(schedule.chunks, int)
    for stage, (other, chunk) in enumerate(schedule.placement):
      of_chunk[chunk] += of_stage[stage] * (other == of_rank)
    most = max(most, int((schedule.in_flight(of_rank) @ of_chunk).max()))
  return most * rows
