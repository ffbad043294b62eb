"""What to run first on a TPU: minutes, from what is most likely to be wrong to what takes longest.

    make chip                       # on a host with a TPU; says so where there is none
    python -m bench.chip --rehearse # the same steps, smaller, on whatever is here

`docs/on-a-tpu.md` says what each step would show. A step that fails is reported, and the next ones
run all the same; the exit status is 1 if any did.
"""

import functools
import time
import traceback

from absl import app, flags
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from reference import ragged_rows

FLAGS = flags.FLAGS
flags.DEFINE_bool("rehearse", False, "Run smaller steps on a host without a TPU.")
flags.DEFINE_multi_string("step", None, "Run only these.")

DTYPES = "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2", "float16"
# Sizes and starts of groups in 520 rows: at odd rows and even ones, empty, within one HBM tile,
# over several, in any order. As many groups in each, so that one program copies all of them.
LAYOUTS = {
  "a prefix": ([201, 0, 64, 3, 0], [0, 201, 201, 265, 268]),
  "an odd run": ([333, 0, 0, 0, 0], [13, 0, 0, 0, 0]),
  "odd groups": ([64, 7, 0, 129, 1], [301, 0, 9, 77, 515]),
  "whole tiles": ([64, 128, 32, 0, 0], [256, 0, 480, 0, 0]),
}
TOTAL_ROWS, STASH_ROWS = 520, 416


def check(actual, expected, what):
  """Raises an AssertionError that tells the first row that differs."""
  actual, expected = (np.asarray(x).view(np.uint8) for x in (actual, expected))
  if (actual != expected).any():
    rows = np.flatnonzero((actual != expected).any(1))
    raise AssertionError(f"{what}: {len(rows)} rows differ, the first is row {rows[0]}")


def random_bits(rng, shape, dtype):
  itemsize = jnp.dtype(dtype).itemsize
  return rng.integers(0, 256, (*shape, itemsize), np.uint8).view(dtype)[..., 0]


@functools.partial(jax.jit, donate_argnums=0)
def write(stash, rows, start, sizes, starts):
  return ps.dynamic_update_slice(stash, rows, (start, 0), group_sizes=sizes, group_starts=starts)


@functools.partial(jax.jit, static_argnums=4)
def read(stash, start, sizes, starts, total_rows):
  shape = total_rows, stash.shape[1]
  return ps.dynamic_slice(stash, (start, 0), shape, group_sizes=sizes, group_starts=starts)


def copy_bits(dtype, width, checks=""):
  """Compacts and expands random bits, from aligned and from odd stash rows."""
  rng = np.random.default_rng(0)
  for name, (sizes, starts) in LAYOUTS.items():
    for start in (0, 32, 5):
      rows, stash = (random_bits(rng, (n, width), dtype) for n in (TOTAL_ROWS, STASH_ROWS))
      groups = np.int32(start), np.array(sizes, np.int32), np.array(starts, np.int32)
      written = write(jnp.asarray(stash), rows, *groups)
      what = f"{dtype}, {name}, stash row {start}{checks}"
      expected = ragged_rows.compact(rows, stash, start, sizes, starts)
      check(written, expected, f"compact, {what}")
      expected = ragged_rows.expand(expected, start, TOTAL_ROWS, sizes, starts)
      check(read(written, *groups, TOTAL_ROWS), expected, f"expand, {what}")


def copies():
  """Every dtype, bit for bit: bfloat16 first."""
  for dtype in DTYPES:
    copy_bits(dtype, 256)
  return f"{len(DTYPES)} dtypes, {len(LAYOUTS)} layouts, 3 stash rows each"


def bounds():
  """The same with the bounds of every DMA checked: a chip halts where one is not inside."""
  with ps.debug():
    copy_bits("bfloat16", 384, ", bounds checked")
  return "no DMA out of bounds"


def repeats(is_rehearsal):
  """Many small groups, many times: a race shows as other bits now and then."""
  total_rows, width, times = (1024, 256, 2) if is_rehearsal else (65_536, 2048, 30)
  rng = np.random.default_rng(1)
  sizes = np.full(total_rows // 128, 64, np.int32)
  starts = (rng.permutation(len(sizes)) * 128 + rng.integers(0, 64, len(sizes))).astype(np.int32)
  rows = random_bits(rng, (total_rows, width), jnp.bfloat16)
  stash = random_bits(rng, (total_rows, width), jnp.bfloat16)
  groups = np.int32(3), sizes, starts
  first = ragged_rows.compact(rows, stash, 3, sizes, starts)
  back = ragged_rows.expand(first, 3, total_rows, sizes, starts)
  for time_number in range(times):
    written = write(jnp.asarray(stash), rows, *groups)
    check(written, first, f"compact, time {time_number}")
    check(read(written, *groups, total_rows), back, f"expand, time {time_number}")
  return f"{len(sizes)} groups of 64 rows at any row, {times} times: the same bits"


def in_place():
  """A donated stash is the same memory afterwards."""
  stash = ps.Stash.empty(4096, [jax.ShapeDtypeStruct((256,), jnp.bfloat16)])
  before = stash.buffers[0].unsafe_buffer_pointer()
  push = jax.jit(lambda stash, rows, ragged: stash.push([rows], ragged), donate_argnums=0)
  rows, ragged = jnp.ones((1024, 256), jnp.bfloat16), ps.RaggedRows(jnp.array([7, 300]), 1024)
  stash, _ = push(stash, rows, ragged)
  assert stash.buffers[0].unsafe_buffer_pointer() == before, "the stash was copied"
  return "donated, not copied"


def gradients(is_rehearsal):
  """Layers under `jax.checkpoint` in a scan: saved, in a stash, and half of them recomputed."""
  total_rows, width, layers = (128, 128, 3) if is_rehearsal else (8192, 1024, 8)
  save = jax.checkpoint_policies.save_only_these_names
  counts = jnp.arange(1, layers + 1, dtype=jnp.int32) * (total_rows // (2 * layers))
  x = jax.random.normal(jax.random.key(0), (total_rows, width)).astype(jnp.bfloat16)
  weights = jax.random.normal(jax.random.key(1), (layers, width, width)) / width**0.5
  weights = weights.astype(jnp.bfloat16)

  def experts(x, w, count):
    is_row = (jnp.arange(total_rows) < count)[:, None]
    return jnp.where(is_row, jnp.tanh(checkpoint_name(x @ w, "hidden")), 0)

  def gradient(capacity):
    f = ps.checkpoint(experts, policy=save("hidden"))
    saving = jax.checkpoint(experts, policy=save("hidden"))

    def layer(carry, xs):
      x, stash = carry
      if stash is None:
        return (x + saving(x, *xs), None), None
      out, stash = f(stash, ps.RaggedRows(xs[1][None], total_rows), x, *xs)
      return (x + out, stash), None

    def loss(weights):
      stash = None
      if capacity is not None:
        stash = ps.Stash.empty(capacity, [jax.ShapeDtypeStruct((width,), jnp.bfloat16)])
      policy = save("hidden", ps.SLOT_NAME)
      (y, stash), _ = lax.scan(jax.checkpoint(layer, policy=policy), (x, stash), (weights, counts))
      y = y if stash is None else ps.seal(y, stash)
      return jnp.mean(y.astype(jnp.float32) ** 2)

    exact = {"xla_allow_excess_precision": False}
    return np.asarray(jax.jit(jax.grad(loss), compiler_options=exact)(weights), np.float32)

  saved, needed = gradient(None), int(sum(-(-int(c) // 8) * 8 for c in counts))
  np.testing.assert_array_equal(gradient(needed), saved, "in a stash")
  largest = np.abs(saved).max()
  np.testing.assert_allclose(gradient(needed // 2), saved, rtol=0.02, atol=0.02 * largest)
  return f"{layers} layers, {needed} rows: equal bit for bit; half of them recomputed: to rounding"


def large(is_rehearsal):
  """Rows behind element 2**31 of a stash: addresses that do not fit 32 bits."""
  width, rows = 2048, 2**31 // 2048 + 4096
  if is_rehearsal:
    rows = 8192
  stash = lax.empty((rows, width), jnp.bfloat16)
  values = random_bits(np.random.default_rng(2), (TOTAL_ROWS, width), jnp.bfloat16)
  sizes, starts = LAYOUTS["odd groups"]
  groups = np.int32(rows - 300), np.array(sizes, np.int32), np.array(starts, np.int32)
  back = read(write(stash, values, *groups), *groups, TOTAL_ROWS)
  tight = ragged_rows.compact(values, np.zeros_like(values), 0, sizes, starts)
  check(back, ragged_rows.expand(tight, 0, TOTAL_ROWS, sizes, starts), "the last rows")
  return f"{rows * width / 2**31:.2f} times 2**31 elements"


def speed(is_rehearsal):
  """Compact and expand of a DeepSeek-V3 residual, by wall time; `make bench` measures properly."""
  total_rows, routed, width, calls = (2048, 512, 256, 2)
  if not is_rehearsal:
    total_rows, routed, width, calls = 262_144, 65_536, 7168, 20
  sizes, start = np.array([routed], np.int32), np.int32(0)
  rows, stash = jnp.ones((total_rows, width), jnp.bfloat16), lax.empty((routed, width), "bfloat16")
  stash = write(stash, rows, start, sizes, None)
  jax.block_until_ready(read(stash, start, sizes, None, total_rows))
  row_bytes, lines = 2 * width, []
  for name, moved in (("compact", 2 * routed), ("expand", routed + total_rows)):
    started = time.perf_counter()
    for _ in range(calls):
      if name == "compact":
        stash = write(stash, rows, start, sizes, None)
      else:
        out = read(stash, start, sizes, None, total_rows)
    jax.block_until_ready(stash if name == "compact" else out)
    seconds = (time.perf_counter() - started) / calls
    lines.append(f"{name} {1e3 * seconds:.2f} ms, {moved * row_bytes / seconds / 1e9:,.0f} GB/s")
  return "; ".join(lines)


def steps(is_rehearsal):
  return {
    "copies": copies,
    "bounds": bounds,
    "repeats": functools.partial(repeats, is_rehearsal),
    "in_place": in_place,
    "gradients": functools.partial(gradients, is_rehearsal),
    "large": functools.partial(large, is_rehearsal),
    "speed": functools.partial(speed, is_rehearsal),
  }


def main(argv):
  del argv
  device = jax.devices()[0]
  if device.platform != "tpu" and not FLAGS.rehearse:
    print(f"chip NOT RUN: there is no TPU here, only {device.device_kind}; see docs/on-a-tpu.md")
    return
  print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
  failed = False
  for name, step in steps(FLAGS.rehearse).items():
    if FLAGS.step and name not in FLAGS.step:
      continue
    print(f"{name:10} ", end="", flush=True)  # First: where a chip hangs, this is the last line.
    started = time.perf_counter()
    try:
      result = f"ok: {step()}"
    except Exception:
      failed, result = True, f"FAILED\n{traceback.format_exc()}"
    print(f"{time.perf_counter() - started:6.1f} s  {result}", flush=True)
  raise SystemExit(int(failed))


if __name__ == "__main__":
  app.run(main)
