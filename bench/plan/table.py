"""The table of `bench.plan`, and the lines to paste for a choice."""

from collections.abc import Sequence
import dataclasses
import textwrap

from bench.plan import memory, tiers
from bench.plan.choices import Choice, Cost, cost_of, recomputed_shares
from bench.plan.setup import BEFORE, Setup

MAX_HOST_ARRAY = 2**37  # Bytes: the compiler refuses a larger array in host memory.


@dataclasses.dataclass(frozen=True)
class Row:
  """A choice, and what there is to say of it.

  Attributes:
    choice: it.
    hbm: bytes at the peak, by what they are.
    host_bytes: of host memory.
    cost: in time.
    obstacle: "HBM", "host" or "array" (a larger one than the compiler takes in host memory), in
      which it does not fit; None if it does.
  """

  choice: Choice
  hbm: dict[str, int]
  host_bytes: int
  cost: Cost
  obstacle: str | None

  @property
  def hbm_bytes(self) -> int:
    return sum(self.hbm.values())


def rows_of(setup: Setup, choices: Sequence[Choice]) -> list[Row]:
  """Returns a row for each choice: first those that fit, the quickest first.

  A stash of two tiers sends to the host what HBM has no room for; without such rows it has none.
  """
  choices = [staged for choice in choices if (staged := tiers.with_staging(setup, choice))]
  margins = sorted({choice.margin for choice in choices} - {None})
  shares = recomputed_shares(setup, margins)
  rows = [_row_of(setup, choice, shares) for choice in choices]
  key = lambda row: (row.obstacle is not None, row.cost.total, row.hbm_bytes, row.host_bytes)
  return sorted(rows, key=key)


def _row_of(setup, choice, shares):
  hbm, arrays = memory.hbm_parts(setup, choice), memory.host_arrays(setup, choice)
  obstacle = None
  if sum(hbm.values()) > setup.hbm_bytes:
    obstacle = "HBM"
  elif max(arrays, default=0) > MAX_HOST_ARRAY:
    obstacle = "array"
  elif sum(arrays) > setup.host_bytes:
    obstacle = "host"
  return Row(choice, hbm, sum(arrays), cost_of(setup, choice, shares), obstacle)


def not_beaten(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows without those that another one beats, or equals, in all that counts."""
  of = lambda row: (row.cost.total, row.hbm_bytes, row.host_bytes)
  is_beaten = lambda row, other: all(a >= b for a, b in zip(of(row), of(other), strict=True))
  kept = {}
  for row in rows:
    if not any(is_beaten(row, other) and of(row) != of(other) for other in rows):
      kept.setdefault(of(row), row)
  return list(kept.values())


def lines_of(rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of the table."""
  staged = ["staged"] if any(row.choice.staging_rows for row in rows) else []
  head = [*map("+".join, groups), "margin", *staged, "HBM GB", "host GB", "FLOPs", "traffic"]
  cells = [[*head, "link", "cost", "fits"], *(_cells(row, groups, bool(staged)) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = []
  for line in cells:
    aligned = [
      f"{cell:{'<' if i < len(groups) else '>'}{widths[i]}}" for i, cell in enumerate(line)
    ]
    lines.append("  ".join(aligned).rstrip())
  return lines


def _cells(row, groups, has_staged):
  cost, margin, staged = row.cost, row.choice.margin, row.choice.staging_rows
  return [
    *(row.choice.placements[group[0]] for group in groups),
    "-" if margin is None else f"{margin:g}",
    *([f"{staged}" if staged else "-"] if has_staged else []),
    f"{row.hbm_bytes / 1e9:.1f}",
    f"{row.host_bytes / 1e9:.1f}" if row.host_bytes else "-",
    f"{1 + cost.replayed:.3f}",
    f"{cost.traffic:.1%}",
    f"{cost.waiting:.1%}" if row.host_bytes else "-",
    f"{cost.total:.1%}",
    "yes" if row.obstacle is None else f"NO: {row.obstacle}",
  ]


def paste_of(setup: Setup, choice: Choice) -> list[str]:
  """Returns the lines that make a choice: in plain JAX, and of MaxText."""
  kept = {name: place for name, place in choice.placements.items() if place != "remat"}
  places = ", ".join(f'"{name}": "{place}"' for name, place in kept.items())
  plain = [
    f"policy = ps.policy_by_name({{{places}}})",
    "layer = jax.checkpoint(layer, policy=policy)",
  ]
  settings = ["remat_policy=custom", *(f"moe_{name}={place}" for name, place in kept.items())]
  module = "maxtext.trainers.pre_train.train"
  if choice.staging_rows:
    rows = setup.tier_rows(choice.margin, choice.staging_rows)._asdict()
    rows |= {"staging_rows": choice.staging_rows}
    rows = ", ".join(f"{name}={value}" for name, value in rows.items())
    plain.append(f"model = ps.threaded(model, {rows})")
    return ["Plain:", *_indented(plain), "MaxText has no setting for a stash of two tiers."]
  if choice.margin is not None:
    plain.append(f"model = ps.threaded(model, capacity_rows={setup.capacity_rows(choice.margin)})")
    settings.append(f"stash_capacity={choice.margin:g}")
    module = "pallas_stash.integrations.maxtext train"
  of_maxtext = [f"python -m {module} CONFIG \\", f"  {' '.join(settings)}"]
  of_others = ", whose routing weights are behind: --routing_weights=behind plans for that"
  note = of_others if setup.routing_weights == BEFORE else ""
  return ["Plain:", *_indented(plain), f"MaxText{note}:", *_indented(of_maxtext)]


def _indented(lines):
  return [f"  {line}" for line in lines]


def report(setup: Setup, rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> list[str]:
  """Returns the table of some rows, in the order of `rows_of`, and what to do."""
  lines = [
    *lines_of(rows, groups),
    "",
    "FLOPs: of matmuls, relative to replaying none. As parts of the time of a layer's nine matmuls",
    "at peak: traffic, what keeping moves; link, waiting for the host; cost, both and the replays.",
    "",
  ]
  parts_of = lambda row: ", ".join(f"{k} {v / 1e9:.1f}" for k, v in row.hbm.items() if v)
  best = rows[0]
  if best.obstacle:
    least = min(rows, key=lambda row: row.hbm_bytes)
    total = f"{least.hbm_bytes / 1e9:.1f} GB of {setup.hbm_bytes / 1e9:.1f}"
    return [
      *lines,
      *textwrap.wrap(f"Nothing fits. The least takes {total}: {parts_of(least)}.", 100),
    ]
  of_best = textwrap.wrap(f"The best, in GB: {parts_of(best)}.", 100)
  if best.choice.staging_rows:
    of_best += textwrap.wrap(_of_tiers(setup, best.choice), 100)
  return [*lines, *of_best, "", *paste_of(setup, best.choice)]


def _of_tiers(setup, choice):
  names = choice.names_in("stash_host")
  return (
    f"Each layer stages {choice.staging_rows} rows for the host; {tiers.hidden_rows(setup, names)}"
    f" hide behind a forward pass of {1e3 * setup.hiding_seconds:.1f} ms. Rows that are not staged,"
    " and that HBM has no room for, go at once: where they are more than"
    f" {tiers.spill_share(setup, names):.0%} of a layer's, recomputing it takes less time."
  )
