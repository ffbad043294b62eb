"""The plot of `bench.plan`: each choice by the memory that it takes and the time that it costs."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from bench.plan.table import Row

# The first that a choice has some of gives a point its colour.
COLORS = {
  "stash_host": "#1b9e77",
  "stash": "#d95f02",
  "device": "#08306b",
  "offload": "#7570b3",
  "remat": "#6baed6",
}
LIMIT = "#b2182b"


def plot(rows: Sequence[Row], hbm_bytes: int, title: str) -> Figure:
  """Draws a point for each row, hollow where it does not fit, and a ring around the best.

  Args:
    rows: as `bench.plan.table` makes them, in their order.
    hbm_bytes: of a device.
    title: of the figure.
  """
  figure = Figure(figsize=(9, 6), layout="constrained")
  axes = figure.subplots()
  place = lambda row: (row.hbm_bytes / 1e9, 100 * row.cost.total)
  for row in rows:
    color = next(COLORS[where] for where in COLORS if row.choice.names_in(where))
    face = color if row.obstacle is None else "none"
    axes.scatter(*place(row), s=36, facecolors=face, edgecolors=color)
  best = rows[0]
  if best.obstacle is None:
    axes.scatter(*place(best), s=160, facecolors="none", edgecolors=LIMIT)
    kept = [f"{name} {where}" for name, where in best.choice.placements.items() if where != "remat"]
    margin = best.choice.margin
    room = [] if margin is None else [f"room for {margin:g} times the rows"]
    title += f"\nbest: {', '.join(kept + room) or 'all remat'}"
  for where, color in COLORS.items():
    axes.scatter([], [], color=color, label="all remat" if where == "remat" else f"some {where}")
  axes.scatter([], [], facecolors="none", edgecolors="0.4", label="does not fit")
  axes.axvline(hbm_bytes / 1e9, color=LIMIT, label=f"HBM of a device, {hbm_bytes / 1e9:.1f} GB")
  axes.set_xscale("log")
  axes.set_yscale("log")
  for axis in axes.xaxis, axes.yaxis:
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
  axes.xaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
  axes.set_xlabel("peak HBM of a device, GB")
  axes.set_ylabel("replays, traffic and waiting, % of the time of a layer's matmuls")
  axes.set_title(title)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False)
  return figure
