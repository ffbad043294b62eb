"""What a user is told of the residuals of a function: `StashedFunction.explain`."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from pallas_stash.residuals import Residual


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What becomes of the residuals of a function: printed, a table.

  Attributes:
    total_rows: rows of the worst-case buffers.
    residuals: each value that the backward pass needs.
    arguments: shape and dtype of each leaf of the arguments, needed there or not.
    names: the `checkpoint_name`s in the function.
  """

  total_rows: int
  residuals: tuple[Residual, ...]
  arguments: tuple[Any, ...]
  names: tuple[str, ...]

  def __str__(self):
    header = "residual", "made by", "shape", "dtype", "MB", "kept as", "because it", "line"
    table = [header]
    for r in self.residuals:
      size = f"{r.num_bytes / 1e6:,.3f}"
      columns = r.name or "-", r.operation, str(list(r.shape)), str(r.dtype), size, r.kind
      table.append((*columns, r.reason or "-", (r.source or "-").rpartition("/")[2]))
    lines = aligned(table)
    total = lambda things: f"{sum(map(num_bytes, things)) / 1e6:,.3f} MB"
    of_kind = lambda kind: [r for r in self.residuals if r.kind == kind]
    not_kept = sorted(set(self.names) - {r.name for r in self.residuals})
    if not_kept:
      lines.append(f"Named and not kept: {', '.join(map(repr, not_kept))}.")
    return "\n".join(
      [
        *lines,
        f"Stashed: {total(of_kind('stashed'))} at worst case, of which the stash keeps the rows in"
        " groups.",
        f"Kept beside them for every layer: {total(of_kind('ordinary'))} of ordinary residuals, and"
        f" {total(self.arguments)} of arguments. A jax.checkpoint around the layer, whose policy"
        " saves pallas_stash.SLOT_NAME, keeps only what the layer is given.",
      ]
    )


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
  """Returns a line for each row of a table, its columns aligned."""
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = (map(str.ljust, row, widths) for row in table)
  return ["  ".join(line).rstrip() for line in lines]


def num_bytes(value: Any) -> int:
  """Returns the bytes of what has a shape and a dtype."""
  return math.prod(value.shape) * value.dtype.itemsize
