"""A drawing of schedules: what each rank does at each tick, and the rows in flight under it."""

import numpy as np

from pallas_stash import pipeline
from pallas_stash.pipeline.ticks import KINDS

COLORS = {"F": "#4c9be8", "B": "#59a14f", "I": "#8cd17d", "W": "#f1a340"}
WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def draw(rows: dict[pipeline.Schedule, np.ndarray], devices: int):
  """Returns a figure with two panels for each schedule.

  Args:
    rows: of each, int[ticks, ranks * devices], the rows in flight behind each tick.
    devices: of a rank.
  """
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  figure = Figure(figsize=(12, 3.4 * len(rows)), layout="constrained")
  panels = figure.subplots(2 * len(rows), 1, squeeze=False)[:, 0]
  for number, (schedule, in_flight) in enumerate(rows.items()):
    passes, below = panels[2 * number : 2 * number + 2]
    table, ranks = pipeline.tabulate(schedule), len(schedule.programs)
    ticks = len(in_flight)
    for tick, rank, kind, chunk, microbatch in passes_of(table):
      # A step of two passes is one box above the other.
      is_half = table.columns["f"][tick, rank] and table.columns["b"][tick, rank]
      height = 0.45 if is_half else 0.9
      bottom = rank - 0.45 + (0.45 if is_half and kind != "F" else 0)
      shade = 1.0 if chunk == 0 else 0.6
      passes.broken_barh([(tick, 0.95)], (bottom, height), color=COLORS[kind], alpha=shade)
      middle = tick + 0.48, bottom + height / 2
      passes.text(*middle, str(microbatch), ha="center", va="center", fontsize=7)
    passes.set(ylabel="rank", yticks=range(ranks), xlim=(0, ticks), ylim=(ranks - 0.4, -0.6))
    passes.set_title(f"{schedule.name}: microbatches, chunk 1 paler", loc="left", fontsize=9)
    of_rank = in_flight.reshape(ticks, ranks, devices).max(axis=2)
    for rank in range(ranks):
      below.step(range(ticks + 1), [*of_rank[:, rank], of_rank[-1, rank]], where="post")
    below.set(ylabel="rows", xlim=(0, ticks), ylim=(0, None), xlabel="tick")
    below.legend([f"rank {rank}, fuller device" for rank in range(ranks)], fontsize=7)
  kinds = [Patch(color=COLORS[kind], label=WORDS[kind]) for kind in WORDS]
  figure.legend(handles=kinds, ncols=len(kinds), loc="outside upper right", fontsize=8)
  return figure


def passes_of(table: pipeline.Table):
  """Yields tick, rank, kind, chunk and microbatch of every pass of a table."""
  columns = table.columns
  for tick, rank in np.argwhere(columns["f"]):
    yield tick, rank, "F", columns["f_chunk"][tick, rank], columns["f_microbatch"][tick, rank]
  for tick, rank in np.argwhere(columns["b"]):
    kind = KINDS[columns["b"][tick, rank]]
    yield tick, rank, kind, columns["b_chunk"][tick, rank], columns["b_microbatch"][tick, rank]
