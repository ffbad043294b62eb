"""The transforms that trainers combine, as independent options, and cases that pair them all."""

import dataclasses
import itertools

import numpy as np

from tests.helpers.composition_model import LAYERS

# The first option of each axis is the plain one. Devices are experts, or data x experts.
AXES = {
  "loop": ("scan", "scan of scan", "dense, then MoE", "unrolled", "block of layers"),
  "remat": ("none", "full", "save names", "offload names", "save everything"),
  "devices": ("1", "2", "4", "8", "2 x 2", "2 x 4"),
  "shard_map": ("none", "around", "around, unchecked", "in layer", "in layer, unchecked"),
  "call": ("jit", "donated", "exported"),
  "vmap": ("none", "inputs", "models"),
  "microbatches": ("none", "one stash", "a stash each"),
  "cond": ("no", "yes"),
  "module": ("function", "linen", "nnx"),
  "result": ("grad", "value and aux", "adam"),
  "capacity": ("ample", "half"),
}
MICROBATCHES, EXAMPLES = 2, 2


@dataclasses.dataclass(frozen=True)
class Case:
  """One option of each axis; "eager", without `jit`, is one more of `call`."""

  loop: str = "scan"
  remat: str = "none"
  devices: str = "1"
  shard_map: str = "none"
  call: str = "jit"
  vmap: str = "none"
  microbatches: str = "none"
  cond: str = "no"
  module: str = "function"
  result: str = "grad"
  capacity: str = "ample"

  def __str__(self):
    """The options that are not the plain ones."""
    values = dataclasses.asdict(self).items()
    return "; ".join(f"{k}={v}" for k, v in values if v != AXES[k][0]) or "plain"

  @property
  def mesh_shape(self):
    """Devices along the axes "data" and "expert"."""
    sizes = [int(size) for size in self.devices.split(" x ")]
    return (1, *sizes) if len(sizes) == 1 else tuple(sizes)

  @property
  def num_devices(self):
    return int(np.prod(self.mesh_shape))

  @property
  def is_checked(self):
    return "unchecked" not in self.shard_map

  @property
  def reuses_stash(self):
    return self.microbatches == "one stash"

  @property
  def moe_layers(self):
    """Which layers have experts."""
    first_moe = LAYERS // 2 if self.loop == "dense, then MoE" else 0
    every = 2 if self.cond == "yes" else 1
    return tuple(i >= first_moe and i % every == 0 for i in range(LAYERS))

  @property
  def split(self):
    """Into how many microbatches, and those into how many examples, the tokens are split."""
    microbatches = 1 if self.microbatches == "none" else MICROBATCHES
    return microbatches, 1 if self.vmap == "none" else EXAMPLES


# What trainers do, beyond pairs.
TRAINERS = {
  "MaxText": Case(
    remat="save names",
    devices="2 x 4",
    shard_map="in layer",
    call="donated",
    result="adam",
    capacity="half",
  ),
  "MaxText, offloading": Case(
    loop="dense, then MoE",
    remat="offload names",
    devices="2 x 4",
    shard_map="in layer, unchecked",
    call="donated",
    module="linen",
    result="adam",
  ),
  "one shard_map": Case(
    remat="save names", devices="2 x 2", shard_map="around", result="value and aux", capacity="half"
  ),
  "accumulation": Case(
    loop="block of layers",
    remat="save names",
    devices="2 x 2",
    shard_map="in layer",
    call="donated",
    microbatches="one stash",
    module="nnx",
    result="adam",
  ),
}


def all_pairs():
  """Returns the pairs of options of two axes that can meet, as frozensets of (axis, option)."""
  options = [(axis, option) for axis, options in AXES.items() for option in options]
  pairs = (frozenset(pair) for pair in itertools.combinations(options, 2))
  return {pair for pair in pairs if len(dict(pair)) == 2 and _can_meet(pair)}


def pairs_of(case):
  return set(map(frozenset, itertools.combinations(dataclasses.asdict(case).items(), 2)))


def _can_meet(pair):
  """Without a shard_map there is one device."""
  found = dict(pair)
  return found.get("shard_map") != "none" or found.get("devices", "1") == "1"


def cases_of_all_pairs():
  """Returns few cases that together have all pairs: each the greediest choice, in order."""
  axes = sorted(AXES, key=lambda axis: -len(AXES[axis]))
  order = {(axis, option): i for axis in axes for i, option in enumerate(AXES[axis])}
  key = lambda pair: sorted((axes.index(axis), order[axis, option]) for axis, option in pair)
  missing, cases = sorted(all_pairs(), key=key), []
  while missing:
    wanted, chosen = set(missing), dict(missing[0])
    for axis in axes:

      def gain(option, axis=axis, chosen=chosen, wanted=wanted):
        pairs = [frozenset([(axis, option), other]) for other in chosen.items()]
        return sum(p in wanted for p in pairs) if all(map(_can_meet, pairs)) else -1

      if axis not in chosen:
        chosen[axis] = max(AXES[axis], key=gain)
    cases.append(Case(**chosen))
    found = pairs_of(cases[-1])
    missing = [pair for pair in missing if pair not in found]
  return cases


def cases_of_all_options():
  """Returns those few of the cases that have, with the trainers' cases, every option."""
  options_of = lambda case: set(dataclasses.asdict(case).items())
  missing = {(axis, option) for axis, options in AXES.items() for option in options}
  missing -= set().union(*map(options_of, TRAINERS.values()))
  cases = []
  while missing:
    gain = lambda case, missing=frozenset(missing): len(missing & options_of(case))
    cases.append(max(cases_of_all_pairs(), key=gain))
    missing -= options_of(cases[-1])
  return cases
