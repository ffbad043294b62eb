"""The plots of the demo: the rows that are routed where, and the memory of one step over time."""

from matplotlib.figure import Figure
import numpy as np

from bench.demo.memory import LiveBytes

RED, ORANGE = "#b2182b", "#d95f02"
DEVICE_COLORS = ("#08306b", "#2171b5", "#6baed6", "#41ab5d")


def plot_rows(
  rows: np.ndarray, worst_case_rows: int, expected_rows: int, capacities: dict[str, int]
) -> Figure:
  """Draws the routed rows against the worst case, layer by layer and all together.

  Args:
    rows: int[steps, layers, devices], the rows that were routed to each device.
    worst_case_rows: the most rows that a layer can route to a device.
    expected_rows: the rows that balanced routing would send there.
    capacities: the rows that each stash has room for on a device, by the name of the stash.
  """
  num_steps, layers, devices = rows.shape
  steps = np.arange(1, num_steps + 1)
  figure = Figure(figsize=(15, 7), layout="constrained")
  figure.suptitle("Rows that the router sends to a device, and the rows that XLA must plan for")
  left, right = figure.subfigures(1, 2, width_ratios=(2, 1))

  panels = left.subplots(2, -(-layers // 2), sharex=True, sharey=True, squeeze=False)
  for layer, axes in enumerate(panels.flat[:layers]):
    axes.set_title(f"layer {layer + 1}", fontsize="medium")
    axes.axhline(worst_case_rows, color=RED, label="worst case")
    for device, color in zip(range(devices), DEVICE_COLORS, strict=False):
      axes.plot(steps, rows[:, layer, device], color=color, label=f"device {device + 1}")
    axes.axhline(expected_rows, color="0.4", ls=":", label="perfect balance")
  left.supxlabel("optimiser step", fontsize="medium")
  left.supylabel("rows routed to a device", fontsize="medium")
  left.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=devices + 2)

  total = right.subplots()
  fullest = rows.sum(1).argmax(-1)
  by_layer = rows[np.arange(len(rows)), :, fullest].T
  shades = [str(shade) for shade in np.linspace(0.6, 0.9, layers)]
  total.stackplot(steps, by_layer, colors=shades, edgecolor="white", lw=0.5)
  limits = {"worst case": layers * worst_case_rows, **capacities}
  for (name, limit), color in zip(limits.items(), (RED, "black", ORANGE), strict=True):
    total.axhline(limit, color=color)
    text = f"{name}: {limit:,}"
    place = dict(xy=(1, limit), xycoords=total.get_yaxis_transform(), textcoords="offset points")
    box = dict(boxstyle="square,pad=0.2", fc="white", ec="none", alpha=0.8)
    total.annotate(text, xytext=(-2, 5), ha="right", color=color, bbox=box, **place)
  total.set_title("all layers, on the fullest device (layer 1 at the bottom)", fontsize="medium")
  total.set_xlabel("optimiser step")
  for axes in (*panels.flat, total):
    axes.margins(x=0)
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter("{x:,.0f}")
  return figure


def plot_memory(live_bytes: dict[str, LiveBytes]) -> Figure:
  """Draws the bytes of temporaries of one step over time, by the name of the training."""
  figure = Figure(figsize=(10, 5), layout="constrained")
  axes = figure.subplots()
  for (name, live), color in zip(live_bytes.items(), (RED, DEVICE_COLORS[1]), strict=True):
    passes = enumerate((live.forward, live.backward))
    times = [turn + np.linspace(0, 1, len(found), endpoint=False) for turn, found in passes]
    megabytes = np.concatenate([live.forward, live.backward]) / 1e6
    label = f"{name}: at most {megabytes.max():.1f} MB"
    axes.fill_between(np.concatenate(times), megabytes, step="post", color=color, alpha=0.25, lw=0)
    axes.step(np.concatenate(times), megabytes, where="post", color=color, lw=1, label=label)
  axes.axvline(1, color="0.4", ls=":")
  axes.set_xticks((0.5, 1.5), ("forward", "backward"))
  axes.tick_params(axis="x", length=0)
  axes.set_xlabel(
    "instructions in the compiler's order; of each loop, that over layers too, one turn"
  )
  axes.set_ylabel("temporaries that are live on a device, MB")
  axes.set_title("Memory of one gradient step: the compiler's live ranges and buffer assignment")
  axes.margins(x=0)
  axes.set_ylim(0)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False, loc="upper left")
  return figure
