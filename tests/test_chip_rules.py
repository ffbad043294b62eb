"""What passes interpretation and compilation and then fails on hardware: that it is not here.

Collected from public reports of other kernels. What can be seen without a chip is pinned, in
interpreted kernels, in compiled programs and in jaxprs; `docs/on-a-tpu.md` says what cannot.
"""

import collections
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash.kernels.tiling import row_alignment
from reference import moe
from tests.helpers.checks import long, once
from tests.helpers.kernel_check import Case, copy_runs, edge_cases, kernels_of, UNEVEN
from tests.helpers.support import as_rows, IMPLEMENTATIONS

CHIPS = list(aot.TOPOLOGIES)
struct = jax.ShapeDtypeStruct
SIZES, START = struct((8,), jnp.int32), struct((), jnp.int32)


# DMAs of interpreted kernels.

TILES = Case(168, 128, 160, 128)


def counting_copy(destination_rows, noted):
  """Returns a `pltpu.make_async_copy` that notes the DMAs that run, as (event, numbers)."""
  make_async_copy, semaphores = pltpu.make_async_copy, {}
  refs = []  # Kept, so that no other has the `id` of one.

  class CountedCopy:
    def __init__(self, source, destination, semaphore):
      self._copy = make_async_copy(source, destination, semaphore)
      refs.append(semaphore.ref)
      is_store = len(destination.ref.shape) == 2  # VMEM is [slots, rows, columns].
      hbm = destination if is_store else source
      rows = hbm.transforms[-1].indices[0]
      self._numbers = {
        "core": pl.program_id(0),
        "semaphore": semaphores.setdefault(id(semaphore.ref), len(semaphores)),
        "slot": semaphore.transforms[-1].indices[0],
        "row": rows.start,
        "rows": rows.size,
        "is_of_destination": is_store or hbm.ref.shape[0] == destination_rows,
      }

    def _note(self, event):
      note = lambda **found: noted.append((event, {k: int(v) for k, v in found.items()}))
      jax.debug.callback(note, **self._numbers)

    def start(self):
      self._note("start")
      self._copy.start()

    def wait(self):
      self._note("wait")
      self._copy.wait()

  return CountedCopy


@pytest.mark.once
@pytest.mark.skipif("mosaic_interpret" not in IMPLEMENTATIONS, reason="counts interpreted DMAs")
@pytest.mark.parametrize(
  "kernel, case, dtype",
  [
    ("compact", TILES, "bfloat16"),
    long("expand", TILES, "bfloat16"),
    long("expand_undefined", TILES, "bfloat16"),
    long("compact", UNEVEN, "int8"),
  ],
)
def test_waits_equal_starts_and_no_hbm_tile_is_shared(kernel, case, dtype, monkeypatch):
  """Each semaphore ends at zero, and cores touch no HBM tile of the destination together."""
  alignment = row_alignment(jnp.dtype(dtype).itemsize)
  sizes = case.total_rows, case.stash_rows
  source_rows, destination_rows = (-(-rows // alignment) * alignment for rows in sizes)
  if kernel != "compact":
    source_rows, destination_rows = destination_rows, source_rows
  assert source_rows != destination_rows  # By which they are told apart.
  noted = []
  monkeypatch.setattr(pltpu, "make_async_copy", counting_copy(destination_rows, noted))
  compact, expand = kernels_of.__wrapped__("mosaic_interpret", case, dtype)
  rows = jnp.zeros((case.total_rows, case.width), dtype)
  stash = jnp.zeros((case.stash_rows, case.stash_width), dtype)
  cores_that_worked = set()
  for layout, start in edge_cases(case):
    noted.clear()
    to_stash, from_stash = copy_runs(case, *map(as_rows, (*layout, start)))
    if kernel == "compact":
      out = compact(rows, stash, to_stash)
    else:
      out = expand(stash, from_stash, jnp.zeros((), dtype), kernel == "expand")
    jax.block_until_ready(out)
    jax.effects_barrier()

    raised, core_of_tile = collections.Counter(), {}
    for event, dma in noted:
      semaphore = dma["core"], dma["semaphore"], dma["slot"]
      raised[semaphore] += dma["rows"] if event == "start" else -dma["rows"]
      assert dma["rows"] > 0 and dma["rows"] % alignment == 0
      if event == "start" and dma["is_of_destination"]:
        assert dma["row"] % alignment == 0
        for row in range(dma["row"], dma["row"] + dma["rows"], alignment):
          assert core_of_tile.setdefault(row, dma["core"]) == dma["core"], (layout, start, row)
    assert not any(raised.values()), (layout, start, raised)
    cores_that_worked |= set(core_of_tile.values())
  assert cores_that_worked == {0, 1}


# Compiled programs.


def write(operand, update, start, sizes):
  return ps.dynamic_update_slice(operand, update, (start, 0), group_sizes=sizes)


def read(operand, start, sizes):
  shape = operand.shape[0] // 2, operand.shape[1]
  return ps.dynamic_slice(operand, (start, 0), shape, group_sizes=sizes)


def write_and_read(operand, update, start, sizes):
  """Between fusions, which XLA would have write to VMEM, and read from it, where there is room."""
  operand = write(operand + 1, update + 1, start, sizes)
  return operand + 1, read(operand, start + 1, sizes) + 1


def gradient(operand, update, start, sizes):
  """The cotangent of the result is written in place, and rows are read from it before."""
  operands = jnp.zeros_like(operand), update
  _, vjp = jax.vjp(lambda *operands: write(*operands, start, sizes), *operands)
  return vjp(operand)


def rewrite(operand, update, start, sizes):
  """A buffer is written, read and written again."""
  operand = write(operand, update, start, sizes)
  return write(operand, 2 * read(operand, start, sizes), start + 8, sizes)


def scanned(operand, update, start, sizes):
  def step(carry, scale):
    operand, start = carry
    return (rewrite(operand, update * scale, start, sizes), start + 8), None

  return lax.scan(step, (operand, start), jnp.arange(1, 4, dtype=update.dtype))[0][0]


def read_only(operand, update, start, sizes):
  del update
  return read(operand, start, sizes)


@functools.cache
def compiled(function, chip, dtype="bfloat16", rows=2**15, width=2048):
  """Returns a program, that donates its first argument if it writes, and that argument's shape."""
  pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
  operand, update = struct((rows, width), dtype), struct((rows // 2, width), dtype)
  args = aot.place((operand, update, START, SIZES), aot.mesh(chip))
  donated = () if function is read_only else 0
  return aot.compile(function, *args, donate_argnums=donated), operand


@pytest.mark.parametrize("dtype", [long("float32"), "bfloat16", long("int8")])
@pytest.mark.parametrize("chip", CHIPS)
def test_operands_are_in_hbm(chip, dtype):
  """XLA would put what is small, and made and used by fusions, into VMEM."""
  program, _ = compiled(write_and_read, chip, dtype, 128, 256)
  assert program.kernels() == {"stash_compact": 1, "stash_expand": 1}
  assert program.outside_hbm() == []


@pytest.mark.parametrize(
  "function, chip",
  [
    *(once(write, "v5e"), (gradient, "v5p"), once(rewrite, "v6e")),
    *(once(scanned, "v5e"), (scanned, "tpu7x")),
  ],
)
def test_several_uses_of_a_buffer_do_not_copy_it(function, chip):
  """Nor does one, whose result is just returned."""
  program, operand = compiled(function, chip)
  assert program.copies(operand) == []
  assert program.memory.alias_size_in_bytes == 2 * operand.size
  assert program.outside_hbm() == []


@pytest.mark.parametrize("chip", CHIPS)
def test_a_result_that_is_returned_is_not_copied(chip):
  program, operand = compiled(read_only, chip)
  assert program.kernels() == {"stash_expand": 1}
  assert program.copies(struct((operand.shape[0] // 2, operand.shape[1]), operand.dtype)) == []


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_aliases_all_of_what_it_writes(chip):
  program, _ = compiled(write_and_read, chip, "float32", 128, 256)
  for kernel in (i for i in program.instructions if i.is_ours):
    assert [kernel.operands[kernel.aliased[0]]] == [kernel.result]


@pytest.mark.parametrize("function, chip", [(gradient, "v5p"), (scanned, "tpu7x")])
def test_no_program_scatters(function, chip):
  program, _ = compiled(function, chip)
  assert not [i for i in program.instructions if "scatter" in i.opcode]


# Jaxprs.


def scatters(jaxpr):
  """Returns the modes of all scatters of a jaxpr."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name.startswith("scatter"):
      found.append(equation.params["mode"])
    for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
      if hasattr(inner, "eqns"):
        found += scatters(getattr(inner, "jaxpr", inner))
  return found


def gradient_of_experts():
  experts = {"wi_0": jnp.ones((2, 4, 8)), "wi_1": jnp.ones((2, 4, 8)), "wo": jnp.ones((2, 8, 4))}
  choices = jnp.array([[0, 5], [1, 9], [2, 7]])  # The rows of some choices are on other devices.
  args = jnp.arange(6) % 3, choices, jnp.ones((3, 2)), jnp.array([2, 1])

  def loss(tokens, experts):
    return jnp.sum(moe.expert_ffn(tokens, *args, experts, grouped_matmul=lax.ragged_dot))

  return jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((3, 4)), experts)


def rows_in_groups():
  ragged = ps.RaggedRows(np.array([2, 1]), 8, np.array([4, 0]))
  return jax.make_jaxpr(ragged.is_in_group)()


@pytest.mark.parametrize("trace", [gradient_of_experts, rows_in_groups])
def test_no_scatter_is_left_to_drop_rows(trace):
  modes = scatters(trace().jaxpr)
  assert len(modes) >= 2
  assert set(modes) == {lax.GatherScatterMode.PROMISE_IN_BOUNDS}
