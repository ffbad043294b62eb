"""Compiles programs for TPUs that this host does not have, and reads the optimised HLO."""

import collections
import dataclasses
import functools
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
}


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
    target: of a custom call; "" for all else.
    is_conditional: whether it only runs in a branch of a conditional.
  """

  name: str
  opcode: str
  result: str
  target: str
  is_conditional: bool

  @property
  def is_kernel(self):
    return self.target == "tpu_custom_call"

  @property
  def is_ours(self):
    return self.is_kernel and self.name.startswith("stash_")


class Program:
  """A compiled program.

  Attributes:
    memory: what `memory_analysis` of the compiled program returned; of one device.
    instructions: a list of `Instruction`, those of fusions and loops included.
  """

  def __init__(self, compiled):
    self.memory = compiled.memory_analysis()
    self.instructions = _parse(compiled.as_text())

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

  def copies(self, *buffers):
    """The instructions that make another array of the shape and dtype of one of `buffers`.

    Not those that name a buffer that is there, or allocate one; nor compact, which is in place.
    """
    shapes = {f"{_hlo_dtype(b.dtype)}[{','.join(map(str, b.shape))}]" for b in buffers}
    return [
      f"{i.name}: {i.opcode} -> {i.result}"
      for i in self.instructions
      if any(shape in i.result for shape in shapes)
      and i.opcode not in _NOT_A_COPY
      and i.target != "AllocateBuffer"
      and not (i.is_ours and i.name == "stash_compact")
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
      current = computations.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif current is not None and re.match(r"\s+(ROOT )?%\S+ = ", line):
      current.append(line.partition(", backend_config=")[0])

  def reachable(through_branches):
    found, queue = set(), [entry]
    while queue:
      computation = queue.pop()
      if computation not in found:
        found.add(computation)
        for line in computations[computation]:
          if through_branches or _opcode(line) != "conditional":
            queue += set(re.findall(r"[\w.\-]+", line.partition("), ")[2])) & computations.keys()
    return found

  always = reachable(through_branches=False)
  return [
    Instruction(
      name=re.match(r"\s+(?:ROOT )?%([^\s.]+)", line)[1],
      opcode=_opcode(line),
      result=line.partition(" = ")[2].partition(f" {_opcode(line)}(")[0],
      target=(re.findall(r'custom_call_target="(\w+)"', line) or [""])[0],
      is_conditional=computation not in always,
    )
    for computation in reachable(through_branches=True)
    for line in computations[computation]
  ]


def _opcode(line):
  return re.search(r" ([a-z][\w\-]*)\(", line.partition(" = ")[2])[1]
