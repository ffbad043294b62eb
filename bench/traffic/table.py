"""The table of `bench.traffic`: the account of a layer, in time."""

from bench.kernels import cases
from bench.traffic import account
from pallas_stash import sizing


def layer_of(size):
  """Returns the `account.Layer` of a `ModelSize`, of balanced routing."""
  routing = size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts
  rows = sizing.expected_rows(*routing), sizing.worst_case_rows(*routing)
  return account.Layer(*rows, size.width, size.hidden)


def case_of(chip, layer, implementation, kernel, is_from_width):
  """Returns the case of `bench.kernels` of one kernel, of a part of the rows."""
  k, n = (layer.width, layer.hidden) if is_from_width else (layer.hidden, layer.width)
  case = {"chip": chip, "kernel": kernel, "k": k, "n": n, "rows": cases.FEW_ROWS}
  return case | {"implementation": implementation}


def needed_cases(chip, layer):
  """Returns {(implementation, kernel, is_from_width): case}, of all that `rows_of` asks for."""
  keys = [("megablox", kernel, is_from_width) for kernel, is_from_width, _ in account.MATMULS]
  for line in account.lines_of(layer):
    keys += [(cases.OURS, kernel, True) for kernel in line.kernels]
  return {key: case_of(chip, layer, *key) for key in keys}


def rows_of(chip, layer, cycles):
  """Returns a row for each line of the account, and the milliseconds of a layer's matmuls.

  Args:
    chip: the name of one.
    layer: an `account.Layer`.
    cycles: of each key of `needed_cases`.
  """
  milliseconds = lambda number: 1e3 * number * layer.rows / cases.FEW_ROWS / cases.CLOCK[chip]
  matmul = lambda kernel, is_from_width=True: cycles["megablox", kernel, is_from_width]
  total = milliseconds(sum(matmul(kernel, way) * many for kernel, way, many in account.MATMULS))
  rows = []
  for line in account.lines_of(layer):
    extra = sum(
      cycles[cases.OURS, kernel, True] - many * matmul(replaced)
      for kernel, (replaced, many) in line.kernels.items()
    )
    moved = 1e3 * line.hbm_bytes / cases.BANDWIDTH[chip]
    in_kernels = max(milliseconds(extra), 0)
    replayed = milliseconds(line.replayed * matmul("gmm"))
    # What a kernel moves is hidden behind its matmuls, but for what the estimate says.
    cost = max(moved, in_kernels) if line.kernels else moved
    link = cases.HOST_LINKS.get(chip)
    rows.append(
      {
        "keeps": line.keeps,
        "way": line.way,
        "hbm_bytes": line.hbm_bytes,
        "hbm_milliseconds": moved,
        "in_kernels_milliseconds": in_kernels if line.kernels else None,
        "replayed_milliseconds": replayed,
        "host_bytes": line.host_bytes,
        "host_milliseconds": 1e3 * line.host_bytes / 2 / link.bytes_per_second if link else None,
        "part_of_matmuls": (cost + replayed) / total,
      }
    )
  return rows, total


def lines_of(rows):
  """Returns the lines of the table."""
  head = f"{'keeps':12} {'way':30} {'GB':>6} {'ms':>6} {'of matmuls':>10}"
  lines = [f"{head} {'in kernels':>10} {'replayed':>8} {'host GB':>7} {'ms each way':>11}"]
  number = lambda value: "-" if not value else f"{value:.2f}"
  for row in rows:
    lines.append(
      f"{row['keeps']:12} {row['way']:30} {row['hbm_bytes'] / 1e9:6.2f}"
      f" {row['hbm_milliseconds']:6.2f} {row['part_of_matmuls']:10.1%}"
      f" {number(row['in_kernels_milliseconds']):>10} {number(row['replayed_milliseconds']):>8}"
      f" {number(row['host_bytes'] / 1e9):>7} {number(row['host_milliseconds']):>11}"
    )
  return lines
