"""Schedules: every pass once, peaks by the published formulas, tables replayed value by value."""

import collections
import itertools

import numpy as np
import pytest

from pallas_stash import pipeline
from pallas_stash.pipeline import Pass, Schedule
from pallas_stash.pipeline.ticks import KINDS

pytestmark = pytest.mark.once

RANKS = 2, 4, 8, 16


def microbatch_counts(ranks):
  """From as many as there are ranks to four times that: both ends, and some between."""
  return sorted({ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 4 * ranks})


def schedules(ranks):
  for microbatches in {1, ranks, 2 * ranks, 3 * ranks + 1}:
    yield pipeline.one_f_one_b(ranks, microbatches)
    yield pipeline.zero_bubble(ranks, microbatches)
    if microbatches >= 2 * ranks:
      yield pipeline.dual_pipe_v(ranks, microbatches)
    if microbatches % ranks == 0:
      yield from (pipeline.interleaved(ranks, chunks, microbatches) for chunks in (1, 2, 3))


def peaks(schedule):
  """Returns of each rank the most microbatches in flight, of all chunks together."""
  return [schedule.in_flight(rank).sum(1).max() for rank in range(len(schedule.programs))]


@pytest.mark.parametrize("ranks", RANKS)
class TestPeaksInFlight:
  def test_one_f_one_b(self, ranks):
    for count in {1, ranks - 1, *microbatch_counts(ranks)}:
      wanted = [min(ranks - rank, count) for rank in range(ranks)]
      assert peaks(pipeline.one_f_one_b(ranks, count)) == wanted

  @pytest.mark.parametrize("chunks", [2, 3])
  def test_interleaved(self, ranks, chunks):
    for count in range(ranks, 4 * ranks + 1, ranks):
      found = peaks(pipeline.interleaved(ranks, chunks, count))
      wanted = [2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
      assert found == [min(peak, chunks * count) for peak in wanted]
      assert found == wanted or count == ranks  # Then there are no more than that.

  def test_zero_bubble(self, ranks):
    """Those of the first rank of 1F1B, on every rank."""
    for count in microbatch_counts(ranks):
      assert peaks(pipeline.zero_bubble(ranks, count)) == [min(ranks, count)] * ranks

  def test_dual_pipe_v(self, ranks):
    for count in microbatch_counts(ranks)[-3:]:
      assert count >= 2 * ranks
      schedule = pipeline.dual_pipe_v(ranks, count)
      of_chunks = [schedule.in_flight(rank).max(0).tolist() for rank in range(ranks)]
      assert of_chunks == [[2 * ranks - rank, rank + 1] for rank in range(ranks)]
      assert peaks(schedule) == [2 * ranks + 1] * ranks  # Both chunks are fullest at once.


class Buffer:
  """Places for values, each of which is written once, and read until it is taken out."""

  def __init__(self, places):
    self.values, self.most = [None] * places, 0

  def write(self, place, value):
    assert self.values[place] is None, f"{self.values[place]} is overwritten by {value}"
    self.values[place] = value
    self.most = max(self.most, sum(value is not None for value in self.values))

  def read(self, place, value, is_last):
    assert self.values[place] == value, f"{self.values[place]} is read for {value}"
    if is_last:
      self.values[place] = None


def replay(schedule, table):
  """Runs a table as an executor does, with names for values: (what, of which stage, microbatch).

  It knows which stage is where and what its passes need, and nothing of the programs.

  Returns:
    How often each (kind, stage, microbatch) ran, and the most values in any rank's buffers.
  """
  columns = {name: column.tolist() for name, column in table.columns.items()}
  placement, end, nowhere = schedule.placement, len(schedule.placement) - 1, table.places
  ranks = range(table.columns["f"].shape[1])
  buffers = [{name: Buffer(places) for name, places in nowhere.items()} for _ in ranks]
  ran = collections.Counter()

  def run_pass(rank, row, way, kind):
    """Returns what a pass sends."""
    stage = placement.index((rank, row[f"{way}_chunk"]))
    microbatch, buffer = row[f"{way}_microbatch"], buffers[rank]
    ran[kind, stage, microbatch] += 1
    is_last = kind in "BW"
    if stage:
      buffer["x"].read(row[f"{way}_x"], ("y", stage - 1, microbatch), is_last)
    else:
      assert row[f"{way}_x"] == nowhere["x"]
    if kind == "F":
      buffer["saved"].write(row["f_saved"], ("saved", stage, microbatch))
      name = "y" if stage < end else "d_loss"
      return {name: (name, stage, microbatch)}
    gradient = ("dx", stage + 1, microbatch) if stage < end else ("d_loss", stage, microbatch)
    buffer["dy"].read(row["b_dy"], gradient, is_last)
    buffer["saved"].read(row["b_saved"], ("saved", stage, microbatch), is_last)
    assert kind != "W" or ran["I", stage, microbatch]
    return {"dx": ("dx", stage, microbatch)} if stage and kind != "W" else {}

  for tick in range(len(columns["f"])):
    sent = []
    for rank in ranks:
      row = {name: column[tick][rank] for name, column in columns.items()}
      kinds = {"f": "F" * row["f"], "b": KINDS[row["b"]]}
      sent.append({})
      for way, kind in kinds.items():
        if kind:
          sent[rank] |= run_pass(rank, row, way, kind)
        else:
          used = {name: row[f"{way}_{name}"] for name in nowhere if f"{way}_{name}" in row}
          assert used == {name: nowhere[name] for name in used}
    for (what, shift), rank in itertools.product(table.routes, ranks):
      name, place = "x" if what == "y" else "dy", columns[f"{what}{shift:+d}"][tick][rank]
      if place != nowhere[name]:
        buffers[rank][name].write(place, sent[(rank - shift) % len(ranks)].pop(what))
    assert not any(sent), "what was sent did not arrive"

  assert not any(any(b.values) for of_rank in buffers for b in of_rank.values())
  return ran, {name: max(buffers[rank][name].most for rank in ranks) for name in nowhere}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tables_replay(ranks):
  for schedule in schedules(ranks):
    table = pipeline.tabulate(schedule)
    ran, most = replay(schedule, table)
    stages, microbatches = range(len(schedule.placement)), range(schedule.microbatches)
    assert set(ran.values()) == {1}
    for stage, microbatch in itertools.product(stages, microbatches):
      kinds = {kind for kind in "FBIW" if (kind, stage, microbatch) in ran}
      assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert most == table.places  # None is spared, and none is too many.
    assert table.places["saved"] == max(peaks(schedule))
    for column in table.columns.values():
      assert column.dtype == np.int32 and column.shape == table.columns["f"].shape
    in_flight = [schedule.in_flight(rank).max(0) for rank in range(ranks)]
    np.testing.assert_array_equal(table.in_flight, in_flight)


def test_the_largest_tables_replay():
  for schedule in (pipeline.dual_pipe_v(16, 64), pipeline.zero_bubble(16, 64)):
    table = pipeline.tabulate(schedule)
    _, most = replay(schedule, table)
    assert most == table.places


def test_replay_sees_a_place_that_is_taken():
  schedule = pipeline.one_f_one_b(4, 8)
  table = pipeline.tabulate(schedule)
  table.columns["f_saved"][1, 0] = table.columns["f_saved"][0, 0]
  with pytest.raises(AssertionError, match=r"\('saved', 0, 0\) is overwritten by"):
    replay(schedule, table)


def test_routes():
  """Neighbours only; a rank of two, or one, is its own neighbour or on both sides."""
  routes = lambda schedule: pipeline.tabulate(schedule).routes
  assert routes(pipeline.one_f_one_b(4, 4)) == (("d_loss", 0), ("dx", -1), ("y", 1))
  assert routes(pipeline.interleaved(4, 2, 4)) == (("d_loss", 0), ("dx", -1), ("y", 1))
  assert routes(pipeline.one_f_one_b(1, 4)) == (("d_loss", 0),)
  around = [("dx", shift) for shift in (-1, 0, 1)] + [("y", shift) for shift in (-1, 0, 1)]
  assert routes(pipeline.dual_pipe_v(4, 8)) == (("d_loss", 0), *around)
  assert pipeline.route_name("dx", -1) == "dx-1" and pipeline.route_name("y", 0) == "y+0"


def test_ticks_of_one_f_one_b():
  """By hand, of two ranks and three microbatches: the forward pass, then the backward pass."""
  columns = pipeline.tabulate(pipeline.one_f_one_b(2, 3)).columns
  in_words = lambda way: [
    "".join(str(m) if runs else "." for runs, m in zip(*rank, strict=True))
    for rank in zip(columns[way].T, columns[f"{way}_microbatch"].T, strict=True)
  ]
  assert in_words("f") == ["01..2...", ".0.1.2.."]
  assert in_words("b") == ["...0.1.2", "..0.1.2."]


@pytest.mark.parametrize("ranks", RANKS)
def test_idle_time(ranks):
  """In units of one pass of three: a backward pass of 1F1B is two of them."""
  for count in (ranks, 2 * ranks - 1, 4 * ranks):
    ends = lambda schedule: [run[-1].end for run in pipeline.timeline(schedule)]
    plain, zero = pipeline.one_f_one_b(ranks, count), pipeline.zero_bubble(ranks, count)
    assert max(ends(plain)) == 3 * (count + ranks - 1)
    assert max(ends(zero)) == 3 * count + ranks - 1
    assert pipeline.idle_share(plain) == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert pipeline.idle_share(zero) == pytest.approx((ranks - 1) / (3 * count + ranks - 1))
    if count % ranks == 0:  # Narayanan et al., section 2.2: V chunks fill in 1/V of the time.
      share = pipeline.idle_share(pipeline.interleaved(ranks, 3, count))
      assert share == pytest.approx((ranks - 1) / (3 * count + ranks - 1))


def test_idle_time_of_unequal_passes():
  """Qi et al., table 2: (P - 1)(F + I - W) where the gradients of weights are the shortest."""
  for times in [(3, 3, 2), (4, 5, 3), (2.5, 2, 1)]:
    forward, inputs, weights = times
    options = dict(forward=forward, inputs=inputs, weights=weights)
    runs = pipeline.timeline(pipeline.zero_bubble(4, 12), **options)
    assert max(run[-1].end for run in runs) == 12 * sum(times) + 3 * (forward + inputs - weights)
    assert pipeline.idle_share(pipeline.one_f_one_b(4, 12), **options) == pytest.approx(3 / 15)


def test_a_timeline_is_in_order():
  for schedule in schedules(4):
    for steps, run in zip(schedule.programs, pipeline.timeline(schedule, weights=0.5), strict=True):
      assert tuple(timed.step for timed in run) == steps
      assert all(one.end <= other.start for one, other in itertools.pairwise(run))


def steps(text):
  """Steps of one pass each, of chunk 0: "F1 B0" and the like."""
  return tuple((Pass(name[0], 0, int(name[1:])),) for name in text.split())


def two_ranks(first, second):
  return Schedule("mine", (steps(first), steps(second)), ((0, 0), (1, 0)))


@pytest.mark.parametrize("run", [pipeline.tabulate, pipeline.timeline])
def test_a_deadlock_says_where(run):
  run(two_ranks("F0 F1 B0 B1", "F0 B0 F1 B1"))
  with pytest.raises(ValueError) as error:
    run(two_ranks("F0 B0 F1 B1", "F0 F1 B0 B1"))
  assert str(error.value) == (
    "mine: the programs wait for each other; rank 0, step 1: B of chunk 0, microbatch 0 waits for"
    " the backward pass of chunk 0, microbatch 0, on rank 1; rank 1, step 1: F of chunk 0,"
    " microbatch 1 waits for the forward pass of chunk 0, microbatch 1, on rank 0."
  )
  with pytest.raises(ValueError, match="rank 1, step 0: B of .* waits for the forward pass"):
    run(two_ranks("F0 B0", "B0 F0"))
  with pytest.raises(ValueError, match="rank 1, step 1: W of .* waits for the backward pass"):
    run(two_ranks("F0 B0", "F0 W0 I0"))


def test_a_step_does_not_feed_itself():
  together = ((Pass("F", 0, 0), Pass("B", 0, 0)),)
  with pytest.raises(ValueError, match="rank 0, step 0: B of .* waits for the forward pass"):
    pipeline.tabulate(Schedule("mine", (together,), ((0, 0),)))


@pytest.mark.parametrize(
  "first, message",
  [
    ("F0 F0 B0", "runs 'FFB' of chunk 0, microbatch 0; it must run F and B, or F, I and W, once"),
    ("F0", "runs 'F' of chunk 0, microbatch 0; it must run"),
    ("F0 I0", "runs 'FI' of chunk 0, microbatch 0; it must run"),
    ("F0 B0 W0", "runs 'FBW' of chunk 0, microbatch 0; it must run"),
    ("F1 B1", "runs '' of chunk 0, microbatch 0; it must run"),
    ("F0 B0 F2 B2", "runs '' of chunk 0, microbatch 1; it must run"),
  ],
)
def test_programs_run_every_pass_once(first, message):
  with pytest.raises(ValueError, match=f"mine: rank 0 {message}"):
    two_ranks(first, "F0 B0")


def test_programs_run_chunks_that_are_there():
  program = ((Pass("F", 1, 0),), (Pass("B", 1, 0),))
  with pytest.raises(ValueError, match=r"'' of chunk 0, microbatch 0.* of its chunks \[0\] only"):
    Schedule("mine", (program,), ((0, 0),))


@pytest.mark.parametrize(
  "placement, message",
  [
    ((), r"placement=\(\) must use ranks \[0\], all"),
    (((0, 0), (1, 0)), r"must use ranks \[0\], all"),
    (((0, 0), (0, 0)), "must not name a chunk twice"),
  ],
)
def test_a_placement_uses_every_rank(placement, message):
  with pytest.raises(ValueError, match=f"mine: .*{message}"):
    Schedule("mine", (steps("F0 B0"),), placement)


def test_programs_run_something():
  with pytest.raises(ValueError, match=r"mine: programs=\(\(\),\) must run a pass"):
    Schedule("mine", ((),), ((0, 0),))


@pytest.mark.parametrize("step", [(), (Pass("F", 0, 0), Pass("F", 0, 1)), (Pass("B", 0, 0),) * 2])
def test_a_step_is_one_pass_each_way_at_most(step):
  with pytest.raises(ValueError, match="mine: rank 0 runs .* in one step, which must be one"):
    Schedule("mine", ((step, *steps("F0 B0")),), ((0, 0),))


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: pipeline.one_f_one_b(0, 4), "ranks=0 must be positive"),
    (lambda: pipeline.one_f_one_b(4, -1), "microbatches=-1 must be positive"),
    (lambda: pipeline.zero_bubble(4, 1.5), "microbatches=1.5 must be a static int"),
    (lambda: pipeline.interleaved(4, 0, 4), "chunks=0 must be positive"),
    (lambda: pipeline.interleaved(4, 2, 6), "microbatches=6 must be a multiple of ranks=4"),
    (lambda: pipeline.dual_pipe_v(4, 7), "microbatches=7 must be at least 8, twice ranks=4"),
    (
      lambda: pipeline.timeline(pipeline.one_f_one_b(2, 2), weights=0),
      "weights=0 must be a number",
    ),
    (lambda: pipeline.idle_share(pipeline.one_f_one_b(2, 2), forward="1"), "forward='1' must be"),
  ],
)
def test_errors_name_the_value(make, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    make()
