"""`layer_partition` against all partitions there are, and against the rule for uniform layers."""

import fractions
import itertools
import random

import numpy as np
import pytest

from pallas_stash import pipeline

pytestmark = pytest.mark.once


def partitions(layers, stages):
  for cuts in itertools.combinations(range(1, layers), stages - 1):
    yield [last - first for first, last in itertools.pairwise((0, *cuts, layers))]


def parts_of(schedule):
  """Returns the stages that are balanced together."""
  stages = len(schedule.placement)
  if schedule.name == "DualPipeV":
    return [(stage, stages - 1 - stage) for stage in range(stages // 2)]
  return [(stage,) for stage in range(stages)]


def per_stage(sizes, values):
  ends = list(itertools.accumulate(sizes))
  return [sum(values[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def times_of(schedule, sizes, model):
  """Returns the times of the stages, and of the parts."""
  of_layers = per_stage(sizes, [fractions.Fraction(time) for time in model["layer_times"]])
  stages = [a + b for a, b in zip(of_layers, model["stage_times"], strict=True)]
  return stages, [sum(stages[stage] for stage in part) for part in parts_of(schedule)]


def bytes_of(schedule, sizes, model):
  """Returns the bytes of the parts."""
  live = [schedule.in_flight(rank)[:, chunk].max() for rank, chunk in schedule.placement]
  weights = per_stage(sizes, model["weight_bytes"])
  activations = per_stage(sizes, model["activation_bytes"])
  columns = zip(weights, live, activations, model["stage_bytes"], strict=True)
  stages = [int(weight + count * kept + more) for weight, count, kept, more in columns]
  return [sum(stages[stage] for stage in part) for part in parts_of(schedule)]


def badness(schedule, sizes, model):
  """Returns what the best partition has least of, as the docstring puts it."""
  stages, parts = times_of(schedule, sizes, model)
  early = [-sizes[stage] for part in parts_of(schedule) for stage in part]
  return max(parts), sum(time**2 for time in stages), sizes[-1], sizes[0], early


def random_model(rng, layers, stages):
  of = lambda count, most: [rng.randint(0, most) for _ in range(count)]
  times = rng.choice([of(layers, 3), of(layers, 50), [rng.random() for _ in range(layers)]])
  return dict(
    layer_times=times,
    weight_bytes=of(layers, 9),
    activation_bytes=of(layers, 9),
    stage_times=rng.choice([of(stages, 5), [0] * stages]),
    stage_bytes=of(stages, 20),
  )


SCHEDULES = [
  *(pipeline.one_f_one_b(ranks, 5) for ranks in range(1, 6)),
  pipeline.zero_bubble(4, 4),
  pipeline.interleaved(2, 2, 4),
  pipeline.interleaved(2, 3, 4),
  *(pipeline.dual_pipe_v(ranks, 2 * ranks) for ranks in (1, 2, 3)),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{len(s.placement)}")
def test_it_is_the_best_of_all_partitions(schedule):
  stages, ranks = len(schedule.placement), len(schedule.programs)
  shares = len(parts_of(schedule)) // ranks  # Of a rank's budget.
  rng = random.Random(stages)
  for _ in range(15):
    layers = rng.randint(stages, 9)
    model = random_model(rng, layers, stages)
    all_of_them = list(partitions(layers, stages))
    needed = {tuple(sizes): bytes_of(schedule, sizes, model) for sizes in all_of_them}
    best = min(all_of_them, key=lambda sizes: badness(schedule, sizes, model))
    assert pipeline.layer_partition(schedule, **model) == best

    # As tight as can be, a little less so, and too tight.
    least = min(map(max, needed.values()))
    for part_budget in (least, rng.choice(sorted(map(max, needed.values()))), least - 1):
      budget = shares * part_budget + rng.randint(0, shares - 1)
      within = [sizes for sizes in all_of_them if max(needed[tuple(sizes)]) <= part_budget]
      if within:
        best = min(within, key=lambda sizes: badness(schedule, sizes, model))
        assert pipeline.layer_partition(schedule, budget_bytes=budget, **model) == best
      elif budget >= 0:
        with pytest.raises(ValueError, match=f"needs {least - part_budget} bytes more on rank"):
          pipeline.layer_partition(schedule, budget_bytes=budget, **model)


@pytest.mark.parametrize("schedule", [pipeline.one_f_one_b(3, 9), pipeline.dual_pipe_v(2, 4)])
def test_each_rank_has_its_own_budget(schedule):
  ranks, stages, rng = len(schedule.programs), len(schedule.placement), random.Random(0)
  for _ in range(20):
    layers = rng.randint(stages, 9)
    model = random_model(rng, layers, stages)
    needed = {
      tuple(sizes): bytes_of(schedule, sizes, model) for sizes in partitions(layers, stages)
    }
    budgets = [rng.randint(50, 400) for _ in range(ranks)]
    excess = lambda sizes, needed=needed, budgets=budgets: max(
      need - budget for need, budget in zip(needed[sizes], budgets, strict=True)
    )
    within = [list(sizes) for sizes in needed if excess(sizes) <= 0]
    if within:
      best = min(within, key=lambda sizes: badness(schedule, sizes, model))
      assert pipeline.layer_partition(schedule, budget_bytes=budgets, **model) == best
    else:
      least = min(map(excess, needed))
      with pytest.raises(ValueError, match=f"needs {least} bytes more on rank"):
        pipeline.layer_partition(schedule, budget_bytes=budgets, **model)


def balanced(layers, stages):
  """The rule: as even as can be; the rest one by one to inner stages, then to the first."""
  size, rest = divmod(layers, stages)
  order = [*range(1, stages - 1), *sorted({0, stages - 1})]
  return [size + (stage in order[:rest]) for stage in range(stages)]


@pytest.mark.parametrize(
  "layers, sizes",
  [(48, [6] * 8), (27, [3, 4, 4, 4, 3, 3, 3, 3]), (5, [2, 2, 1]), (3, [2, 1])],
)
def test_uniform_layers_published(layers, sizes):
  assert balanced(layers, len(sizes)) == sizes
  for time in (1, 0.1, np.float32(0.3), fractions.Fraction(1, 3)):
    schedule = pipeline.one_f_one_b(len(sizes), 2 * len(sizes))
    assert pipeline.layer_partition(schedule, [time] * layers) == sizes


def test_uniform_layers():
  for stages in range(1, 9):
    schedule = pipeline.one_f_one_b(stages, stages)
    for layers in range(stages, 3 * stages + 1):
      sizes = pipeline.layer_partition(schedule, [0.7] * layers)
      assert sizes == balanced(layers, stages)
      assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1], default=layers)


def test_a_budget_moves_layers_to_ranks_that_keep_fewer_microbatches():
  schedule = pipeline.one_f_one_b(4, 8)
  layers = dict(layer_times=[1] * 16, weight_bytes=10, activation_bytes=5)
  assert pipeline.layer_partition(schedule, **layers) == [4] * 4
  assert pipeline.layer_partition(schedule, budget_bytes=120, **layers) == [4] * 4
  assert pipeline.layer_partition(schedule, budget_bytes=100, **layers) == [3, 4, 5, 4]
  with pytest.raises(ValueError) as error:
    pipeline.layer_partition(schedule, budget_bytes=80, **layers)
  assert str(error.value) == (
    "budget_bytes=80 must be more: no partition of 16 layers keeps within it, and the one that"
    " exceeds it by least needs 10 bytes more on rank 3, stage 3."
  )


def test_both_stages_of_a_rank_share_its_budget():
  """Rank 0 keeps 4 microbatches of its first stage and 1 of its last, rank 1 keeps 3 and 2."""
  schedule = pipeline.dual_pipe_v(2, 4)
  layers = dict(layer_times=[1] * 8, activation_bytes=1)
  assert pipeline.layer_partition(schedule, **layers) == [2, 2, 2, 2]
  assert pipeline.layer_partition(schedule, budget_bytes=10, **layers) == [2, 2, 2, 2]
  assert pipeline.layer_partition(schedule, budget_bytes=9, **layers) == [1, 1, 3, 3]
  with pytest.raises(ValueError, match=r"needs 1 bytes more on rank \d, stages \d and \d\.$"):
    pipeline.layer_partition(schedule, budget_bytes=7, **layers)


def test_a_model_of_real_size():
  """DeepSeek-V3: 3 dense layers and 58 with experts, in seconds of no one's patience."""
  dense, experts = 3, 58
  each = lambda of_dense, of_experts: [of_dense] * dense + [of_experts] * experts
  times = each(0.4, 1.0)
  bytes_ = dict(
    weight_bytes=each(600_000_000, 4_500_000_000), activation_bytes=each(10**8, 12 * 10**8)
  )
  sizes = pipeline.layer_partition(pipeline.one_f_one_b(16, 64), times, **bytes_)
  assert sizes[0] == 5 and max(sizes[1:]) == 4 and sum(sizes) == 61
  schedule = pipeline.dual_pipe_v(8, 32)
  sizes = pipeline.layer_partition(schedule, times, budget_bytes=95 * 10**9, **bytes_)
  model = dict(layer_times=times, stage_times=[0] * 16, stage_bytes=[0] * 16, **bytes_)
  assert sum(sizes) == 61 and max(bytes_of(schedule, sizes, model)) <= 95 * 10**9


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(schedule=[1, 1]), r"schedule=\[1, 1\] must be a Schedule"),
    (dict(layer_times=[1]), "layer_times of 1 layers must be of 2 or more, one a stage"),
    (dict(layer_times=7), "layer_times=7 must be a list of numbers"),
    (dict(layer_times=[1, 1, -2]), r"layer_times\[2\]=-2 must be a finite number, zero or more"),
    (dict(layer_times=[1, float("nan")]), r"layer_times\[1\]=nan must be a finite number"),
    (dict(layer_times=[1, True]), r"layer_times\[1\]=True must be a finite number"),
    (dict(weight_bytes=[1, 2]), r"weight_bytes=\[1, 2\] must be one number, or 3"),
    (dict(weight_bytes=1.5), "weight_bytes=1.5 must be an integer, zero or more"),
    (dict(activation_bytes=-1), "activation_bytes=-1 must be an integer, zero or more"),
    (dict(stage_times=[1]), r"stage_times=\[1\] must be one number, or 2"),
    (dict(stage_bytes=[1, "2"]), r"stage_bytes\[1\]='2' must be an integer, zero or more"),
    (dict(budget_bytes=[1] * 3), r"budget_bytes=\[1, 1, 1\] must be one number, or 2"),
    (dict(budget_bytes=-1), "budget_bytes=-1 must be an integer, zero or more"),
  ],
)
def test_errors_name_the_value(change, message):
  good = dict(schedule=pipeline.one_f_one_b(2, 2), layer_times=[1, 1, 1])
  with pytest.raises(ValueError, match=f"^{message}"):
    pipeline.layer_partition(**(good | change))
