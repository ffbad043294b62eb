"""`grouped_mlp` has the gradients of the operations that it stands for, at any capacity."""

import jax
import jax.numpy as jnp
import pytest

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, is_any_nan, long, once
from tests.helpers.mlp import (
  assert_close,
  assert_padding_is_zero,
  differentiate,
  GROUPS,
  HIDDEN,
  LIVE,
  M,
  operands,
  plain,
  ragged_dot,
  ROWS,
  SIZES,
  specs,
  stashed,
  TILING,
  WIDTH,
)
from tests.helpers.support import IMPLEMENTATIONS, ON_TPU

XLA, MOSAIC = IMPLEMENTATIONS


@pytest.mark.parametrize(
  "implementation, dtype, options",
  [
    (None, "float32", {}),
    once(None, "float32", {"keep_x": True}),
    once(XLA, "bfloat16", {"keep_x": True}),
    long(MOSAIC, "float32", {"keep_x": True}),
    once(MOSAIC, "bfloat16", {}),
    once(XLA, "float32", {"is_weighted": False, "is_biased": False}),
    long(MOSAIC, "float32", {"is_weighted": False, "is_biased": False}),
    long(None, "bfloat16", {"is_biased": False}),
    long(MOSAIC, "bfloat16", {"keep_x": True, "is_weighted": False}),
  ],
)
def test_gradients_are_those_of_plain_operations(implementation, dtype, options):
  args, d_out = operands(dtype)
  actual = differentiate(stashed(implementation=implementation, **options), args, d_out)
  of_activation = {key: value for key, value in options.items() if key != "keep_x"}
  expected = differentiate(plain(ragged_dot, **of_activation), args, d_out)
  assert_padding_is_zero(actual[1])
  live = lambda rows: jnp.where(LIVE.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
  masked = lambda gradients: (
    live(gradients[0]),
    *gradients[1:4],
    live(gradients[4]),
    *gradients[5:],
  )
  assert_close(actual[0], expected[0], dtype)
  assert_close(masked(actual[1]), masked(expected[1]), dtype)
  assert [int(x[0]) for x in actual[2]] == [152, 152, 0, 0, 152]


@pytest.mark.once
@pytest.mark.parametrize(
  "of_rows, of_weights",
  [("bfloat16", ["float32"] * 3), ("bfloat16", ["bfloat16", "float32", "bfloat16"])]
  + [("float16", ["float16"] * 3), long("float64", ["float64"] * 3)],
)
def test_other_dtypes(of_rows, of_weights):
  """Where megablox would not take them, too; gradients of each operand have its dtype."""
  with jax.enable_x64(of_rows == "float64"):
    (x, *matrices, row_weights, gate_bias, up_bias), d_out = operands(of_rows)
    matrices = (m.astype(dtype) for m, dtype in zip(matrices, of_weights, strict=True))
    args = x, *matrices, row_weights, gate_bias, up_bias
    _, gradients, _ = differentiate(stashed(), args, d_out)
    assert [g.dtype for g in gradients] == [arg.dtype for arg in args]
    as_float = lambda tree: jax.tree.map(lambda leaf: leaf.astype("float32"), tree)
    if of_rows != "float64":
      args, d_out = as_float(args), as_float(d_out)
    _, expected, _ = differentiate(plain(ragged_dot), args, d_out)
    live = lambda gradients: (gradients[0][LIVE], *gradients[1:4], gradients[4][LIVE])
    tolerance = of_rows if of_rows == "float64" else "bfloat16"
    assert_close(live(gradients), live(expected), tolerance)


@pytest.mark.once
@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [200, 100, 0, 30]])
def test_no_rows_and_groups_past_the_end(sizes):
  (x, *matrices, _, _, _), d_out = operands()

  def run(x, *matrices):
    stash = ps.Stash.empty(ROWS, specs())
    args = stash, x, *matrices, jnp.array(sizes, jnp.int32)
    out, stash = ps.grouped_mlp(*args, tiling=TILING)
    return ps.seal(out, stash), stash.stats()

  _, gradients, stats = differentiate(run, (x, *matrices), d_out)
  assert int(stats.invalid_pushes[0]) == (sum(sizes) > M)
  assert int(stats.rows_in_use[0]) == 0
  if not sum(sizes):
    assert_trees_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


def clipped(gate, up):
  """Which hides that its gradient is NaN: here gate is always below."""
  return jax.nn.relu(gate - 100) * up


@pytest.mark.parametrize("implementation", [None, XLA, long(MOSAIC)])
def test_an_activation_hides_no_nan(implementation):
  args, d_out = operands()
  options = {"activation": clipped, "is_biased": False, "implementation": implementation}
  unsealed = differentiate(stashed(seals=0, **options), args, d_out)
  made_again = differentiate(stashed(ROWS - 8, seals=0, **options), args, d_out)
  overflowed = differentiate(stashed(ROWS - 8, keep_x=True, **options), args, d_out)
  for _, gradients, _ in unsealed, made_again, overflowed:
    for gradient in gradients[1:4]:
      assert bool(jnp.isnan(gradient[SIZES > 0]).all())


@pytest.mark.parametrize("implementation", [None, long(MOSAIC)])
def test_what_does_not_fit_is_made_again(implementation):
  """With the same bits: from `x`, which is an argument."""
  args, d_out = operands()
  fitting = differentiate(stashed(implementation=implementation), args, d_out)
  for capacity in 0, ROWS - 8:
    made_again = differentiate(stashed(capacity, implementation=implementation), args, d_out)
    if implementation is None or ON_TPU:
      assert_trees_equal(made_again[:2], fitting[:2])
    else:  # Where a kernel is interpreted, XLA may fuse it in another way at each of its places.
      assert_close(made_again[:2], fitting[:2], "float32")
    assert [int(x[0]) for x in made_again[2]] == [0, 0, 1, 0, 152]


@pytest.mark.parametrize("implementation", [None, long(MOSAIC)])
def test_nothing_is_left_to_make_x_again_from(implementation):
  args, d_out = operands()
  run = stashed(ROWS - 8, keep_x=True, implementation=implementation)
  out, gradients, stats = differentiate(run, args, d_out)
  assert not is_any_nan(out)
  has_rows = SIZES > 0
  for gradient in gradients[0][LIVE], *(gradient[has_rows] for gradient in gradients[1:4]):
    assert bool(jnp.isnan(gradient).all())
  assert int(stats.overflowed_pushes[0]) == 1


@pytest.mark.parametrize("seals", [0, once(2)])
def test_gradients_are_nan_unless_sealed_once(seals):
  args, d_out = operands()
  _, gradients, _ = differentiate(stashed(seals=seals), args, d_out)
  assert bool(jnp.isnan(gradients[0][LIVE]).all())
  assert all(bool(jnp.isnan(gradient[SIZES > 0]).all()) for gradient in gradients[1:4])


def test_undifferentiated_the_stash_passes_through():
  (*args, _, _, _), _ = operands()
  stash = ps.Stash.empty(ROWS, specs())
  out, after = jax.jit(lambda *args: ps.grouped_mlp(*args, SIZES, tiling=TILING))(stash, *args)
  assert_trees_equal(after, stash)
  assert not is_any_nan(out[LIVE])


def iota_of(x):
  return jax.lax.broadcasted_iota(x.dtype, x.shape, 0)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"stash": None}, "must be a Stash"),
    ({"residual": ((WIDTH,), jnp.float32)}, "must be those that the stash was made for"),
    ({"keep_x": True}, "must be those that the stash was made for"),
    ({"x": jnp.zeros((2, M, WIDTH))}, "must have rank 2"),
    ({"w_up": jnp.zeros((GROUPS, WIDTH, WIDTH))}, "w_up of shape .* must have shape"),
    ({"w_down": jnp.zeros((GROUPS, WIDTH, WIDTH))}, "w_down of shape .* must have shape"),
    ({"group_sizes": SIZES[:3]}, "group_sizes of shape .* must have shape"),
    ({"row_weights": jnp.zeros((M, 1))}, "row_weights of shape .* must have shape"),
    ({"row_weights": jnp.zeros(M, jnp.int32)}, "row_weights of dtype int32 must have a floating"),
    ({"w_up": jnp.zeros((GROUPS, WIDTH, HIDDEN), jnp.int8)}, "w_up of dtype int8 must have"),
    ({"group_rows": [jnp.zeros((GROUPS, WIDTH))]}, r"group_rows\[0\] of shape .* must have shape"),
    ({"activation": jnp.zeros(3)}, "must be a function"),
    ({"activation": lambda gate, up: gate * jax.nn.softmax(up)}, "must be elementwise"),
    ({"activation": lambda gate, up: gate + jnp.cumsum(up, 0)}, "must be elementwise"),
    ({"activation": lambda gate, up: gate + iota_of(up)}, "must be elementwise"),
    ({"activation": lambda gate: gate}, "must be a function of 2 arrays"),
    ({"activation": lambda gate, up: gate[:4]}, "must return one array"),
    ({"activation": lambda gate, up: (gate, up)}, "must return one array"),
    ({"activation": lambda gate, up: gate + jnp.arange(128.0)}, "must be elementwise|closes over"),
    ({"activation": lambda gate, up: gate * SIZES[0]}, "must be elementwise|closes over"),
    ({"implementation": "cuda"}, "implementation='cuda' must be"),
  ],
)
def test_misuse_is_refused(change, message):
  change = dict(change)
  shape, dtype = change.pop("residual", ((HIDDEN,), jnp.float32))
  (x, w_gate, w_up, w_down, *_), _ = operands()
  spec = jax.ShapeDtypeStruct(shape, dtype)
  arguments = {"stash": ps.Stash.empty(200, [spec, spec]), "x": x, "w_gate": w_gate, "w_up": w_up}
  arguments |= {"w_down": w_down, "group_sizes": SIZES, "tiling": TILING} | change
  with pytest.raises(ValueError, match=message):
    jax.vjp(lambda w_gate: ps.grouped_mlp(**arguments | {"w_gate": w_gate})[0], w_gate)
