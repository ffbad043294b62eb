"""Rows of a stash under a schedule: by a stash of rows in a dict, which passes fill and empty."""

import itertools
import math

import pytest

from pallas_stash import pipeline

pytestmark = pytest.mark.once

SCHEDULES = [
  pipeline.one_f_one_b(4, 12),
  pipeline.interleaved(4, 2, 12),
  pipeline.interleaved(2, 3, 8),
  pipeline.zero_bubble(4, 12),
  pipeline.dual_pipe_v(4, 12),
]


def most_rows(schedule, rank, pushes, rows):
  """Returns the most rows in a stash: a forward pass pushes, the last backward pass frees."""
  held, most = {}, 0
  for step in schedule.programs[rank]:
    for one in sorted(step, key=lambda one: one.kind != "F"):  # Forward passes come first.
      key = one.chunk, one.microbatch
      if one.kind == "F":
        held[key] = pushes[schedule.placement.index((rank, one.chunk))] * rows
        most = max(most, sum(held.values()))
      elif one.kind != "I":
        del held[key]
  assert not held
  return most


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("page_rows", [None, 128, 512])
def test_it_is_what_passes_push(schedule, page_rows):
  stages = len(schedule.placement)
  of_stages = [1] * stages, list(range(stages)), [3, 1] * (stages // 2)
  for pushes, expected, margin in itertools.product(of_stages, [1000, 1024], [1, 1.1]):
    unit = page_rows or 8
    rows = math.ceil(math.ceil(expected * margin * (1 - 1e-12)) / unit) * unit
    options = dict(pushes=pushes, margin=margin, page_rows=page_rows)
    found = [
      pipeline.capacity_rows(schedule, rank, expected, **options)
      for rank in range(len(schedule.programs))
    ]
    assert found == [most_rows(schedule, rank, pushes, rows) for rank in range(len(found))]
    assert pipeline.capacity_rows(schedule, None, expected, **options) == max(found)


def test_under_spmd_every_rank_has_the_largest():
  schedule = pipeline.one_f_one_b(4, 8)
  of_rank = [pipeline.capacity_rows(schedule, rank, 100, page_rows=128) for rank in range(4)]
  assert of_rank == [4 * 128, 3 * 128, 2 * 128, 128]
  assert pipeline.capacity_rows(schedule, None, 100, page_rows=128) == 4 * 128
  more_behind = dict(pushes=[1, 1, 1, 9], page_rows=128)
  assert pipeline.capacity_rows(schedule, 0, 100, **more_behind) == 4 * 128
  assert pipeline.capacity_rows(schedule, None, 100, **more_behind) == 9 * 128


def test_each_push_takes_whole_pages():
  schedule = pipeline.one_f_one_b(1, 1)
  rows = lambda expected, **options: pipeline.capacity_rows(schedule, 0, expected, **options)
  assert rows(513, pushes=3, page_rows=512) == 3 * 1024
  assert rows(513, pushes=3) == 3 * 520
  assert rows(513, pushes=3, row_alignment=32) == 3 * 544
  assert rows(10, margin=1.1, row_alignment=1) == 11  # Not the float above it.


def test_chunks_share_what_they_do_not_need_at_once():
  """The first rank holds 4 and 2 microbatches of its chunks at most, and 5 of both."""
  schedule = pipeline.interleaved(2, 2, 4)
  assert schedule.in_flight(0).max(0).tolist() == [4, 2]
  assert pipeline.capacity_rows(schedule, 0, 8) == 5 * 8


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(schedule="1F1B"), "schedule='1F1B' must be a Schedule"),
    (dict(rank=2), "rank=2 must be one of 2, 0 to 1, or None"),
    (dict(rank=-1), "rank=-1 must be one of 2"),
    (dict(rank=0.0), "rank=0.0 must be a static int"),
    (dict(expected_rows=0), "expected_rows=0 must be positive"),
    (dict(pushes=[1]), r"pushes=\[1\] must be one number, or 2"),
    (dict(pushes=[1, -1]), r"pushes\[1\]=-1 must be an integer, zero or more"),
    (dict(margin=0), "margin=0 must be a finite number above zero"),
    (dict(margin=float("inf")), "margin=inf must be a finite number above zero"),
    (dict(page_rows=0), "page_rows=0 must be positive"),
    (dict(row_alignment=0), "row_alignment=0 must be positive"),
  ],
)
def test_errors_name_the_value(change, message):
  good = dict(schedule=pipeline.one_f_one_b(2, 2), rank=0, expected_rows=8)
  with pytest.raises(ValueError, match=f"^{message}"):
    pipeline.capacity_rows(**(good | change))
