"""Compiles programs for TPUs that this host does not have, and reads the optimised HLO.

The environment must be that of `bench.tpu.environment`.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# GiB of a device that a program may use, as the compiler's own out-of-memory error states them.
HBM_GIB = {"v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}

REPLICATED = PartitionSpec()

# What names a buffer that is there, or gives it its first contents.
_NOT_A_COPY = {
  *("parameter", "tuple", "get-tuple-element", "bitcast", "broadcast"),
  *("while", "conditional", "call", "optimization-barrier"),
  "dynamic-slice-start",
}


def hbm_bytes(topology):
  """Bytes of a device of a topology, such as "v5p:8x8x4", that a program may use."""
  return int(HBM_GIB[topology.partition(":")[0]] * 2**30)


@functools.cache
def mesh(chip, devices=1):
  """A mesh of the first `devices` of the chip's topology, all along the axis "expert"."""
  topology = topologies.get_topology_desc(topology_name=TOPOLOGIES[chip], platform="tpu")
  return jax.sharding.Mesh(topology.devices[:devices], ("expert",))


def place(tree, mesh, specs=REPLICATED):
  """Shapes for ahead-of-time compilation: `tree`, sharded by the pytree prefix `specs`."""

  def place_subtree(spec, subtree):
    sharding = NamedSharding(mesh, spec)
    struct = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(struct, subtree)

  return jax.tree.map(place_subtree, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of the optimised HLO.

  Attributes:
    name: without its number; a Pallas kernel's is the kernel's.
    opcode: as HLO spells it.
    result: text of the result's shape; of a tuple, of all of them.
    operands: of a custom call, the text of each operand's shape.
    aliased: of a custom call, {which of its results: the operand whose memory that has}, by number.
    target: of a custom call; "" for all else.
    is_conditional: whether it only runs in a branch of a conditional.
    is_dearer: whether it only runs in branches of conditionals that have more FLOPs than another.
    runs: how often it runs in one run of the program, in whichever branch; None if the number of
      turns of a loop around it is not a constant.
    flops: floating-point operations of one run, of matmuls and kernels only. A kernel's are its
      `cost_estimate`.
  """

  name: str
  opcode: str
  result: str
  operands: tuple[str, ...]
  aliased: dict[int, int]
  target: str
  is_conditional: bool
  is_dearer: bool
  runs: int | None
  flops: int

  @property
  def is_kernel(self):
    return self.target == "tpu_custom_call"

  @property
  def is_ours(self):
    return self.is_kernel and self.name.startswith("stash_")

  @property
  def new_results(self):
    """The text of the shape of each result that is not in the memory of an operand."""
    results = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", self.result)
    return [result for i, result in enumerate(results) if i not in self.aliased]


class Program:
  """A compiled program.

  Attributes:
    memory: what `memory_analysis` of the compiled program returned; of one device.
    instructions: a list of `Instruction`, those of fusions and loops included.
  """

  def __init__(self, compiled):
    self.memory = compiled.memory_analysis()
    self.instructions = _parse(compiled.as_text())

  @property
  def hbm_bytes(self):
    """The peak of HBM; or where host memory is larger, all that is allocated of HBM.

    Of several memories `peak_memory_in_bytes` is the largest peak of one, beside arguments and
    results, so it is that of HBM if it is more than those and all of host memory. What is allocated
    is more than the peak by what lies idle between arrays. None where jax tells neither, which
    before 0.12 is wherever there is host memory.
    """
    memory, host_bytes = self.memory, self.memory.host_temp_size_in_bytes
    peak = memory.peak_memory_in_bytes
    if not host_bytes:
      return peak
    if not hasattr(memory, "indefinite_allocations"):
      return None
    is_of_hbm = peak > host_bytes + memory.indefinite_allocations
    return peak if is_of_hbm else memory.total_allocation_bytes

  def kernels(self, is_conditional=None):
    """Counts the stash kernels by name; all, or those that are or are not in a conditional."""
    return collections.Counter(
      i.name for i in self.instructions if i.is_ours and is_conditional in (None, i.is_conditional)
    )

  def matmuls(self, is_conditional):
    """Counts the matmuls by kind, "dot" or "kernel", that are or are not in a conditional."""
    kinds = collections.Counter()
    for i in self.instructions:
      if i.is_conditional != is_conditional:
        continue
      # XLA computes the metadata of its own ragged dots in a kernel too.
      kinds["kernel"] += i.is_kernel and not i.is_ours and not i.name.endswith("-metadata")
      kinds["dot"] += i.opcode in ("dot", "convolution")
    return kinds

  def flops(self, of_kernels=1):
    """Floating-point operations of a run that takes the branch of each conditional with the fewest.

    Where rows are stored, that is: nothing is computed again. Of matmuls and kernels, on one
    device. None if a loop runs for a number of turns that is not a constant.

    Args:
      of_kernels: a fraction, by which to multiply what kernels declare.
    """
    counted = [i for i in self.instructions if i.flops and not i.is_dearer]
    if any(i.runs is None for i in counted):
      return None
    scale = lambda i: of_kernels if i.target == "tpu_custom_call" else 1
    return int(sum(i.runs * i.flops * scale(i) for i in counted))

  def copies(self, *buffers):
    """The instructions that make another array of the shape and dtype of one of `buffers`.

    Not those that name a buffer that is there, or allocate one; nor kernels and updates of a slice
    that are in place: where one cannot be, XLA puts a copy in front of it. Nor the start of a slice
    that is read asynchronously, which names the buffer that it reads; its end makes the slice.
    """
    shapes = {f"{_hlo_dtype(b.dtype)}[{','.join(map(str, b.shape))}]" for b in buffers}
    return [
      f"{i.name}: {i.opcode} -> {i.result}"
      for i in self.instructions
      if any(shape in result for shape in shapes for result in i.new_results)
      and i.opcode not in _NOT_A_COPY
      and i.target != "AllocateBuffer"
      and "dynamic-update-slice" not in i.opcode + i.name
    ]

  def outside_hbm(self):
    """The operands and results of stash kernels that are in another memory than HBM."""
    return [
      f"{i.name}: {shape}"
      for i in self.instructions
      for shape in (*i.operands, i.result)
      if i.is_ours and re.search(r"S\(\d+\)", shape)
    ]


def compile(fun, *args, **jit_options):
  """Compiles `fun` for the devices that its arguments, as `place` returns them, are on."""
  return Program(jax.jit(fun, **jit_options).lower(*args).compile())


def _hlo_dtype(dtype):
  bits = {"float": "f", "int": "s"}
  special = {"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}
  kind, size = re.fullmatch(r"([a-z]+)(\d+).*", str(dtype)).groups()
  return special.get(str(dtype)) or bits[kind] + size


def _parse(text):
  """Returns the instructions of an HLO module."""
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if head:
      current = computations.setdefault(head[2], {})
      entry = head[2] if head[1] else entry
    elif current is not None and (found := re.match(r"\s+(?:ROOT )?%(\S+) = ", line)):
      current[found[1]] = line

  def callees(line):
    attributes = line.partition(", backend_config=")[0].partition("), ")[2]
    return [name for name in re.findall(r"[\w.\-]+", attributes) if name in computations]

  always, cheapest, runs = set(), set(), collections.Counter()

  @functools.cache
  def flops_of(computation):
    """Floating-point operations of one run; of a loop, of one turn: to compare branches by."""
    total = 0
    for line in computations[computation].values():
      inner = [flops_of(callee) for callee in callees(line)]
      total += _flops(line, computations[computation])
      total += min(inner) if _opcode(line) == "conditional" else sum(inner)
    return total

  def visit(computation, times, is_conditional, is_dearer):
    if not is_conditional:
      always.add(computation)
    if not is_dearer:
      cheapest.add(computation)
    # A computation that is called from several places runs as often as all of them together.
    runs[computation] = None if None in (times, runs[computation]) else runs[computation] + times
    for line in computations[computation].values():
      is_loop, is_branch = _opcode(line) == "while", _opcode(line) == "conditional"
      turns = _turns(line, computations, computations[computation]) if is_loop else 1
      least = min(map(flops_of, callees(line))) if is_branch else None
      for callee in callees(line):
        inner = None if None in (times, turns) else times * turns
        is_dearer_here = is_branch and flops_of(callee) > least
        visit(callee, inner, is_conditional or is_branch, is_dearer or is_dearer_here)

  visit(entry, 1, False, False)
  return [
    Instruction(
      name=re.match(r"[^.]+", name)[0],
      opcode=_opcode(line),
      result=_result(line),
      operands=tuple(
        _result(computations[computation][operand])
        for operand in (_operands(line) if _opcode(line) == "custom-call" else ())
      ),
      aliased=_aliased(line),
      target=(re.findall(r'custom_call_target="(\w+)"', line) or [""])[0],
      is_conditional=computation not in always,
      is_dearer=computation not in cheapest,
      runs=runs[computation],
      flops=_flops(line, computations[computation]),
    )
    for computation in runs
    for name, line in computations[computation].items()
  ]


def _opcode(line):
  return re.search(r" ([a-z][\w\-]*)\(", line.partition(" = ")[2])[1]


def _result(line):
  return line.partition(" = ")[2].partition(f" {_opcode(line)}(")[0]


def _operands(line):
  """Names of the operands of an instruction."""
  return re.findall(r"%([\w.\-]+)", re.search(r" [a-z][\w\-]*\((.*?)\)(, |$)", line)[1])


def _aliased(line):
  aliasing = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", line)
  pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", aliasing[1] if aliasing else "")
  return {int(result or 0): int(operand) for result, operand in pairs}


def _dimensions(shape):
  return [int(size) for size in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if size]


def _flops(line, computation):
  """Floating-point operations of a matmul or kernel; 0 for any other instruction."""
  estimate = re.search(r'"cost_estimate":\{"flops":"(\d+)"', line)
  if estimate:
    return int(estimate[1])
  if _opcode(line) == "convolution":  # How a TPU program spells a matmul.
    lhs_labels = re.search(r"dim_labels=(\w+)_", line)[1]
    lhs = _dimensions(_result(computation[_operands(line)[0]]))
    return 2 * math.prod(_dimensions(_result(line))) * lhs[lhs_labels.index("f")]
  if _opcode(line) == "dot":
    lhs = _dimensions(_result(computation[_operands(line)[0]]))
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1].split(",")
    return 2 * math.prod(_dimensions(_result(line)) + [lhs[int(axis)] for axis in contracted])
  return 0


def _turns(line, computations, computation):
  """How often the body of a while loop runs; None where that is not a constant.

  A `lax.scan` counts up to a constant by one, from one where the first turn was peeled off.
  """
  condition = computations[re.search(r"condition=%?([\w.\-]+)", line)[1]]
  root = [line for line in condition.values() if line.lstrip().startswith("ROOT")][0]
  if _opcode(root) != "compare" or "direction=LT" not in root:
    return None
  counter, end = (condition[name] for name in _operands(root))
  if _opcode(counter) != "get-tuple-element" or (end := _constant(end)) is None:
    return None
  index = int(re.search(r"index=(\d+)", counter)[1])
  start = computation[_operands(line)[0]]
  while _opcode(start) == "tuple":
    start = computation[_operands(start)[index]]
  while _opcode(start) in ("copy", "bitcast"):
    start = computation[_operands(start)[0]]
  start = _constant(start)
  return None if start is None else end - start


def _constant(line):
  value = re.search(r" constant\((-?\d+)\)", line)
  return value and int(value[1])
