"""The instrument: what `bench.tpu.aot` counts in a compiled program."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from bench.tpu import aot, host_schedule
from pallas_stash.kernels import host

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

N = 512
MATMUL = 2 * N**3
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
scan = lambda body, length: lambda x: lax.scan(lambda x, _: (body(x), None), x, length=length)[0]


@pytest.mark.parametrize(
  "fun, matmuls",
  [
    (lambda x: x + 1, 0),
    (lambda x: x @ x @ x, 2),
    (lambda x: x.T @ x, 1),
    (scan(lambda x: jnp.sin(x @ x), 7), 7),
    (scan(scan(lambda x: jnp.sin(x @ x), 5), 3), 15),
    (lambda x: x @ lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ x), jnp.cos, x), 1),
    (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ jnp.sin(x @ x), lambda x: x @ x + 1, x), 1),
  ],
)
def test_flops(fun, matmuls):
  (x,) = aot.place([X], aot.mesh("v5e"))
  assert aot.compile(fun, x).flops() == matmuls * MATMUL


def test_flops_of_a_loop_of_unknown_length():
  x, count = aot.place([X, COUNT], aot.mesh("v5e"))
  loop = lambda x, count: lax.fori_loop(0, count, lambda _, x: jnp.sin(x @ x), x)
  assert aot.compile(loop, x, count).flops() is None


def test_flops_of_a_kernel_are_its_estimate():
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  lhs = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
  rhs = jax.ShapeDtypeStruct((4, N, N), jnp.bfloat16)
  sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
  args = aot.place((lhs, rhs, sizes), aot.mesh("v5e"))
  assert aot.compile(gmm, *args).flops() == MATMUL


@pytest.mark.parametrize("is_donated", [True, False])
def test_copies(is_donated):
  """An update in place is none; what must keep its operand is."""
  large = jax.ShapeDtypeStruct((2**15, 2048), jnp.float32)  # more than VMEM holds
  large, row, start = aot.place(
    (large, jax.ShapeDtypeStruct((1, 2048), jnp.float32), COUNT), aot.mesh("v5e")
  )
  write = lambda x, row, start: lax.dynamic_update_slice(x, row, (start, 0))
  program = aot.compile(write, large, row, start, donate_argnums=(0,) if is_donated else ())
  assert len(program.copies(large)) == (0 if is_donated else 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax does not tell of HBM alone")
@pytest.mark.parametrize("device_rows", [2**15, 2**17])
@pytest.mark.parametrize("host_rows", [2**14, 2**16])
def test_hbm_where_there_is_host_memory(device_rows, host_rows):
  """Whichever is larger: the compiler's own peak is that of the larger one."""
  rows, width = 2**10, 2048

  def fun(x):
    def turn(index, buffers):
      device, at_host = buffers
      device = lax.dynamic_update_slice(device, x, (index * rows, 0))
      return device, host.store(x, at_host, index * rows)

    buffers = lax.empty((device_rows, width), x.dtype), host.empty(host_rows, width, x.dtype)
    device, at_host = lax.fori_loop(0, x[0, 0].astype(jnp.int32), turn, buffers)
    return jnp.sum(device, axis=0) + host.load(at_host, jnp.int32(8), 8)[0]

  (x,) = aot.place([jax.ShapeDtypeStruct((rows, width), jnp.float32)], aot.mesh("v5e"))
  program = aot.compile(fun, x)
  assert program.memory.host_temp_size_in_bytes == host_rows * width * 4
  assert program.hbm_bytes == pytest.approx((device_rows + rows) * width * 4, rel=0.02)


def test_what_runs_beside_transfers():
  """Of all copies of that size in loops, what runs beside one at least."""

  def store(index, rows):
    host, value = "bf16[64,128]{1,0:S(5)}", f"bf16[{rows},128]{{1,0}}"
    name = f"dynamic-update-slice-start.{index}"
    return (
      f"%rows.{index} = {value} parameter(1)",
      f"%{name} = (({host}, {value}), {host}, u32[]) dynamic-update-slice-start(%p, %rows.{index})",
      f"%done.{index} = {host} dynamic-update-slice-done(%{name})",
    )

  kernel = lambda name: f'%{name} = f32[8] custom-call(%p), custom_call_target="tpu_custom_call"'
  computation = lambda name, lines: (
    "\n  ".join([f"{name} (p: f32[]) -> f32[] {{", *lines]) + "\n}\n"
  )
  # A collective in the order of the program, one that is started and waited for, and one that is
  # called on a SparseCore; and a call that is none.
  sync = "%all-reduce.1 = f32[8] all-reduce(%p)"
  started = "%all-gather.1 = f32[8] all-gather-start(%p)"
  ended = "%all-gather.2 = f32[8] all-gather-done(%all-gather.1)"
  call = lambda n, of: f"%call.{n} = () call-start(), to_apply=%c, backend_config={{{of}}}"
  called, other_call = call(1, '"offload":"OFFLOAD_COLLECTIVE"'), call(2, '"offload":"NONE"')
  updated = "%update.1 = f32[8] call-update(%call.1, %p)"
  call_ended = "%end.1 = f32[8] call-done(%update.1)"
  (*first, first_end), (*second, second_end) = store(1, 8), store(2, 8)
  (*other, other_end), (*of_entry, entry_end) = store(3, 16), store(4, 8)
  loop = [
    started,
    called,
    ended,
    *first,
    updated,
    kernel("gmm.1"),
    *second,
    kernel("gmm.2"),
    first_end,
    kernel("stash_compact.1"),
  ]
  loop += [other_call, second_end, sync, *other, call_ended, kernel("tgmm.3"), other_end]
  entry = [*of_entry, kernel("gmm.4"), kernel("gmm.5"), entry_end]
  schedule = host_schedule.Schedule(computation("%body", loop) + computation("ENTRY %main", entry))
  assert schedule.beside("store", 8) == (2, 3, 1)
  assert schedule.beside("store", 16) == (1, 3, 1)
  assert schedule.beside("load", 8) == (0, 0, 0)
  within = [*first, sync, *second, started, first_end, second_end, ended]
  schedule = host_schedule.Schedule(computation("%body", within) + computation("ENTRY %main", []))
  assert schedule.beside("store", 8) == (0, 0, 2)
