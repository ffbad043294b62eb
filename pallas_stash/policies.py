"""Which values go to the stash: said by a policy of `jax.checkpoint`, as for what is saved."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.source_info_util import register_exclusion

from pallas_stash.arguments import as_list, check_type, describe
from pallas_stash.handover import SLOT_NAME
from pallas_stash.ragged import RaggedRows

# A mark is of the line that calls `mark_rows`.
register_exclusion(__file__)

# Of the names that are given here, none of which a policy is to save: to marks, and, in what
# `threaded` makes of a function, to each value for the stash, with the number of its mark.
_PREFIX = "stash_rows"

_PLACEMENTS = "remat", "device", "offload", "stash", "stash_host"


class save_in_stash:
  """A `jax.checkpoint` policy: values of these names go to the stash, others where `policy` says.

      layer = jax.checkpoint(layer, policy=save_in_stash("hidden", policy=others))
      model = threaded(model, capacity_rows)

  It has to be the policy itself, not a part of another one. Outside of `threaded`, values of these
  names are rematerialised.

  Args:
    *names: as `jax.ad_checkpoint.checkpoint_name` gives them, in functions that `mark_rows`.
    on_host: names of values for a stash whose rows are all in host memory: `threaded` says how
      many.
    policy: of all other values; None saves none. What it saves stays where it says, in device or
      host memory, at its full size.

  Raises:
    ValueError: for a name that is no string, one that is given for both, or a policy that is no
      function.
  """

  def __init__(
    self, *names: str, on_host: Sequence[str] = (), policy: Callable[..., Any] | None = None
  ):
    if isinstance(on_host, str):
      raise ValueError(f"{on_host=} must be a sequence of names: on_host=[{on_host!r}].")
    on_host = tuple(as_list("on_host", on_host, "names"))
    for name in (*names, *on_host):
      check_type("name", name, str, "a string")
    if both := sorted({*names} & {*on_host}):
      raise ValueError(f"{on_host=} must have none of the other names, as {both[0]!r}.")
    if not (policy is None or callable(policy)):
      raise ValueError(f"policy={describe(policy)} must be a function, or None.")
    self.names, self.policy = frozenset((*names, *on_host)), policy
    self.host_names = frozenset(on_host)

  def __repr__(self):
    names = [*map(repr, sorted(self.names - self.host_names))]
    if self.host_names:
      names.append(f"on_host={sorted(self.host_names)}")
    return f"save_in_stash({', '.join([*names, f'policy={self.policy!r}'])})"

  def __call__(self, primitive, *args, **params):
    name = params.get("name")
    if name == SLOT_NAME:
      return True
    if name in self.names or _is_own(name):
      return False
    return self.policy(primitive, *args, **params) if self.policy else False


def policy_of_site(policy: save_in_stash) -> Callable[..., Any]:
  """Returns the policy of a function that is called with the stash: what is stashed is saved."""

  def saves(primitive, *args, **params):
    if mark_number(params.get("name")) is not None:
      return True
    saved = policy(primitive, *args, **params)
    # The policy around it offloads the value, under its name; here it would be once more.
    return True if type(saved).__name__ == "Offloadable" else saved

  return saves


def policy_by_name(placements: Mapping[str, str]) -> Callable[..., Any]:
  """Returns the `jax.checkpoint` policy that puts each named value where a mapping says.

      policy = policy_by_name({"mlpwi_0": "stash", "mlpwi_1": "stash", "out_proj": "offload"})

  Values of other names, and of none, are rematerialised.

  Args:
    placements: for each name, "remat", "device", "offload" (to pinned host memory, at its full
      size), "stash" or "stash_host" (a stash whose rows are all in host memory).

  Raises:
    ValueError: for another placement.
  """
  names = {placement: [] for placement in _PLACEMENTS}
  for name, placement in placements.items():
    if placement not in names:
      raise ValueError(f"{name}={placement!r} must be one of {', '.join(map(repr, _PLACEMENTS))}.")
    names[placement].append(name)
  policy = jax.checkpoint_policies.save_only_these_names(*names["device"])
  if names["offload"]:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=names["device"],
      names_which_can_be_offloaded=names["offload"],
      offload_src="device",
      offload_dst="pinned_host",
    )
  return save_in_stash(*names["stash"], on_host=names["stash_host"], policy=policy)


def mark_rows(ragged: RaggedRows) -> None:
  """Says which rows hold something, of the values for the stash in the function that calls this.

      def experts(rows, weights, group_sizes):
        mark_rows(RaggedRows(group_sizes, rows.shape[0]))
        return jax.nn.silu(checkpoint_name(gmm(rows, weights, group_sizes), "hidden"))

  Call it before what is computed of the rows, and in a loop over chunks of the rows once for each:
  a value belongs to the last mark before it that has as many rows in all, or else to the first
  behind it. What its function computes from there on is recomputed where the rows do not fit.

  Outside of `threaded` it has no effect.

  Args:
    ragged: where the rows are.

  Raises:
    ValueError: for what is no `RaggedRows`.
  """
  check_type("ragged", ragged, RaggedRows, "RaggedRows")
  checkpoint_name(ragged.group_sizes, f"{_PREFIX}/{ragged.total_rows}/sizes")
  if ragged.group_starts is not None:
    checkpoint_name(ragged.group_starts, f"{_PREFIX}/{ragged.total_rows}/starts")


class MarkName(NamedTuple):
  """What the name of a mark says: the rows in all, and whether its values are sizes or starts."""

  total_rows: int
  is_starts: bool


def read_mark(name: str | None) -> MarkName | None:
  """Returns what a name says that `mark_rows` gave; None for another one."""
  if not _is_own(name):
    return None
  _, total_rows, what = name.split("/", 2)
  return MarkName(int(total_rows), what == "starts") if what in ("sizes", "starts") else None


def name_in_mark(name: str, mark: int) -> str:
  """Returns the name of a value for the stash, whose rows are those of a mark of its function."""
  return f"{_PREFIX}/{mark}/named {name}"


def mark_number(name: str | None) -> int | None:
  """Returns the mark of which `name_in_mark` made a name; None for another name."""
  is_one = _is_own(name) and read_mark(name) is None
  return int(name.split("/", 2)[1]) if is_one else None


def plain_name(name: str | None) -> str | None:
  """Returns the name that was given to a value, of which `name_in_mark` may have made another."""
  return name if mark_number(name) is None else name.partition("/named ")[2]


def _is_own(name):
  return name is not None and name.startswith(_PREFIX + "/")
