"""Reads, in the scheduled HLO of a program, how rows move between HBM and pinned host memory."""

import functools
import re
from typing import NamedTuple

_ON_HOST = "S(5)"  # Of a layout: the memory of the host.
_COLLECTIVE = re.compile(
  "(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
_SPARSE_CORE = '"OFFLOAD_COLLECTIVE"'  # Of a call that is a collective, beside the TensorCore.


class Transfer(NamedTuple):
  """A copy that is started in one place and waited for in another.

  Attributes:
    kind: "store", from HBM to host memory, or "load".
    rows: of the slice that moves.
    computation: in which it is.
    matmuls: that are scheduled between its start and its end.
    kernels: the names of those of them that are Pallas kernels: the grouped ones.
    collectives: the names of those that are under way at some time between.
    start: the name of the instruction that starts it.
  """

  kind: str
  rows: int
  computation: str
  matmuls: int
  kernels: frozenset[str]
  collectives: frozenset[str]
  start: str


class Beside(NamedTuple):
  """What a loop runs while slices move.

  Attributes:
    kernels: grouped matmuls.
    of: how many grouped matmuls the loop has.
    collectives: between devices.
  """

  kernels: int
  of: int
  collectives: int


class Schedule:
  """The computations of a compiled program, each in the order of its schedule.

  Attributes:
    entry: the name of the first one.
  """

  def __init__(self, text: str):
    self._computations, self.entry, current = {}, None, None
    for line in text.splitlines():
      if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
        current = self._computations.setdefault(head[2], {})
        self.entry = head[2] if head[1] else self.entry
      elif current is not None and (found := re.match(r"\s+(?:ROOT )?%(\S+) = ", line)):
        current[found[1]] = line
    self._home = {name: c for c, lines in self._computations.items() for name in lines}
    self._callers = {}
    for lines in self._computations.values():
      for name, line in lines.items():
        for callee in re.findall(r"body=%?([\w.\-]+)", line):
          self._callers[callee] = name

  def transfers(self) -> list[Transfer]:
    """Returns all copies of slices of buffers in host memory."""
    found = []
    for computation, lines in self._computations.items():
      names = list(lines)
      for index, name in enumerate(names):
        opcode = _opcode(lines[name])
        if opcode not in ("dynamic-update-slice-done", "dynamic-slice-done"):
          continue
        start = _operands(lines[name])[0]
        if _ON_HOST not in lines[start]:
          continue
        first = names.index(start)
        between = names[first + 1 : index]
        matmuls = sum(self._is_matmul(lines[other]) for other in between)
        kernels = frozenset(other for other in between if _is_kernel(lines[other]))
        collectives = frozenset(
          one for one, begin, end in _collectives(lines) if begin < index and end > first
        )
        kind = "store" if "update" in opcode else "load"
        rows = self._rows_of(start, kind)
        found.append(Transfer(kind, rows, computation, matmuls, kernels, collectives, start))
    return found

  def beside(self, kind: str, rows: int) -> Beside:
    """Returns what a loop runs while one slice at least moves.

    Args:
      kind: of the transfers.
      rows: of the slices.
    """
    kernels, of_all, collectives = set(), set(), set()
    for move in self.transfers():
      if (move.kind, move.rows) == (kind, rows) and move.computation != self.entry:
        kernels |= move.kernels
        collectives |= move.collectives
        lines = self._computations[move.computation]
        of_all |= {name for name, line in lines.items() if _is_kernel(line)}
    return Beside(*map(len, (kernels, of_all, collectives)))

  def _rows_of(self, start, kind):
    line = self._line(start)
    if kind == "load":
      return int(re.search(r"dynamic_slice_sizes=\{(\d+),", line)[1])
    return int(re.search(r"\[(\d+),", self._result(_operands(line)[1]))[1])

  def stores_behind(self, load: Transfer) -> list[str]:
    """Returns the ends of the stores whose result a load reads, the latest first.

    Of a loop the result is what a turn makes of it, or what it is given where turns leave it as it
    is. No end is passed by: what is read is what was there when each of them was done.
    """
    found, waiting = [], self._define(_operands(self._line(load.start))[0])
    while waiting is not None and _opcode(self._line(waiting)) == "dynamic-update-slice-done":
      if waiting in found:
        break
      found.append(waiting)
      start = _operands(self._line(waiting))[0]
      waiting = self._define(_operands(self._line(start))[0])
    return found

  def _define(self, name, depth=0):
    """Returns the instruction that makes a buffer, through tuples and loops."""
    line = self._line(name)
    opcode = _opcode(line)
    if depth > 50:
      raise AssertionError(f"{name} is passed on and on")
    again = functools.partial(self._define, depth=depth + 1)
    if opcode in ("bitcast", "opt-barrier"):
      return again(_operands(line)[0])
    if opcode != "get-tuple-element":
      return name
    index, (source,) = int(re.search(r"index=(\d+)", line)[1]), _operands(line)
    of = self._line(source)
    if _opcode(of) == "parameter":
      # What a loop is given: by the turn before, if that changes it; else from outside.
      caller = self._callers[self._home[name]]
      return again(self._element(_operands(self._line(caller))[0], index))
    if _opcode(of) == "while":
      body = re.search(r"body=%?([\w.\-]+)", of)[1]
      lines = self._computations[body]
      root = next(n for n, line in lines.items() if line.lstrip().startswith("ROOT"))
      element = self._element(root, index)
      is_passed_on = _opcode(lines[element]) == "get-tuple-element" and (
        _opcode(self._line(_operands(lines[element])[0])) == "parameter"
      )
      return again(self._element(_operands(of)[0], index) if is_passed_on else element)
    return again(self._element(source, index))

  def _element(self, name, index):
    line = self._line(name)
    if _opcode(line) == "tuple":
      return _operands(line)[index]
    raise AssertionError(f"{name} is {_opcode(line)}, and must be a tuple")

  def _line(self, name):
    return self._computations[self._home[name]][name]

  def _result(self, name):
    return self._line(name).partition(" = ")[2].partition(f" {_opcode(self._line(name))}(")[0]

  def _is_matmul(self, line):
    opcode = _opcode(line)
    if opcode == "custom-call":
      return _is_kernel(line)
    if opcode == "fusion":
      called = re.search(r"calls=%?([\w.\-]+)", line)[1]
      return any(map(self._is_matmul, self._computations[called].values()))
    return opcode in ("convolution", "dot")


def _is_kernel(line):
  """Returns whether an instruction is a Pallas kernel, and none of the stash's own: of a matmul."""
  return "tpu_custom_call" in line and "%stash_" not in line.partition(" = ")[0]


def _collectives(lines):
  """Yields the name of each collective in a computation, and where it starts and ends."""
  start_of = {}
  for index, (name, line) in enumerate(lines.items()):
    opcode = _opcode(line)
    if _SPARSE_CORE in line or _COLLECTIVE.fullmatch(opcode):
      start_of[name] = name, index
      if not opcode.endswith("-start"):
        yield name, index, index
    elif opcode.endswith(("-update", "-done")):
      begun = start_of.get(_operands(line)[0])
      if begun and opcode.endswith("-update"):
        start_of[name] = begun
      elif begun:
        yield *begun, index


def _opcode(line):
  return re.search(r" ([a-z][\w\-]*)\(", line.partition(" = ")[2])[1]


def _operands(line):
  arguments = line.partition(f" {_opcode(line)}(")[2].partition(")")[0]
  return re.findall(r"%([\w.\-]+)", arguments)
