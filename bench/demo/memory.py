"""The memory of one step over time, as the compiler planned it."""

import glob
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
import numpy as np


class LiveBytes(NamedTuple):
  """Bytes of temporaries that are live at each instruction, in the order of the compiler.

  A loop is there once, as is each branch of a conditional.

  Attributes:
    forward: int[instructions] of the forward pass.
    backward: int[instructions] of the backward pass: all behind the last loop of the forward pass.
  """

  forward: np.ndarray
  backward: np.ndarray


def compile_and_follow(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, LiveBytes | None]:
  """Compiles a gradient, and reads what the compiler says of its buffers.

  Returns:
    The compiled program, and its `LiveBytes`; None on a TPU, whose compiler does not tell.
  """
  if jax.default_backend() != "cpu":
    return lowered.compile(), None
  with tempfile.TemporaryDirectory() as folder:
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(compiler_options=options)
    read = lambda name: pathlib.Path(
      *glob.glob(f"{folder}/*after_optimizations-{name}")
    ).read_text()
    texts = read("live-range.txt"), read("buffer-assignment.txt")
  return compiled, live_bytes(*texts, compiled.as_text())


def live_bytes(live_ranges: str, assignment: str, program: str) -> LiveBytes:
  """Follows the temporaries of a program.

  Args:
    live_ranges, assignment: as XLA dumps them for a CPU: when each value is live, and at which
      bytes of which allocation.
    program: the optimised HLO.
  """
  instructions = re.findall(r"^    \d+:(\S+)$", live_ranges, re.MULTILINE)
  ranges = re.findall(r"^    (\S+\{.*\}):(\d+)-(\d+)$", live_ranges, re.MULTILINE)
  ranges = {value: slice(int(first), int(last) + 1) for value, first, last in ranges}
  places = _places_of_temporaries(assignment)
  # Values share bytes, so bytes are counted: between two edges they are live together or not.
  edges = np.unique([edge for place in places.values() for edge in place])
  is_live = np.zeros((len(edges), len(instructions)), bool)
  for value, (start, end) in places.items():
    of_value = slice(*np.searchsorted(edges, (start, end)))
    is_live[of_value, ranges.get(value, slice(0))] = True
  found = np.diff(edges, append=edges[-1:]) @ is_live
  start = _start_of_backward(instructions, program)
  return LiveBytes(found[:start], found[start:])


def _places_of_temporaries(assignment):
  """Returns the first byte of each temporary, and the one behind its last."""
  places, base = {}, 0
  for allocation in assignment.split("\nallocation ")[1:]:
    head, *lines = allocation.splitlines()
    if "preallocated-temp" not in head:
      continue
    for line in lines:
      if found := re.match(r" value: <\d+ (\S+).*> \(size=(\d+),offset=(\d+)\)", line):
        value = found[1] if "{" in found[1] else found[1] + "{}"
        places[value] = base + int(found[3]), base + int(found[3]) + int(found[2])
    base += int(re.search(r"size (\d+)", head)[1])
  return places


def _start_of_backward(instructions, program):
  """Returns the place behind the last loop that is not of a transposed function."""
  loops = re.findall(r"%(\S+) = .* while\(.*op_name=\"([^\"]*)\"", program)
  forward = {name for name, path in loops if "transpose(" not in path}
  return max((i + 1 for i, name in enumerate(instructions) if name in forward), default=0)
