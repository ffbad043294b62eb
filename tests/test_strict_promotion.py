"""All of the package under `jax.numpy_dtype_promotion("strict")`: nothing mixes dtypes."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, long, once
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted, ON_TPU

ROWS, WIDTH = 16, 8
SIZES, STARTS = jnp.array([3, 2]), jnp.array([6, 1])
RAGGED = ps.RaggedRows(SIZES, ROWS, STARTS)
SPECS = [jax.ShapeDtypeStruct((WIDTH,), dtype) for dtype in (jnp.float32, jnp.bfloat16)]
X, W = jnp.ones((ROWS, WIDTH)), jnp.eye(WIDTH)[None] / 2


def layer(x, w):
  live = RAGGED.is_in_group()[:, None]
  hidden = checkpoint_name(jnp.where(live, x @ w[0], 0), "hidden")
  low = checkpoint_name(jnp.sin(hidden).astype(jnp.bfloat16), "low")
  return jnp.where(live, jnp.cos(low).astype(jnp.float32) * hidden, 0)


def checkpointed(x, w, capacity=16, implementation=None):
  policy = jax.checkpoint_policies.save_only_these_names("hidden", "low")
  f = ps.checkpoint(layer, policy=policy, implementation=implementation)
  stash = ps.Stash.empty(capacity, f.residuals(RAGGED, x, w))
  out, stash = f(stash, RAGGED, x, w)
  out, stash = f(stash, RAGGED, out, w)
  return jnp.sum(ps.seal(out, stash) ** 2), stash.stats()


def gradients(**options):
  loss = lambda *args: checkpointed(*args, **options)
  return jax.grad(loss, (0, 1), has_aux=True), X, W


def pushed(padding):
  def round_trip(values):
    stash, slot = ps.Stash.empty(8, SPECS).push(values, RAGGED)
    overflowed, lost = stash.push(values, RAGGED)
    live = RAGGED.is_in_group()
    # NumPy takes a NaN of bfloat16 for none.
    restored, nothing = (
      [jnp.where(live[:, None], rows, 0).astype(jnp.float32) for rows in found]
      for found in (
        stash.restore(slot, RAGGED, padding=padding),
        overflowed.restore(lost, RAGGED),
      )
    )
    return restored, nothing, stash.pop(slot).reset().stats()

  return round_trip, [X, X.astype(jnp.bfloat16)]


def pair(dtype, implementation):
  groups = {"group_sizes": SIZES, "group_starts": STARTS, "implementation": implementation}

  def round_trip(operand, update, start):
    operand = ps.dynamic_update_slice(operand, update, (start, 0), **groups)
    return ps.dynamic_slice(operand, (start, 0), (ROWS, WIDTH), **groups)

  def value_and_gradients(*operands):
    out, vjp = jax.vjp(lambda *operands: round_trip(*operands, jnp.int32(-20)), *operands)
    return out, vjp(out)

  operand, update = jnp.zeros((24, WIDTH), dtype), jnp.ones((ROWS, WIDTH), dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    return round_trip, operand, update, jnp.int32(-20)
  return value_and_gradients, operand, update


def grouped(**options):
  def loss(x, w):
    out, stash = ps.gmm(ps.Stash.empty(8, SPECS[:1]), x, w, SIZES[:1], **options)
    return jnp.sum(ps.seal(out[:3], stash))

  return jax.grad(loss, (0, 1)), X, W


# Each makes a function, anew so that nothing of it is traced yet, and its arguments.
PROGRAMS = {
  "gradients": gradients,
  "gradients, recomputed": lambda: gradients(capacity=8),
  "gradients, kernels": lambda: gradients(implementation=IMPLEMENTATIONS[1]),
  "push": lambda: pushed("zero"),
  "push, undefined padding": lambda: pushed("undefined"),
  **{
    f"pair, {np.dtype(dtype)}, {implementation}": lambda d=dtype, i=implementation: pair(d, i)
    for implementation in IMPLEMENTATIONS
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
  },
  "pair": lambda: pair(jnp.float32, None),
  "gmm": lambda: grouped(tiling=(8, 8, 8), interpret=not ON_TPU),
  "gmm, ragged_dot": lambda: grouped(grouped_matmul=lax.ragged_dot),
}


def run(case):
  fun, *args = PROGRAMS[case]()
  return jax.jit(fun)(*args)


def text_of(case, platform):
  fun, *args = PROGRAMS[case]()
  return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()


BACKEND = jax.default_backend()


TRACED_BY_OTHERS = (
  *("gradients, recomputed", "push", "push, undefined padding"),
  *("pair, float32, xla", "pair, bfloat16, xla", "pair, int8, xla"),
)


def parameters():
  for case in PROGRAMS:
    if "mosaic" in case or ", kernels" in case:  # To trace an interpreted kernel twice takes long.
      yield long_if_interpreted(case, BACKEND)
    elif case in TRACED_BY_OTHERS:
      yield long(case, BACKEND)  # Others have all that these trace.
    elif case not in ("gmm", "pair"):
      yield case, BACKEND
  yield from ((case, "tpu") for case in ("gradients", "pair"))


@pytest.mark.parametrize("case, platform", list(parameters()))
def test_the_program_is_that_without(case, platform):
  texts = set()
  for mode in "standard", "strict":
    # Kernels say by which line they were traced: by this one, not by that of another test.
    jax.clear_caches()
    with jax.numpy_dtype_promotion(mode):
      texts.add(text_of(case, platform))
  assert len(texts) == 1


def padding_report():
  policy = jax.checkpoint_policies.save_only_these_names("hidden", "low")
  report = ps.check_padding(layer, RAGGED, X + jnp.arange(16.0)[:, None], W, policy=policy)
  return report.depends, len(report.outside)


def sizes():
  rows = ps.sizing.capacity_rows(1, 8, 2, 2, layers=3, margin=1.1)
  return rows, ps.sizing.residual_bytes(rows, SPECS)


# Megablox's text differs in which functions of `jax.numpy` it shares; what it computes must not.
CALLS = {"gmm": lambda: run("gmm"), "check_padding": padding_report, "sizing": sizes}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_runs_is_what_runs_without(call):
  expected = jax.device_get(call())
  with jax.numpy_dtype_promotion("strict"):
    assert_trees_equal(call(), expected)


@pytest.mark.parametrize(
  "case", [*map(long, ("gradients", "gradients, recomputed")), *map(once, ("push", "gmm"))]
)
def test_in_the_mode_of_debug(case):
  expected = jax.device_get(run(case))
  with jax.numpy_dtype_promotion("strict"), ps.debug():
    assert_trees_equal(run(case), expected)
