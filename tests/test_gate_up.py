"""The kernels of the expert MLP have the bits of megablox, and touch no rows but their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_stash import kernels
from pallas_stash.kernels import gate_up, gate_up_backward, megablox
from pallas_stash.kernels.activation import activate, activate_backward, Beside
from pallas_stash.kernels.visits import Place
from tests.helpers.checks import assert_trees_equal, long
from tests.helpers.counting import count_rows
from tests.helpers.support import assert_same_bits, ON_TPU

M, TILE_ROWS, TILE = 256, 64, 128
INTERPRET = False if ON_TPU else kernels.INTERPRET


def clamped_swiglu(gate, up, *biases):
  """That of gpt-oss: https://github.com/openai/gpt-oss, with the biases of both projections."""
  gate, up = (x + bias for x, bias in zip((gate, up), biases or (0.0, 0.0), strict=True))
  gate, up = jnp.minimum(gate, 0.7), jnp.clip(up, -0.7, 0.7)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(options, is_x_kept, operands, beside, place, is_stored, sizes):
  """Returns what the kernels make of the rows, and what megablox does."""
  x, w_gate, w_up, w_down, d_out, *stashes = operands
  static = {"activation": clamped_swiglu, "options": options, "interpret": INTERPRET}
  stored = place._replace(start=jnp.where(is_stored, place.start, -1))
  stashes = stashes[: 2 + is_x_kept]
  hidden, *kept = gate_up.forward(x, w_gate, w_up, sizes, beside, stashes, stored, **static)
  (replayed,) = gate_up.forward(x, w_gate, w_up, sizes, beside, (), None, **static)
  # What other rows of the stash hold has no influence.
  row = jnp.arange(stashes[0].shape[0])
  is_own = (row >= place.start) & (row < place.start + place.rows)
  poisoned = [jnp.where(is_own[:, None], stash, jnp.nan) for stash in kept[:2]]
  gradients = gate_up_backward.backward(d_out, w_down, sizes, beside, poisoned, place, **static)

  multiply = lambda *args: options(*args, sizes, None)
  gate, up = multiply(x, w_gate), multiply(x, w_up)
  group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(M), side="right")
  rows_of_groups = [rows[jnp.minimum(group, len(sizes) - 1)] for rows in beside.group_rows]
  weights = None if beside.row_weights is None else beside.row_weights[:, None]
  chain = clamped_swiglu, gate, up, weights, rows_of_groups
  new = activate(*chain).astype(x.dtype)
  d_hidden = megablox.Megablox(x.dtype, options.tiling, True, options.interpret)(
    d_out, w_down, sizes, None
  )
  expected = activate_backward(clamped_swiglu, d_hidden, *chain[1:])
  return hidden, replayed, kept, gradients, (gate, up, x), new, expected, group


def check(
  sizes,
  dtype="float32",
  *,
  k=256,
  n=256,
  tile_n=TILE,
  is_weighted=False,
  is_biased=False,
  is_x_kept=False,
  is_stored=True,
  start=24,
  rows_behind=TILE_ROWS + 8,
):
  """Checks both kernels.

  Args:
    sizes: rows of each group, M at most together.
    dtype: of everything.
    k, n, tile_n: width of `x`, and of the hidden rows, and of a tile of those.
    is_weighted, is_biased, is_x_kept: whether there are row weights, and biases, and the stash
      keeps `x` as well.
    is_stored: whether the rows are.
    start: stash row of the push.
    rows_behind: of the stash, behind the push.
  """
  rows = sum(sizes)
  stop = -(-(start + rows) // 8) * 8
  stash_rows = max(TILE_ROWS, stop + rows_behind)
  keys = iter(jax.random.split(jax.random.key(1), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape) / 8
  is_in_group = np.arange(M) < rows
  in_group = lambda rows: jnp.where(is_in_group[:, None], rows, jnp.nan)
  stash = lambda width: jnp.full((stash_rows, -(-width // 128) * 128), -7.0)
  groups = len(sizes)
  operands = (
    *(8 * in_group(normal(M, k)), normal(groups, k, n), normal(groups, k, n)),
    *(normal(groups, n, k), in_group(normal(M, k)), stash(n), stash(n), stash(k)),
  )
  operands = [x.astype(dtype) for x in operands]
  beside = Beside(
    8 * normal(M) if is_weighted else None, (normal(groups, n), normal(groups, n)) * is_biased
  )
  options = megablox.Megablox(jnp.dtype(dtype), (TILE_ROWS, TILE, tile_n), False, not ON_TPU)
  assert gate_up.fits((M, k, n), operands[5:], (operands[0].dtype,), options)
  place = Place(*map(jnp.int32, (0, rows, start)))
  results = run(
    options, is_x_kept, operands, beside, place, jnp.array(is_stored), jnp.array(sizes, jnp.int32)
  )
  hidden, replayed, kept, gradients, values, new, expected, group = results
  close = {"rtol": 2e-6, "atol": 2e-6} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-2}
  same = lambda *pair: np.testing.assert_allclose(
    *(np.asarray(x[:rows], np.float32) for x in pair), **close
  )
  same(hidden, new)
  assert_same_bits(hidden[:rows], replayed[:rows])
  for stash, value, before in zip(kept, values, operands[5:], strict=False):
    if is_stored:
      assert_same_bits(stash[start : start + rows, : value.shape[1]], value[:rows])
    else:
      assert_same_bits(stash, before)
    for others in slice(start), slice(stop, None):
      assert_same_bits(stash[others], before[others])
  if not is_stored:
    return
  *expected, d_weights, d_rows = expected
  for actual, wanted in zip(gradients, expected, strict=False):
    same(actual, wanted)
  assert_same_bits(gradients.hidden[:rows], hidden[:rows])
  if is_weighted:
    same(gradients.of_beside.row_weights, jnp.sum(d_weights, axis=1))
  for actual, wanted in zip(gradients.of_beside.group_rows, d_rows, strict=True):
    wanted = jax.ops.segment_sum(wanted[:rows], group[:rows], groups)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
  assert_trees_equal(len(gradients.of_beside.group_rows), 2 * is_biased)


RAGGED = [50, 0, 71, 30]
AT_THE_END = {"start": 64, "rows_behind": 0}
EVERYTHING = {"is_weighted": True, "is_biased": True, "is_x_kept": True}


@pytest.mark.parametrize(
  "sizes, options",
  [
    long(RAGGED, {}),
    long(RAGGED, {"dtype": "bfloat16"} | EVERYTHING | AT_THE_END),
    # More columns than a chunk has, the last of them not there.
    long([3, 1, 0, 2], {"k": 192, "n": 600, "tile_n": 640} | EVERYTHING | AT_THE_END),
    *(long(sizes, EVERYTHING) for sizes in ([64, 64], [0, 0, 0], [0, 17, 0, 128, 0])),
    *(
      long(sizes, {"dtype": dtype} | AT_THE_END)
      for sizes in ([100, 156], [3, 1, 0, 2])
      for dtype in ("float32", "bfloat16")
    ),
  ],
)
def test_bits_are_those_of_megablox(sizes, options):
  check(sizes, **options)
  check(sizes, **options, is_stored=False)


@pytest.mark.parametrize(
  "change",
  [
    {"stash_rows": TILE_ROWS - 8},  # A tile does not fit into the stash,
    {"tiles": (TILE_ROWS, 192, TILE)},  # columns are no multiple of 128,
    {"tiles": (TILE_ROWS, TILE, 192)},
    {"tiles": (TILE_ROWS, TILE, 384), "n": 512},  # or do not divide it;
    {"tiles": (TILE_ROWS + 8, TILE, TILE)},  # a tile of rows is not of HBM tiles;
    {"dtype": "float16"},  # of a dtype that the matmuls of a TPU do not take.
    {"tiles": None},
  ],
)
def test_what_does_not_fit(change):
  def fits(stash_rows=128, tiles=(TILE_ROWS, TILE, TILE), n=256, dtype="float32"):
    stash = jax.ShapeDtypeStruct((stash_rows, n), dtype)
    options = megablox.Megablox(stash.dtype, tiles, False, False)
    return gate_up.fits((M, 256, n), [stash] * 2, (stash.dtype,), options)

  assert fits() and not fits(**change)


@pytest.mark.once
@pytest.mark.skipif(ON_TPU, reason="counts the DMAs of interpreted kernels")
@pytest.mark.long
def test_each_row_is_stored_once(monkeypatch):
  """Of both products, and of `x`, however many groups share its tile."""
  rows = count_rows(monkeypatch)
  run.clear_cache()
  check(RAGGED, is_x_kept=True)
  jax.effects_barrier()
  run.clear_cache()
  # 151 rows in three tiles, by HBM tiles; two tiles of n, of two products, and two of k.
  assert sum(rows) == 152 * (2 * 2 + 2) and len(rows) == 3 * (2 * 2 + 2)


@pytest.mark.once
def test_the_activation_in_float32_is_nearer_to_float64():
  """Than in bfloat16, which a chain of XLA's operations between the matmuls is."""
  keys = jax.random.split(jax.random.key(2), 3)
  d_hidden, gate, up = (jax.random.normal(key, (256, 128)).astype("bfloat16") for key in keys)
  *ours, _, _ = activate_backward(clamped_swiglu, d_hidden, gate, up, None, ())
  hidden, vjp = jax.vjp(clamped_swiglu, gate, up)
  theirs = *vjp(d_hidden), hidden
  with jax.enable_x64(True):
    hidden, vjp = jax.vjp(clamped_swiglu, *(x.astype("float64") for x in (gate, up)))
    exact = *vjp(d_hidden.astype("float64")), hidden
  error = lambda found, right: np.abs(np.asarray(found, "float64") - np.asarray(right)).mean()
  for one, other, right in zip(ours, theirs, exact, strict=True):
    assert error(one.astype("bfloat16"), right) < 0.7 * error(other, right)
