"""`checkpoint` of functions of any arguments, residuals and groups: what is stashed is theirs."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal, OPTIMIZED
from tests.helpers.masked_experts import (
  COUNTS,
  experts,
  mask,
  ragged_of,
  ROWS,
  SAVE,
  TWO,
  weights,
  X,
)
from tests.helpers.stashes import with_rows_taken

CAPACITY = 64


def gradients_of(fun, *args, **options):
  """Returns the gradients of fun's sum of squares with a stash, and without."""
  (stashed,), plain = gradients_with([CAPACITY], fun, *args, **options)
  return stashed, plain


def gradients_with(rooms, fun, *args, specs=None, ragged=None, **options):
  """The same, with so much room in the stash: a list, by one program."""
  ragged = ragged_of(COUNTS[0]) if ragged is None else ragged
  f = ps.checkpoint(fun, **options)
  specs = f.residuals(ragged, *args) if specs is None else specs
  differentiable = tuple(
    i
    for i, a in enumerate(args)
    if all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(a))
  )

  def total(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(jnp.sum(leaf**2) for leaf in leaves)

  def gradient(room, *args):
    def with_stash(*args):
      stash = ps.Stash.empty(CAPACITY, specs)
      stash = with_rows_taken(stash, CAPACITY - room)
      return total(ps.seal(*f(stash, ragged, *args)))

    return jax.grad(with_stash, differentiable)(*args)

  plain = jax.grad(lambda *args: total(fun(*args)), differentiable)
  # XLA may keep values in float32 that the program rounds to bfloat16, in one program and not in
  # the other; without that, a value is the same wherever it is computed.
  options = {"xla_allow_excess_precision": False} | OPTIMIZED
  jit = functools.partial(jax.jit, compiler_options=options)
  gradient = jit(gradient)
  return [gradient(room, *args) for room in rooms], jit(plain)(*args)


def test_arguments_are_any_pytree_with_leaves_of_any_dtype():
  def fun(tree, count, flags, key):
    rows = mask(jnp.tanh(mask(tree["rows"], count) @ tree["w"]), count)
    rows = jnp.where(flags[:, None], jnp.sin(rows), rows)
    noise = jax.random.normal(key, rows.shape) * 1e-3
    return {"rows": mask(rows + noise, count), "count": count + 1, "none": None, "any": flags.any()}

  tree = {"rows": X, "w": weights()[1][0], "none": None}
  flags = jnp.arange(ROWS) % 3 == 0
  args = tree, COUNTS[0], flags, jax.random.key(3)
  stashed, plain = gradients_with([0, CAPACITY], fun, *args)
  assert_trees_equal(stashed, [plain, plain])


def test_residuals_of_several_widths_and_dtypes():
  def fun(rows, w):
    valid = lambda x: jnp.where((jnp.arange(ROWS) < 20).reshape(-1, *[1] * (x.ndim - 1)), x, 0)
    wide = valid(jnp.sin(valid(rows) @ w))
    cube = valid(jnp.sin(wide.reshape(ROWS, 4, 4).astype(jnp.float16)))
    return valid(jnp.sin(wide).astype(jnp.bfloat16)), valid(jnp.exp(cube)), valid(cube.sum((1, 2)))

  w = weights()[1][0]
  specs = ps.checkpoint(fun).residuals(ragged_of(COUNTS[0]), X, w)
  assert len({(spec.shape, jnp.dtype(spec.dtype)) for spec in specs}) >= 3
  stashed, plain = gradients_of(fun, X, w)
  # The plain program fuses these elementwise residuals away: float32 rounding of sums of 16 terms.
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), stashed, plain)


def test_a_stash_may_have_its_residuals_in_any_order():
  """The order of the leaves of a vjp function is not the caller's business."""

  def fun(rows, w_in, w_out):
    hidden = checkpoint_name(mask(rows @ w_in, COUNTS[0]), "residual")
    out = checkpoint_name(mask(jnp.sin(hidden) @ w_out, COUNTS[0]), "residual")
    return mask(jnp.exp(out), COUNTS[0])

  policy = SAVE("residual")
  args = (X, weights()[1][0], weights()[2][0])
  specs = ps.checkpoint(fun, policy=policy).residuals(ragged_of(COUNTS[0]), *args)
  assert specs[0].shape != specs[1].shape
  for order in (specs, specs[::-1]):
    stashed, plain = gradients_with([0, CAPACITY], fun, *args, specs=order, policy=policy)
    # What the plain program fuses it may round differently.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, stashed, [plain, plain])


def test_an_argument_is_told_from_a_residual_of_its_shape():
  """`rows` and `scale` are needed in the backward pass, and have the shape of the residual."""

  def fun(rows, scale):
    hidden = checkpoint_name(mask(jnp.sin(rows * scale), COUNTS[0]), "residual")
    return mask(jnp.exp(hidden) * scale, COUNTS[0])

  policy = SAVE("residual")
  f = ps.checkpoint(fun, policy=policy)
  assert len(f.residuals(ragged_of(COUNTS[0]), X, X)) == 1
  stashed, plain = gradients_of(fun, X, jnp.cos(X), policy=policy)
  assert_trees_equal(stashed, plain)


def test_residuals_from_shapes_and_from_arrays():
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())
  args = (X, w_in, w_out, COUNTS[0])
  shapes = jax.eval_shape(lambda *args: args, ragged_of(COUNTS[0]), *args)
  for found in (f.residuals(ragged_of(COUNTS[0]), *args), f.residuals(*shapes)):
    assert [(r.shape, r.dtype) for r in found] == [(s.shape, s.dtype) for s in TWO]


def test_layouts_with_starts():
  """Rows at [start, end) of a sorted buffer: padding before and behind them."""
  live = (jnp.arange(ROWS) >= 11) & (jnp.arange(ROWS) < 40)

  def fun(rows, w):
    hidden = checkpoint_name(jnp.where(live[:, None], rows @ w, 0), "residual")
    return jnp.where(live[:, None], jnp.sin(hidden) ** 2, 0)

  ragged = ps.RaggedRows(jnp.array([12, 17]), ROWS, jnp.array([11, 23]))
  stashed, plain = gradients_of(fun, X, weights()[1][0], ragged=ragged, policy=SAVE("residual"))
  assert_trees_equal(stashed, plain)


def test_groups_that_make_no_sense_are_recomputed_and_counted():
  ragged = ps.RaggedRows(jnp.array([60, 60]), ROWS)
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())

  def loss(rows, w_in):
    out, stash = f(ps.Stash.empty(128, TWO), ragged, rows, w_in, w_out, COUNTS[0])
    return jnp.sum(ps.seal(out, stash) ** 2), stash.stats()

  jit = functools.partial(jax.jit, compiler_options=OPTIMIZED)
  gradients, stats = jit(jax.grad(loss, (0, 1), has_aux=True))(X, w_in)
  plain = jax.grad(lambda *args: jnp.sum(experts(*args, w_out, COUNTS[0]) ** 2), (0, 1))
  assert_trees_equal(gradients, jit(plain)(X, w_in))
  assert [int(x[0]) for x in stats] == [0, 0, 0, 1, 0]


def test_a_closed_over_concrete_array_is_fine():
  w_out = weights()[2][0]
  fun = lambda rows, w_in: experts(rows, w_in, w_out, COUNTS[0])
  stashed, plain = gradients_of(fun, X, weights()[1][0], policy=SAVE("residual"))
  assert_trees_equal(stashed, plain)
