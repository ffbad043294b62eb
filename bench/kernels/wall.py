"""Compact and expand as they run on the device that is here, beside what users would pick instead.

On a TPU or a GPU it is the device's own time, from the profiler: the median of many calls, warm,
each with another source and another destination than the call before, all of them larger than
caches. On a CPU it is wall time, good for ratios within one run only; the candidates take turns, in
an order that is shuffled each round.
"""

import functools
import pathlib
import random
import statistics
import tempfile
import time

import jax
from jax import lax
import jax.numpy as jnp

from bench.kernels.alternatives import ALTERNATIVES, slices
from bench.kernels.cases import OCCUPANCIES, OURS
import pallas_stash as ps

ROTATED = 2  # Sources and destinations that take turns.
MARGIN_ROWS = 64  # Rows that the stash has beyond the worst case, for odd offsets.
SAME_ROWS = "dus_same_rows"  # A static update of just the rows that are there.
COPY = "plain_copy"


def candidates(kernel, rows, total_rows, width, dtype, on_tpu):
  """Returns by name `(destination, source, start, row_numbers)` to the rows in their places.

  Compact updates the destination. Expand returns a new buffer, with zero in padding, whoever makes
  it: what the destination is has no influence then.
  """

  def ours(destination, source, start, row_numbers):
    sizes = row_numbers.shape[0] + 0 * start[None]  # Known at run time only.
    if kernel == "compact":
      return ps.dynamic_update_slice(destination, source, (start, 0), group_sizes=sizes)
    return ps.dynamic_slice(source, (start, 0), (total_rows, width), group_sizes=sizes)

  def other(make):
    function = make(rows, total_rows, kernel)
    if kernel == "compact":
      return lambda stash, worst_case, *scalars: function(worst_case, stash, *scalars)
    zeros = functools.partial(jnp.zeros, (total_rows, width), dtype)
    return lambda _, stash, *scalars: function(zeros(), stash, *scalars)

  found = {OURS: ours, SAME_ROWS: other(slices(lambda rows, total_rows: rows))}
  for name, alternative in ALTERNATIVES.items():
    if on_tpu or not alternative.is_pallas:
      found[name] = other(alternative.make)
  return found


class Buffers:
  """Sources and destinations that take turns."""

  def __init__(self, kernel, total_rows, width, dtype):
    source_rows, destination_rows = total_rows, total_rows + MARGIN_ROWS
    if kernel != "compact":  # It makes its own destination.
      source_rows, destination_rows = total_rows + MARGIN_ROWS, 0
    make = lambda rows: [jnp.full((rows, width), i, dtype) for i in range(ROTATED)]
    self.sources, self.destinations = make(source_rows), make(destination_rows)
    self.turn = 0

  def run(self, function, *scalars):
    """Calls a function with the next buffers, which updates the destination; returns seconds."""
    self.turn = (self.turn + 1) % ROTATED
    args = self.destinations[self.turn], self.sources[self.turn], *scalars
    started = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    seconds = time.perf_counter() - started
    if self.destinations[self.turn].is_deleted():
      self.destinations[self.turn] = out
    return seconds


def device_seconds(planes, calls):
  """Returns the seconds of each of `calls` equal programs, one after another, from a profile.

  Args:
    planes: of a `jax.profiler.ProfileData`. A TPU's has a line with one event a program; a GPU's
      has lines of kernels, of which each program starts equally many.

  Raises:
    RuntimeError: if there is no device in it, or another number of programs.
  """
  devices = [p for p in planes if p.name.startswith(("/device:TPU:", "/device:GPU:"))]
  for lines in ({line.name: list(line.events) for line in plane.lines} for plane in devices):
    events = lines.get("XLA Modules", [])
    if not events:
      events = [e for name, line in lines.items() if name.startswith("Stream") for e in line]
    if events and len(events) % calls == 0:
      events = sorted(events, key=lambda event: event.start_ns)
      each = len(events) // calls
      groups = [events[i : i + each] for i in range(0, len(events), each)]
      return [1e-9 * sum(event.duration_ns for event in group) for group in groups]
  raise RuntimeError(f"The profile has no device with {calls} programs: {devices}")


def profile(call, calls):
  """Returns the device's seconds of each of `calls` calls."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(calls):
        call()
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    return device_seconds(list(jax.profiler.ProfileData.from_file(str(path)).planes), calls)


def measure(kernel, rows, total_rows, width, dtype, offset, calls):
  """Returns a row for each candidate: its median seconds, and those as multiples of others'."""
  backend = jax.default_backend()
  start, row_numbers = jnp.int32(offset), jnp.arange(rows, dtype=jnp.int32)
  buffers = Buffers(kernel, total_rows, width, dtype)
  donated = 0 if kernel == "compact" else ()
  found = candidates(kernel, rows, total_rows, width, dtype, backend == "tpu")
  found = {name: jax.jit(function, donate_argnums=donated) for name, function in found.items()}
  runs = {
    name: functools.partial(buffers.run, function, start, row_numbers)
    for name, function in found.items()
  }
  # As many bytes as the rows have, from buffer to buffer: what the device's memory gives.
  copy = jax.jit(lambda to, rows: lax.dynamic_update_slice(to, rows, (0, 0)), donate_argnums=0)
  runs[COPY] = functools.partial(Buffers("compact", rows, width, dtype).run, copy)
  for run in runs.values():
    for _ in range(ROTATED):
      run()
  if backend == "cpu":
    seconds = {name: [] for name in runs}
    names = list(runs)
    for _ in range(calls):
      random.shuffle(names)
      for name in names:
        seconds[name].append(runs[name]())
  else:
    seconds = {name: profile(run, calls) for name, run in runs.items()}
  medians = {name: statistics.median(times) for name, times in seconds.items()}
  row = {"platform": backend, "device": jax.devices()[0].device_kind, "kernel": kernel}
  row |= {"rows": rows, "total_rows": total_rows, "width": width, "dtype": str(jnp.dtype(dtype))}
  return [
    row
    | {
      "offset": offset,
      "implementation": name,
      "seconds": median,
      "of_worst_case": median / medians["dus_worst_case"],
      "of_same_rows": median / medians[SAME_ROWS],
      "of_copy": median / medians[COPY],
    }
    for name, median in medians.items()
  ]


HEADER = (
  f"{'kernel':8} {'rows':>7} {'of all':>7} {'width':>5} {'dtype':9} {'from':>4}"
  f" {'implementation':14} {'ms':>9} {'of worst case':>13} {'of same rows':>12} {'of copy':>8}"
)


def describe_device():
  times = "Wall" if jax.default_backend() == "cpu" else "Device"
  return f"{times} time, medians, on {jax.devices()[0].device_kind}:"


def describe(row):
  return (
    f"{row['kernel']:8} {row['rows']:7,} {row['total_rows']:7,} {row['width']:5} {row['dtype']:9}"
    f" {row['offset']:4} {row['implementation']:14} {1e3 * row['seconds']:9.3f}"
    f" {row['of_worst_case']:13.2f} {row['of_same_rows']:12.2f} {row['of_copy']:8.2f}"
  )


def measure_all(widths, dtypes, calls, megabytes=None):
  """Yields the rows of each case, one after another.

  Args:
    widths, dtypes: of a row.
    calls: of each candidate.
    megabytes: of the worst case; None for 512 on a CPU, and 1024 elsewhere.
  """
  megabytes = megabytes or (512 if jax.default_backend() == "cpu" else 1024)
  for dtype in dtypes:
    for width in widths:
      total_rows = megabytes * 10**6 // (width * jnp.dtype(dtype).itemsize) // 1024 * 1024
      for kernel in "compact", "expand":
        for occupancy in OCCUPANCIES:
          for offset in 0, 5:
            rows = max(256, int(occupancy * total_rows) // 256 * 256)
            yield measure(kernel, rows, total_rows, width, dtype, offset, calls)
