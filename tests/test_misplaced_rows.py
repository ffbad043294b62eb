"""Rows that are not where `RaggedRows` says: `debug` and `check_padding` say so, and no more."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash.checks.misplaced_rows import data_outside, zeros_inside
from tests.helpers.checks import assert_trees_equal, long, needs_devices, once

ROWS, WIDTH, LAYERS, COUNT, START = 32, 8, 2, 9, 5
SAVE = jax.checkpoint_policies.save_only_these_names
POLICIES = {"slots": SAVE(ps.SLOT_NAME), "full": None}
ZEROS = "5 of 9 rows in groups are zero, and rows outside of the groups of the residual float32[8]"
DATA = "pallas_stash: rows outside of the groups of the residual float32[8] hold data"
USED = "rows outside of the groups of a result, float32[32, 8]"


def expert_ffn(rows, w, masks=(True, True)):
  """Rows [5, 14) of a globally sorted buffer are this device's; the others are masked, or not."""
  row = jnp.arange(ROWS)
  live = ((row >= START) & (row < START + COUNT))[:, None]
  mask = lambda is_masked, rows: jnp.where(live, rows, 0) if is_masked else rows
  hidden = checkpoint_name(mask(masks[0], rows @ w), "hidden")
  return mask(masks[1], jnp.sin(hidden) @ w.T)


def ragged_rows(has_starts):
  return ps.RaggedRows(jnp.array([COUNT]), ROWS, jnp.array([START]) if has_starts else None)


def loss(weights, x, has_starts, masks=(True, True), policy="slots"):
  f = ps.checkpoint(functools.partial(expert_ffn, masks=masks), policy=SAVE("hidden"))
  ragged = ragged_rows(has_starts)

  @functools.partial(jax.checkpoint, policy=POLICIES[policy])
  def step(carry, w):
    x, stash = carry
    out, stash = f(stash, ragged, x, w)
    return (x + out, stash), None

  stash = ps.Stash.empty(LAYERS * 16, f.residuals(ragged, x, weights[0]))
  (x, stash), _ = lax.scan(step, (x, stash), weights)
  return jnp.sum(ps.seal(x, stash) ** 2)


def arguments():
  keys = jax.random.split(jax.random.key(0))
  return jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 3, jax.random.normal(
    keys[1], (ROWS, WIDTH)
  )


def lines_of(capsys, fun, *args):
  """Returns what is printed in the mode, sorted; the results must be those without it."""
  plain = jax.jit(fun)(*args)
  with ps.debug():
    checked = jax.jit(fun)(*args)
    jax.effects_barrier()
  assert_trees_equal(checked, plain)
  return sorted(capsys.readouterr().out.splitlines())  # They come in any order.


@pytest.mark.parametrize(
  "masks, residual, policy",
  [
    ((True, True), ZEROS, "slots"),
    long((True, True), ZEROS, "full"),
    long((False, False), DATA, "slots"),
  ],
)
def test_without_group_starts(masks, residual, policy, capsys):
  """Once each, though every layer is at fault, and forward and backward pass push."""
  gradient = jax.grad(functools.partial(loss, has_starts=False, masks=masks, policy=policy))
  first, second = lines_of(capsys, gradient, *arguments())
  assert residual in first + second and f"loss depends on {ROWS - COUNT} {USED}" in first + second


@pytest.mark.parametrize(
  "masks, lines",
  [
    ((True, True), []),
    # That the result is masked is enough; but of a residual it is not known.
    long((False, True), [DATA]),
    once((False, False), [DATA, USED]),
  ],
)
def test_with_group_starts(masks, lines, capsys):
  gradient = jax.grad(functools.partial(loss, has_starts=True, masks=masks))
  printed = lines_of(capsys, gradient, *arguments())
  assert len(printed) == len(lines)
  assert all(any(line in text for text in printed) for line in lines)


@pytest.mark.once
def test_padding_of_one_constant_is_right(capsys):
  def fun(x, w):
    hidden = checkpoint_name(jnp.where(jnp.arange(ROWS)[:, None] < 9, x @ w, 3), "hidden")
    return jnp.cos(hidden) @ w  # The loss depends on its padding, which is constant.

  def loss(x, w):
    f, ragged = ps.checkpoint(fun, policy=SAVE("hidden")), ps.RaggedRows([4, 5], ROWS)
    out, stash = f(ps.Stash.empty(16, f.residuals(ragged, x, w)), ragged, x, w)
    return jnp.sum(ps.seal(out, stash) ** 2)

  assert lines_of(capsys, jax.grad(loss), *arguments()[::-1][:1], arguments()[0][0]) == []


@pytest.mark.once
def test_the_loss_that_uses_no_row_outside(capsys):
  """Here rows outside hold data in the result, and have no cotangent."""

  def loss(x, w):
    f, ragged = ps.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w))), ragged_rows(True)
    out, stash = f(ps.Stash.empty(16, f.residuals(ragged, x, w)), ragged, x, w)
    return jnp.sum(ps.seal(out[START : START + COUNT], stash) ** 2)

  weights, x = arguments()
  lines = lines_of(capsys, jax.grad(loss), x, weights[0])
  assert lines and all(line.startswith(DATA) for line in lines)


@pytest.mark.once
def test_a_push_by_itself(capsys):
  with ps.debug():
    for start in (0, START):
      rows = jnp.zeros((ROWS, WIDTH)).at[start : start + COUNT].set(arguments()[1][:COUNT])
      ps.Stash.empty(16, [jax.ShapeDtypeStruct((WIDTH,), rows.dtype)]).push(
        [rows], ragged_rows(False)
      )
    invalid = ps.RaggedRows([ROWS + 1], ROWS)  # Counted, and there is no group to be outside of.
    ps.Stash.empty(16, [jax.ShapeDtypeStruct((WIDTH,), rows.dtype)]).push([rows], invalid)
    jax.effects_barrier()
  (line,) = capsys.readouterr().out.splitlines()
  assert ZEROS in line


@pytest.mark.once
def test_gmm(capsys):
  """What its padding holds is its own business; what a loss reads there is not."""
  spec = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)]

  def loss(rows, w, used_rows):
    multiply = lambda rows, w, sizes: rows @ w[0]
    out, stash = ps.gmm(
      ps.Stash.empty(16, spec), rows, w, jnp.array([COUNT]), grouped_matmul=multiply
    )
    return jnp.sum(ps.seal(out[:used_rows], stash) ** 2)

  weights, x = arguments()
  gradient = lambda used_rows: jax.grad(functools.partial(loss, used_rows=used_rows))
  assert lines_of(capsys, gradient(COUNT), x, weights[:1]) == []
  (line,) = lines_of(capsys, gradient(ROWS), x, weights[:1])
  assert f"the loss depends on {ROWS - COUNT} {USED}" in line


@needs_devices(2)
@pytest.mark.parametrize("check_vma", [True, long(False)])
def test_on_one_of_two_devices(check_vma, capsys):
  """The one whose rows start at 5; those of the other start at 0."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  weights, x = arguments()
  x = jnp.stack([jnp.roll(x, -START, 0), x])

  def fun(rows, w, start):
    row = jnp.arange(ROWS)
    live = ((row >= start) & (row < start + COUNT))[:, None]
    return jnp.where(live, jnp.sin(checkpoint_name(jnp.where(live, rows @ w, 0), "hidden")), 0)

  def each(w, x, start):
    f, ragged = ps.checkpoint(fun, policy=SAVE("hidden")), ps.RaggedRows(jnp.array([COUNT]), ROWS)
    stash = ps.Stash.empty(16, f.residuals(ragged, x[0], w, start[0]))
    out, stash = f(stash, ragged, x[0], w, start[0])
    return jnp.sum(ps.seal(out, stash) ** 2)[None]

  specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": P("x"), "check_vma": check_vma}
  total = lambda *args: jax.shard_map(each, mesh=mesh, **specs)(*args).sum()
  lines = lines_of(capsys, jax.grad(total), weights[0], x, jnp.array([0, START]))
  first, second = lines
  assert ZEROS in first + second and f"depends on {START} {USED}" in first + second


@pytest.mark.long
def test_under_vmap_only_what_is_so_is_said(capsys):
  """There what is conditional runs in any case."""
  weights, x = arguments()
  xs = jnp.stack([x, 2 * x])
  gradient = lambda has_starts: (
    lambda xs: jax.vmap(
      jax.grad(functools.partial(loss, has_starts=has_starts), argnums=1), (None, 0)
    )(weights[:1], xs)
  )
  assert lines_of(capsys, gradient(True), xs) == []
  assert len(lines_of(capsys, gradient(False), xs)) == 2


def test_off_it_says_nothing(capsys):
  jax.jit(jax.grad(functools.partial(loss, has_starts=False)))(*arguments())
  jax.effects_barrier()
  assert capsys.readouterr().out == ""


def test_the_matmuls_are_not_run_again():
  """What is printed needs the residuals, and an outer `jax.checkpoint` would replay them for it."""
  gradient = lambda: jax.jit(jax.grad(functools.partial(loss, has_starts=True))).lower(*arguments())
  plain = gradient().as_text().count("dot_general")
  with ps.debug():
    assert gradient().as_text().count("dot_general") == plain


@pytest.mark.parametrize(
  "dtype", ["bfloat16", *map(once, ("float32", "float16", "float8_e4m3fn", "float8_e5m2"))]
)
def test_what_is_data(dtype):
  is_in_group = jnp.arange(6) < 2
  outside = lambda rows: bool(data_outside(jnp.array(rows, dtype).reshape(6, -1), is_in_group))
  assert outside([[1, 1], [2, 2], [0, 0], [0, 0], [0, 0], [0, 3]])
  assert outside([9, 9, np.nan, 1, 2, np.nan])
  assert not outside([1, 2, 0, 0, 0, 0])
  assert not outside([1, 2, np.nan, np.nan, 4, 4])
  assert not outside([1, 2, *4 * [-np.inf if dtype != "float8_e4m3fn" else -448]])
  assert not outside(np.zeros((6, 0)))
  # To rounding: a compiler may round the rows at the end of a loop differently.
  assert not outside([1, 2, 3, 3 * (1 + 2**-7), 3, 3])
  rows = jnp.array([[0, 0], [0, 1], [0, 0], [1, 1], [1, 1], [0, 0]], dtype)
  assert zeros_inside(rows, is_in_group) == 1


@pytest.mark.once
def test_check_padding_names_results():
  weights, x = arguments()

  def report(has_starts, masks):
    fun = lambda x, w: {"y": expert_ffn(x, w, masks), "n": 3}
    return ps.check_padding(fun, ragged_rows(has_starts), x, weights[0], policy=SAVE("hidden"))

  masked = True, True
  assert report(True, masked).outside == ()
  missing = report(False, masked)
  # It is no verdict on what padding holds, and no part of what is compared.
  assert missing.outside == ("result['y']",) and missing == ps.PaddingReport(False)
  assert "result['y'] holds data outside of the groups" in str(missing)
  assert "lacks the `group_starts`" in str(missing)
  depends = ps.check_padding(lambda x, w: (x @ w, (x @ w).sum()), ragged_rows(True), x, weights[0])
  assert depends.depends and depends.outside == ("result[0]",)
  assert "result[1] changes with" in str(depends) and "result[0] holds data" in str(depends)
