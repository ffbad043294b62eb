"""Choices of where to keep which residuals, and what each costs a layer."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from bench.fit import imbalance
from bench.plan.setup import NAMES, Setup
from bench.traffic import account

STASHES = "stash", "stash_host"  # All in HBM; and the first rows of each layer in host memory.
PLACEMENTS = "remat", "device", "offload", "stash", "stash_host"
MATMULS = sum(many for *_, many in account.MATMULS)  # of a layer, forward and backward
WAYS = {"device": "saved", "offload": "offloaded", **dict.fromkeys(STASHES, "checkpoint")}


@dataclasses.dataclass(frozen=True)
class Choice:
  """Where each name is kept.

  Attributes:
    placements: for each name, one of `PLACEMENTS`.
    margin: of the stash, rows to those of balanced routing; None without.
    staging_rows: that each layer sends to the host, of a stash of two tiers.
  """

  placements: Mapping[str, str]
  margin: float | None
  staging_rows: int = 0

  def names_in(self, *placements: str) -> list[str]:
    return [name for name, where in self.placements.items() if where in placements]


def useful(setup: Setup, groups: Sequence[Sequence[str]]) -> list[list[str]]:
  """Returns the groups without names that no backward pass needs, where keeping is for nothing."""
  needed = {*setup.needed, "x_sorted"}
  found = [[name for name in group if name in needed] for group in groups]
  return [group for group in found if group]


def choices_of(
  setup: Setup, groups: Sequence[Sequence[str]], margins: Sequence[float]
) -> Iterator[Choice]:
  """Yields every choice: names of a group are in one place, those of none are made again.

  A stash is of one tier or of two: of two that hold different names, one would send the same bytes.
  """
  possible = [p for p in PLACEMENTS if p not in ("offload", "stash_host") or setup.host_bandwidth]
  for places in itertools.product(possible, repeat=len(groups)):
    if {*STASHES} <= {*places}:
      continue
    placements = dict.fromkeys(NAMES, "remat")
    for group, place in zip(groups, places, strict=True):
      placements |= dict.fromkeys(group, place)
    for margin in margins if {*STASHES} & {*places} else [None]:
      yield Choice(placements, margin)


def recomputed_shares(setup: Setup, margins: Sequence[float]) -> dict[float, float]:
  """Returns the share of layers that does not fit into a stash, by its margin.

  By the routing of `bench.fit.imbalance`, the same experts being popular in all layers: where they
  are not, layers even out, and fewer are recomputed.
  """
  concentration = imbalance.concentration_of(setup.size, setup.busiest)
  rows = imbalance.device_rows(np.random.default_rng(1), setup.size, concentration, True)
  share = lambda margin: float(imbalance.recomputed_share(rows, setup.capacity_rows(margin)))
  return {margin: share(margin) for margin in margins}


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a choice costs a layer beside its nine matmuls, as parts of their time at peak.

  Attributes:
    replayed: matmuls that are run again.
    traffic: what keeping, or making again, moves through HBM.
    waiting: what goes over the link to the host, so far as it takes longer than matmuls.
  """

  replayed: float
  traffic: float
  waiting: float

  @property
  def total(self) -> float:
    return self.replayed + self.traffic + self.waiting


def cost_of(setup: Setup, choice: Choice, shares: Mapping[float, float]) -> Cost:
  """Returns the cost of a choice; `shares` are those of `recomputed_shares`."""
  layer, share = setup.layer, shares.get(choice.margin, 0.0)
  total = MATMULS * setup.matmul_seconds
  part_made_again = {"remat": 1.0, "device": 0.0, "offload": 0.0, **dict.fromkeys(STASHES, share)}
  made_again = {name: part_made_again[place] for name, place in choice.placements.items()}
  replays = sum(made_again[name] for name in setup.needed)
  # What is staged is read once more on its way out, and written once more when it comes back.
  moved = host = 2 * choice.staging_rows * setup.stash_row_bytes(choice.names_in("stash_host"))
  for name, place in choice.placements.items():
    width = setup.width(name)
    if place != "remat":
      moved += account.kept_bytes(layer, WAYS[place], width)
      host += account.host_bytes(layer, WAYS[place], width)
    if name == "x_sorted":
      moved += made_again[name] * account.gathered_bytes(layer, width)
    elif name in setup.needed:  # A matmul writes its result again.
      moved += made_again[name] * layer.rows * width * account.ITEMSIZE
  one_way = host / 2 / setup.host_bandwidth if host else 0
  hidden = setup.hiding_seconds, 2 * setup.hiding_seconds + replays * setup.matmul_seconds
  waiting = sum(max(one_way - seconds, 0) for seconds in hidden)
  return Cost(replays / MATMULS, moved / setup.hbm_bandwidth / total, waiting / total)
