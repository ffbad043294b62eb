"""What is printed, drawn and checked of the rows of the kernel benchmark."""

from bench.kernels.cases import BANDWIDTH, floor_cycles, MLP_KERNELS

CASE_KEYS = (
  *("chip", "kernel", "implementation", "layout", "occupancy", "width", "dtype", "rows", "offset"),
)
KEYS = *CASE_KEYS, "estimated_cycles", "floor_cycles", "bytes_moved", "vmem_bytes"
HEADER = (
  f"{'chip':6} {'kernel':16} {'implementation':14} {'layout':11} {'rows':>7} {'of all':>6}"
  f" {'width':>5} {'dtype':13} {'from':>4} {'cycles':>11} {'floor':>11} {'ratio':>5} {'GB':>6}"
)
WORSE = 1.02
GROUPED_HEADER = (
  f"{'chip':6} {'kernel':24} {'k':>5} {'n':>5} {'megablox':>10} {'in place':>10} {'ratio':>6}"
  f" {'by copies':>10} {'ratio':>6}"
)
# Of what it replaces of megablox; what makes three results of one matmul is allowed more.
MOST_OF_MEGABLOX = {
  "gate_up_backward": 1.25,
  "gate_up_backward_weights": 1.35,
}
# Of rows in pages to contiguous ones, and of what looks up pages to the floor of a push.
MOST_OF_CONTIGUOUS, MOST_OF_A_PUSH = 1.01, 0.03
# Of any layout to the prefix layout, of max(estimate, floor), where bandwidth is the limit.
MOST_OF_PREFIX = 1.3


def name(row):
  """Returns what tells a row from all others."""
  return " ".join(str(row[key]) for key in CASE_KEYS)


def bound(row):
  """Returns max(estimate, floor), or None."""
  return row["estimated_cycles"] and max(row["estimated_cycles"], row["floor_cycles"])


def describe(row):
  cycles = bound(row)
  ratio = f"{cycles / row['floor_cycles']:.2f}" if cycles else "-"
  estimate = f"{row['estimated_cycles']:,}" if cycles else "-"
  return (
    f"{row['chip']:6} {row['kernel']:16} {row['implementation']:14} {row['layout']:11}"
    f" {row['rows']:7,} {row['occupancy']:6.0%} {row['width']:5} {row['dtype']:13}"
    f" {row['offset']:4} {estimate:>11} {row['floor_cycles']:11,} {ratio:>5}"
    f" {row['bytes_moved'] / 1e9:6.2f}"
  )


def describe_grouped(case, cycles, megablox):
  """A line of a grouped matmul and what it replaces.

  By copies, compact or expand_undefined of the rows of its left-hand side is at its floor; what
  those of an expert MLP replace beside matmuls is not of this table.
  """
  line = (
    f"{case['chip']:6} {case['kernel']:24} {case['k']:5} {case['n']:5} {megablox:10,} {cycles:10,}"
    f" {cycles / megablox:6.3f}"
  )
  if case["kernel"] in MLP_KERNELS:
    return line
  copies = megablox + floor_cycles(case["chip"], 2 * case["rows"] * case["k"] * 2)
  return f"{line} {round(copies):10,} {copies / megablox:6.3f}"


def plot(rows):
  """Returns a figure with a panel for each chip: estimates, and floors before them."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(14, 14), layout="constrained")
  for axes, chip in zip(figure.subplots(2, 2).flat, BANDWIDTH, strict=True):
    shown = [row for row in rows if row["chip"] == chip][::-1]
    labels = [
      f"{row['implementation']} {row['kernel']} {row['layout']} +{row['offset']} {row['rows']:,}"
      for row in shown
    ]
    # Per row that is copied, so that cases of different size are on one scale.
    floors = [row["floor_cycles"] / row["rows"] for row in shown]
    estimates = [(row["estimated_cycles"] or 0) / row["rows"] for row in shown]
    axes.barh(labels, floors, color="#9ecae1", label="floor: bytes moved / bandwidth")
    axes.barh(labels, estimates, height=0.35, color="#2171b5", label="the compiler's estimate")
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set(title=chip, xlabel="cycles for each row that is copied", xscale="log")
    axes.legend(fontsize="x-small")
  return figure


def prefix_of(row, rows):
  """Returns the row of the prefix layout with the same work, or None."""
  alike = [key for key in CASE_KEYS if key not in ("layout", "offset")]
  is_prefix = lambda other: other["layout"] == "prefix" and other["offset"] == 0
  found = [r for r in rows if is_prefix(r) and all(r[key] == row[key] for key in alike)]
  return found[0] if found else None


def of_prefix(row, rows):
  """Returns the bound of a row as a multiple of that of the prefix layout, or None."""
  prefix = prefix_of(row, rows)
  return prefix and bound(prefix) and bound(row) and bound(row) / bound(prefix)


def above_prefix(rows):
  """Returns which rows cost more of the prefix layout than they may, as text."""
  ratios = [(row, of_prefix(row, rows)) for row in rows if row["chip"] != "tpu7x"]
  return [
    f"{name(row)}: {ratio:.2f} times the prefix layout"
    for row, ratio in ratios
    if ratio and ratio > MOST_OF_PREFIX
  ]


def failures(rows, baseline):
  """Returns what is worse than the baseline or than its targets, as text."""
  stored = {name(row): row for row in baseline}
  found = []
  for row in rows:
    if name(row) not in stored:
      found.append(f"{name(row)}: not in the baseline; --update_baseline stores it")
      continue
    if row["estimated_cycles"] is None:
      found.append(f"{name(row)}: no estimate")
      continue
    for key in "estimated_cycles", "bytes_moved", "vmem_bytes":
      if row[key] > WORSE * stored[name(row)][key]:
        found.append(f"{name(row)}: {key} {row[key]:,} was {stored[name(row)][key]:,}")
    if row["layout"] == "prefix" and row["estimated_cycles"] > row["floor_cycles"]:
      found.append(f"{name(row)}: {row['estimated_cycles']:,} cycles, above the floor")
  missing = sorted(set(stored) - set(map(name, rows)))
  return [*found, *above_prefix(rows)] + [
    f"{case}: in the baseline, but not measured" for case in missing
  ]
