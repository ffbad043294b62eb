"""The plot of `bench.fit`: peak HBM of each way of keeping residuals, and what the chip has."""

from matplotlib.figure import Figure
import numpy as np

WEIGHTS, FLOOR, RESIDUALS, LIMIT = "#08306b", "#6baed6", "#d95f02", "#b2182b"


def plot(rows: list[dict], layers: int, limit: int, title: str) -> Figure:
  """Draws a bar for each way at full depth, and beside what is refused a hatched one.

  Args:
    rows: as `bench.fit` makes them; those of other depths are left out. Each stands on the `remat`
      that multiplies the routing weights in at the same place.
    layers: the full depth.
    limit: bytes of HBM of a device.
    title: of the figure.
  """
  rows = [row for row in rows if row["layers"] == layers]
  remat = {row["weights"]: row for row in rows if row["way"] == "remat"}
  figure = Figure(figsize=(12, 6), layout="constrained")
  axes = figure.subplots()
  # A gap between the choices of residuals.
  choice_of = lambda row: (row["residuals"], row["weights"])
  choices = list(dict.fromkeys(map(choice_of, rows)))
  places = np.array([i + 0.6 * choices.index(choice_of(row)) for i, row in enumerate(rows)])
  for place, row in zip(places, rows, strict=True):
    same = remat[row["weights"]]
    weights, floor = same.get("weight_bytes") or 0, same["peak_bytes"] or 0
    draw_bar(axes, place, row, weights / 1e9, floor / 1e9)
  axes.axhline(limit / 1e9, color=LIMIT)
  axes.annotate(
    f"HBM of a device: {limit / 1e9:.1f} GB",
    (0, limit / 1e9),
    xycoords=axes.get_yaxis_transform(),
    xytext=(4, 4),
    textcoords="offset points",
    color=LIMIT,
    bbox=dict(boxstyle="square,pad=0.2", fc="white", ec="none", alpha=0.8),
  )
  axes.set_xticks(places, [row["way"] for row in rows])
  for choice in choices:
    middle = np.mean([p for p, row in zip(places, rows, strict=True) if choice_of(row) == choice])
    residuals, weights = choice
    axes.annotate(
      f"weights\n{weights} wo" if residuals == "none" else residuals,
      (middle, 0),
      xycoords=axes.get_xaxis_transform(),
      xytext=(0, -20),
      textcoords="offset points",
      ha="center",
      va="top",
      weight="bold",
    )
  axes.set_ylabel("peak HBM of a device, GB")
  axes.set_title(title)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(*legend(axes), loc="upper left", bbox_to_anchor=(0, 0.93), frameon=False)
  return figure


def draw_bar(axes, place, row, weights, floor):
  """Draws one row, all in GB."""
  text = dict(ha="center", va="bottom", fontsize="small")
  if row["fits"] and row["peak_bytes"] is not None:
    peak = row["peak_bytes"] / 1e9
    parts = {
      "weights and gradients": (weights, WEIGHTS),
      "floor: the rest of remat": (min(floor, peak) - weights, FLOOR),
      "residuals": (max(peak - floor, 0), RESIDUALS),
    }
    bottom = 0
    for label, (height, color) in parts.items():
      axes.bar(place, height, bottom=bottom, color=color, label=label)
      bottom += height
    axes.text(place, peak, f"{peak:.1f}", **text)
  elif row["fits"] is False and row["host_bytes"] is None:
    needed = row["needed_bytes"] / 1e9
    axes.bar(place, needed, fill=False, hatch="//", edgecolor=RESIDUALS, label="refused: needs")
    axes.text(place, needed, f"needs\n{needed:.1f}", **text)
  else:
    host = row["host_bytes"]
    verdict = "no answer" if row["fits"] is None else "fits" if row["fits"] else "refused"
    where = "" if host is None else f":\n{host / 1e9:.1f} GB\nof host\nmemory"
    axes.text(place, 1, verdict + where, **text)


def legend(axes):
  """Handles and labels, each label once."""
  found = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
  return found.values(), found.keys()
