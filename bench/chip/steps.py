"""The steps of `bench.chip`: each a small program whose right result is known."""

from collections.abc import Callable
import dataclasses
import functools
from importlib import metadata
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from bench.chip import copies, matmuls
from bench.chip.copies import assert_same_bits, slice_, update
from bench.kernels import wall
from bench.kernels.cases import BANDWIDTH
import pallas_stash as ps
from reference import ragged_rows

CHIP_OF_KIND = {
  "v5 lite": "v5e",
  "v5e": "v5e",
  "v5p": "v5p",
  "v5": "v5p",
  "v6": "v6e",
  "7": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class Scale:
  """How large the steps are, and of what.

  Attributes:
    implementation: of the kernels.
    dtypes: of the rows whose bits are compared. On a CPU XLA may rewrite bits of some.
    width: of the rows.
    rounds: how often a step repeats what may go wrong only sometimes.
    model_width: of the small model.
    stash_bytes: of the stash that is to be updated in place.
    filled: share of the free memory that the large buffer takes; 0 for one of `stash_bytes`.
    megabytes, calls: of the worst case that is timed, and how often.
    is_tpu: whether the kernels are to be in the compiled programs.
  """

  implementation: str | None = None
  dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int32")
  width: int = 1152
  rounds: int = 20
  model_width: int = 512
  stash_bytes: int = 2**31
  filled: float = 0.8
  megabytes: int = 1024
  calls: int = 11
  is_tpu: bool = True


ON_A_TPU = Scale()
SMALL = Scale(
  dtypes=("float32", "int8"),
  width=128,
  rounds=1,
  model_width=16,
  stash_bytes=2**20,
  filled=0.0,
  megabytes=1,
  calls=2,
  is_tpu=False,
)


@dataclasses.dataclass(frozen=True)
class Step:
  """One step.

  Attributes:
    shows: what it would show, for who reads along.
    if_not: what it means where it fails.
    run: `Scale` to a line that says what was seen; raises an error if that is wrong.
  """

  shows: str
  if_not: str
  run: Callable[[Scale], str]


def here(scale):
  device = jax.devices()[0]
  versions = [f"{name} {metadata.version(name)}" for name in ("jax", "libtpu") if _has(name)]
  return f"{len(jax.devices())} x {device.device_kind}, {', '.join(versions)}"


def _has(name):
  try:
    return bool(metadata.version(name))
  except metadata.PackageNotFoundError:
    return False


def kernels_are_there(scale):
  operand, rows = jnp.zeros((64, scale.width)), jnp.zeros((32, scale.width))
  write = functools.partial(update, implementation=scale.implementation)
  lowered = jax.jit(write).lower(operand, rows, 0, np.array([9]), np.array([2]))
  found = lowered.compile().as_text().count("tpu_custom_call")
  assert (found > 0) == scale.is_tpu, f"{found} kernels in the program"
  return f"{found} kernels in the program"


def peak_bytes():
  statistics = jax.devices()[0].memory_stats()
  return statistics and statistics.get("peak_bytes_in_use")


def in_place(scale):
  spec = jax.ShapeDtypeStruct((scale.width,), jnp.float32)
  capacity = scale.stash_bytes // (4 * scale.width)
  stash = jax.block_until_ready(jax.jit(lambda: ps.Stash.empty(capacity, [spec]))())
  before = peak_bytes()
  rows = jnp.ones((512, scale.width), spec.dtype)
  push = lambda stash: stash.push(
    [rows], ps.RaggedRows(jnp.array([500]), 512), implementation=scale.implementation
  )
  compiled = jax.jit(push, donate_argnums=0).lower(stash).compile()
  stash, _ = jax.block_until_ready(compiled(stash))
  planned = compiled.memory_analysis().temp_size_in_bytes
  used = None if before is None else peak_bytes() - before
  assert max(planned, used or 0) < scale.stash_bytes / 2, f"{planned=} {used=}"
  measured = "not measured here" if used is None else f"{used:,}"
  return f"beside {scale.stash_bytes:,} bytes: {planned:,} planned, {measured} used"


def gradients(scale):
  """A scan of layers, their residuals saved, stashed, and stashed where half of them fit."""
  width, total_rows, layers = scale.model_width, 256, 4
  save = jax.checkpoint_policies.save_only_these_names

  def experts(rows, w, sizes):
    live = (jnp.arange(total_rows) < sizes.sum())[:, None]
    hidden = checkpoint_name(lax.ragged_dot(jnp.where(live, rows, 0), w, sizes), "hidden")
    return jnp.where(live, jnp.sin(hidden), 0)

  f = ps.checkpoint(experts, policy=save("hidden"), implementation=scale.implementation)
  saving = jax.checkpoint(experts, policy=save("hidden"))

  def loss(weights, x, capacity):
    def layer(carry, layer):
      (x, stash), (w, sizes) = carry, layer
      if stash is None:
        return (x + saving(x, w, sizes), None), None
      out, stash = f(stash, ps.RaggedRows(sizes, total_rows), x, w, sizes)
      return (x + out, stash), None

    spec = jax.ShapeDtypeStruct((width,), jnp.float32)
    stash = None if capacity is None else ps.Stash.empty(capacity, [spec])
    layer = jax.checkpoint(layer, policy=save("hidden", ps.SLOT_NAME))
    (x, stash), _ = lax.scan(layer, (x, stash), (weights, sizes))
    return jnp.mean((x if stash is None else ps.seal(x, stash)) ** 2)

  rng = np.random.default_rng(3)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights, x = normal(layers, 4, width, width) / width**0.5, normal(total_rows, width)
  sizes = jnp.asarray(rng.multinomial(100, [0.4, 0.1, 0.3, 0.2], layers), jnp.int32)
  gradient = jax.jit(jax.value_and_grad(loss), static_argnums=2)
  with jax.default_matmul_precision("highest"):
    expected = gradient(weights, x, None)
    worst = {}
    for name, capacity in ("ample", 104 * layers), ("half", 52 * layers):
      actual = gradient(weights, x, capacity)
      worst[name] = max(map(matmuls.relative_difference, actual, expected))
  assert max(worst.values()) < 1e-5, worst
  return "largest relative difference " + ", ".join(f"{n} {w:.1e}" for n, w in worst.items())


def large(scale):
  """Rows behind the last addresses that 32 bits count, in bytes and in elements."""
  free, dtype = scale.stash_bytes, jnp.int8
  if scale.filled:
    statistics = jax.devices()[0].memory_stats()
    free = int(scale.filled * (statistics["bytes_limit"] - statistics["bytes_in_use"]))
  width = 128
  rows = min(free // width // 32 * 32, 2**31 - 4096)
  stash = jax.jit(lambda: jnp.zeros((rows, width), dtype))()
  written = np.random.default_rng(4).integers(1, 100, (96, width), np.int8)
  options = {"implementation": scale.implementation}
  write = jax.jit(functools.partial(update, **options), donate_argnums=0)
  read = jax.jit(functools.partial(slice_, total_rows=96, **options))
  groups = np.int32(rows - 70), np.array([33, 5]), np.array([40, 3])
  stash = write(stash, written, *groups)
  near = ragged_rows.compact(written, np.zeros_like(written), 96 - 70, *groups[1:])
  assert_same_bits(stash[-96:], near, "the last rows")
  expected = ragged_rows.expand(near, 96 - 70, 96, *groups[1:])
  assert_same_bits(read(stash, *groups), expected, "what is read again")
  others = jax.jit(lambda stash: jnp.any(stash[: rows - 96] != 0))(stash)
  assert not others, "rows elsewhere changed"
  return f"{rows:,} rows, {rows * width:,} bytes"


def times(scale):
  found = []
  kind = jax.devices()[0].device_kind.lower()
  chip = next((chip for key, chip in CHIP_OF_KIND.items() if key in kind), None)
  width = 7168 if scale.is_tpu else 128
  total_rows = scale.megabytes * 10**6 // (2 * width) // 1024 * 1024
  for kernel in "compact", "expand":
    rows = max(256, total_rows // 4)
    print(f"    {wall.HEADER}")
    measured = wall.measure(kernel, rows, total_rows, width, "bfloat16", 5, scale.calls)
    for row in measured:
      print(f"    {wall.describe(row)}")
    (ours,) = (row for row in measured if row["implementation"] == wall.OURS)
    moved = (2 * rows if kernel == "compact" else rows + total_rows) * width * 2
    rate = moved / ours["seconds"]
    share = f", {rate / BANDWIDTH[chip]:.0%} of the published bandwidth" if chip else ""
    found.append(f"{kernel} {1e-9 * rate:,.0f} GB/s{share}")
  return "; ".join(found)


STEPS: dict[str, Any] = {
  "here": Step("what runs the rest", "There is no device that works.", here),
  "kernels": Step(
    "that the kernels are in the program, and not XLA's loops",
    "All that follows would be said of XLA's loops. Is the platform called tpu?",
    kernels_are_there,
  ),
  "bits": Step(
    "rows come through bit for bit, aligned and not, in every dtype",
    "If all rows are zero, an operand was in another memory than HBM; if only shifted rows are"
    " wrong, see `order`; if only one dtype, its view as words.",
    copies.bits,
  ),
  "order": Step(
    "vector stores and loads through views of other dtypes, and DMAs from them, keep their order",
    "Rows near the edges of groups are stale: a load passed a store to the same landing slot, or a"
    " DMA left before the store.",
    copies.order,
  ),
  "cores": Step(
    "two cores share the rows and no HBM tile",
    "If half of the rows are missing, one core did not run; if rows where the halves meet are"
    " wrong, cores share a tile.",
    copies.cores,
  ),
  "bounds": Step(
    "no DMA leaves its buffers, as the chip itself checks in the mode of `debug`",
    "A DMA leaves a buffer: the runtime names it.",
    copies.bounds,
  ),
  "many_calls": Step(
    "semaphores end at zero, stores are finished: kernels one after another",
    "If it hangs or halts, a semaphore is left raised; if rows are wrong, a kernel ends before its"
    " stores.",
    copies.many_calls,
  ),
  "in_place": Step(
    "a donated stash is updated where it is",
    "A second stash was allocated: XLA copied it.",
    in_place,
  ),
  "gradients": Step(
    "gradients of scanned layers are those of saved residuals, at any capacity",
    "If they are NaN, the stash was not handed over as it is on a CPU; if they differ little, see"
    " what XLA fused.",
    gradients,
  ),
  "matmuls": Step(
    "grouped matmuls write rows to the stash and read them there",
    "If d_rhs alone is wrong, rows were read from another place than they lie in, or before they"
    " were there; if it is NaN, see `gradients`.",
    matmuls.grouped,
  ),
  "mlp": Step(
    "the matmul that makes gate and up stores them, and the backward one reads them there",
    "If the result is right and gradients are not, rows were stored before they were whole, or read"
    " elsewhere; if those without room alone are wrong, they were made again wrongly.",
    matmuls.mlp,
  ),
  "large": Step(
    "rows behind 2^31 bytes and elements are where they should be",
    "An address or a size overflowed.",
    large,
  ),
  "times": Step(
    "what the kernels take, beside what users would pick instead",
    "The profiler gave no times.",
    times,
  ),
}
