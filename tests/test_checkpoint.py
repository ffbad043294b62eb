"""`checkpoint` on small functions: what is stashed, what is replayed, and how misuse shows."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import (
  assert_trees_equal,
  is_any_nan,
  long,
  needs_devices,
  once,
  OPTIMIZED,
)
from tests.helpers.support import IMPLEMENTATIONS, long_if_interpreted

ROWS, WIDTH, HIDDEN, LAYERS = 64, 8, 16, 4
SAVE = jax.checkpoint_policies.save_only_these_names
COUNTS = jnp.array([20, 0, 33, 1], jnp.int32)
NEEDED = 24 + 0 + 40 + 8


def experts(rows, w_in, w_out, count):
  live = (jnp.arange(ROWS) < count)[:, None]
  gate = checkpoint_name(jnp.where(live, rows @ w_in, 0), "residual")
  up = checkpoint_name(jnp.where(live, jnp.sin(rows) @ w_in, 0), "residual")
  return jnp.where(live, (jnp.tanh(gate) * up) @ w_out, 0)


def weights():
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
  return tuple(jax.random.normal(k, s) / 3 for k, s in zip(keys, shapes, strict=True))


X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
TWO = [jax.ShapeDtypeStruct((HIDDEN,), jnp.float32)] * 2


def ragged_of(count, total_rows=ROWS):
  return ps.RaggedRows(count[None], total_rows)


def scanned_loss(weights, capacity=None, outer_names=("residual", ps.SLOT_NAME), **options):
  """The loss of a scan of layers under `jax.checkpoint`, or without it if no names are given."""
  if capacity is None:
    saving = jax.checkpoint(experts, policy=SAVE("residual"))
    f = lambda stash, ragged, *args: (saving(*args), stash)
    stash = None
  else:
    f = ps.checkpoint(experts, policy=SAVE("residual"), **options)
    stash = ps.Stash.empty(capacity, TWO)

  def layer(carry, xs):
    x, stash = carry
    (w, w_in, w_out), count = xs
    out, stash = f(stash, ragged_of(count), jnp.tanh(x @ w), w_in, w_out, count)
    return (x + out, stash), None

  if outer_names:
    layer = jax.checkpoint(layer, policy=SAVE(*outer_names))
  (x, stash), _ = lax.scan(layer, (X, stash), (weights, COUNTS))
  return jnp.sum((x if capacity is None else ps.seal(x, stash)) ** 2)


@pytest.mark.parametrize(
  "capacity, implementation",
  [
    *((NEEDED, None), (NEEDED, IMPLEMENTATIONS[0]), once(NEEDED, IMPLEMENTATIONS[1])),
    *((NEEDED // 2, None), long(NEEDED // 2, IMPLEMENTATIONS[0])),
    long_if_interpreted(NEEDED // 2, IMPLEMENTATIONS[1]),
  ],
)
def test_gradients_of_a_scan(capacity, implementation):
  jit = functools.partial(jax.jit, compiler_options=OPTIMIZED)
  saved = jit(jax.grad(scanned_loss))(weights())
  # The interpreter has effects, which `jax.checkpoint` does not support.
  options = {"capacity": capacity, "implementation": implementation}
  if implementation == "mosaic_interpret":
    options["outer_names"] = ()
  gradient = jax.grad(functools.partial(scanned_loss, **options))
  if capacity >= NEEDED:
    assert_trees_equal(jit(gradient)(weights()), saved)
  else:  # What is recomputed may be fused, and so rounded, differently.
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
      jit(gradient)(weights()),
      saved,
    )


@pytest.mark.parametrize("seal", [ps.seal, lambda x, stash: x])
@pytest.mark.parametrize("is_mapped", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("loops", [long(0), 1])
def test_each_example_of_a_vmap_has_a_stash_of_its_own(loops, is_mapped, seal):
  """Also where one is made for all of them: what sends it back would be added up."""
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = weights()

  def loss(x, w_in, f, seal):
    def layer(carry, xs):
      x, stash = carry
      out, stash = f(stash, ragged_of(COUNTS[0]), x, *xs, COUNTS[0])
      return (x + out, stash), None

    carry = x, ps.Stash.empty(2 * 24, TWO)
    if loops:
      carry, _ = lax.scan(layer, carry, (w_in[:2], w_out[:2]))
    else:
      carry, _ = layer(carry, (w_in[0], w_out[0]))
    return jnp.sum(seal(*carry) ** 2)

  def gradient(f, seal):
    axes = tuple(0 if mapped else None for mapped in is_mapped)
    total = lambda *args: jnp.sum(jax.vmap(lambda *args: loss(*args, f, seal), axes)(*args))
    twice = lambda leaf: jnp.stack([leaf, jnp.sin(leaf)])
    args = [twice(a) if mapped else a for a, mapped in zip((X, w_in), is_mapped, strict=True)]
    return jax.jit(jax.grad(total, (0, 1)))(*args)

  found = gradient(f, seal)
  if seal is not ps.seal:
    assert all(is_any_nan(leaf) for leaf in found)
    return
  saving = jax.checkpoint(experts, policy=SAVE("residual"))
  plain = gradient(lambda stash, ragged, *args: (saving(*args), stash), lambda x, stash: x)
  # One example after the other, or all at once: sums of 16 terms are rounded differently.
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, plain)


def test_the_forward_is_not_replayed():
  """The stash costs the matmuls of saving the residuals, not those of saving nothing."""

  def matmuls(**options):
    gradient = jax.grad(functools.partial(scanned_loss, **options))
    counts = aot.compile(gradient, weights()).matmuls(is_conditional=False)
    return counts.total()

  saved, recomputed = matmuls(), matmuls(outer_names=("nothing",))
  assert matmuls(capacity=NEEDED, outer_names=(ps.SLOT_NAME,)) == saved < recomputed


def test_undifferentiated_the_stash_passes_through():
  f = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())
  stash = ps.Stash.empty(64, TWO)
  args = (X, w_in, w_out, COUNTS[0])
  call = jax.jit(lambda stash, *args: f(stash, ragged_of(args[-1]), *args))
  out, after = call(stash, *args)
  assert_trees_equal(out, jax.jit(experts)(*args))
  assert_trees_equal(after, stash)
  text = call.lower(stash, *args).as_text()
  assert not any(op in text for op in ("while", "dynamic_update_slice", "custom_call"))


def gradients_of(fun, *args, capacity=64, specs=None, ragged=None, **options):
  """Returns the gradients of fun's sum of squares with a stash, and without."""
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

  def with_stash(*args):
    out, stash = f(ps.Stash.empty(capacity, specs), ragged, *args)
    return total(ps.seal(out, stash))

  plain = jax.grad(lambda *args: total(fun(*args)), differentiable)
  # XLA may keep values in float32 that the program rounds to bfloat16, in one program and not in
  # the other; without that, a value is the same wherever it is computed.
  options = {"xla_allow_excess_precision": False} | (OPTIMIZED or {})
  jit = functools.partial(jax.jit, compiler_options=options)
  return jit(jax.grad(with_stash, differentiable))(*args), jit(plain)(*args)


def mask(rows, count):
  return jnp.where((jnp.arange(rows.shape[0]) < count)[:, None], rows, 0)


@pytest.mark.parametrize("capacity", [0, 64])
def test_arguments_are_any_pytree_with_leaves_of_any_dtype(capacity):
  def fun(tree, count, flags, key):
    rows = mask(jnp.tanh(mask(tree["rows"], count) @ tree["w"]), count)
    rows = jnp.where(flags[:, None], jnp.sin(rows), rows)
    noise = jax.random.normal(key, rows.shape) * 1e-3
    return {"rows": mask(rows + noise, count), "count": count + 1, "none": None, "any": flags.any()}

  tree = {"rows": X, "w": weights()[1][0], "none": None}
  flags = jnp.arange(ROWS) % 3 == 0
  stashed, plain = gradients_of(fun, tree, COUNTS[0], flags, jax.random.key(3), capacity=capacity)
  assert_trees_equal(stashed, plain)


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


@pytest.mark.parametrize("capacity", [0, 64])
def test_a_stash_may_have_its_residuals_in_any_order(capacity):
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
    stashed, plain = gradients_of(fun, *args, specs=order, capacity=capacity, policy=policy)
    # What the plain program fuses it may round differently.
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), stashed, plain
    )


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


@needs_devices(4)
def test_devices_of_a_function_with_collectives_agree_on_recomputing():
  """Rows that do not fit on one device are stored on none: all run the collectives, or none."""
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
  counts = jnp.array([5, 40, 8, 0], jnp.int32)

  def fun(rows, w, count):
    hidden = checkpoint_name(mask(rows @ w, count), "residual")
    return mask(jnp.sin(hidden) * lax.psum(jnp.sum(hidden), "x"), count)

  f = ps.checkpoint(fun, policy=SAVE("residual"), axis_name="x")

  def with_stash(rows, w, count):
    stash = ps.Stash.empty(16, TWO[:1])
    out, stash = f(stash, ps.RaggedRows(count, ROWS), rows, w, count)
    return ps.seal(out, stash), stash.stats().overflowed_pushes

  def gradient_of(device_fun):
    run = jax.shard_map(
      device_fun, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"), check_vma=False
    )
    loss = lambda rows, w: (lambda out, aux: (jnp.sum(out**2), aux))(*run(rows, w, counts))
    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(jnp.tile(X, (4, 1)), weights()[1][0])

  stashed, overflowed = gradient_of(with_stash)
  plain, _ = gradient_of(lambda *args: (fun(*args), args[-1]))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), stashed, plain)
  assert overflowed.tolist() == [1, 1, 1, 1]


def chain(use):
  """Differentiates `use(f, stash, x)`, where `f(stash, x)` is a layer."""
  g = ps.checkpoint(experts, policy=SAVE("residual"))
  _, w_in, w_out = (leaf[0] for leaf in weights())
  f = lambda stash, x: g(stash, ragged_of(COUNTS[0]), x, w_in, w_out, COUNTS[0])
  return jax.jit(jax.grad(lambda x: jnp.sum(use(f, ps.Stash.empty(128, TWO), x) ** 2)))(X)


def test_a_chain_is_right_when_it_is_linear():
  def use(f, stash, x):
    for _ in range(2):
      x, stash = f(stash, x)
    return ps.seal(x, stash)

  assert not is_any_nan(chain(use))


def test_a_stash_that_is_dropped_between_layers_gives_nan():
  def use(f, stash, x):
    x, _ = f(stash, x)
    x, stash = f(stash, x)
    return ps.seal(x, stash)

  assert is_any_nan(chain(use))


def test_a_stash_that_is_duplicated_gives_nan():
  def use(f, stash, x):
    x, stash = f(stash, x)
    y, first = f(stash, x)
    z, second = f(stash, x)
    return ps.seal(y, first) + ps.seal(z, second)

  assert is_any_nan(chain(use))


def test_a_stash_that_is_sealed_too_early_gives_nan():
  def use(f, stash, x):
    x, stash = f(stash, x)
    x = ps.seal(x, stash)
    return f(stash, x)[0]

  assert is_any_nan(chain(use))


WRONG_SLOT = ps.Slot(jnp.array([3], jnp.int32), jnp.array([5], jnp.int32))


def test_popping_out_of_order_gives_nan_from_there_on():
  assert is_any_nan(chain(lambda f, stash, x: ps.seal(*f(stash.pop(WRONG_SLOT), x))))


def test_popping_between_layers_gives_nan():
  """Even in order: rows that a layer still needs may be overwritten by the next."""

  def use(f, stash, x):
    y, stash = f(stash, x)
    last = ps.Slot(stash.top, jnp.zeros_like(stash.top))
    return ps.seal(y, stash.pop(last))

  assert is_any_nan(chain(use))


def test_a_stash_that_is_reset_between_layers_gives_nan():
  def use(f, stash, x):
    y, stash = f(stash, x)
    return ps.seal(y, stash.reset())

  assert is_any_nan(chain(use))


def test_pushing_between_layers_is_refused():
  def use(f, stash, x):
    y, stash = f(stash, x)
    stash, _ = stash.push([jnp.ones((ROWS, HIDDEN))] * 2, ragged_of(COUNTS[0]))
    return ps.seal(y, stash)

  with pytest.raises(NotImplementedError, match="through Stash.push"):
    chain(use)


def test_second_order_is_refused():
  gradient = jax.grad(functools.partial(scanned_loss, capacity=NEEDED))
  with pytest.raises(NotImplementedError, match="first-order reverse-mode"):
    jax.grad(lambda w: sum(jnp.sum(g**2) for g in gradient(w)))(weights())


def test_forward_mode_is_refused():
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jvp(functools.partial(scanned_loss, capacity=NEEDED), (weights(),), (weights(),))


def call(stash=None, ragged=None, saved="residual"):
  _, w_in, w_out = (leaf[0] for leaf in weights())
  stash = ps.Stash.empty(64, TWO) if stash is None else stash
  ragged = ragged_of(COUNTS[0]) if ragged is None else ragged
  f = ps.checkpoint(experts, policy=SAVE(saved))
  return jax.grad(lambda rows: f(stash, ragged, rows, w_in, w_out, COUNTS[0])[0].sum())(X)


@pytest.mark.parametrize(
  "options, message",
  [
    ({"ragged": ragged_of(COUNTS[0], 63)}, "No residual has ragged.total_rows=63 rows"),
    ({"saved": "nothing"}, "No residual has ragged.total_rows=64 rows"),
    ({"stash": ps.Stash.empty(64, TWO[:1])}, "must be those that the stash was made for"),
    ({"stash": ps.Stash.empty(64, [*TWO, *TWO])}, "must be those that the stash was made for"),
    ({"stash": (1, 2)}, "must be a Stash"),
    ({"ragged": COUNTS}, "must be RaggedRows"),
    ({"stash": ps.Stash.empty(64, TWO, num_shards=2)}, "has 2 shards here"),
  ],
)
def test_misuse_that_is_known_while_tracing(options, message):
  with pytest.raises(ValueError, match=message):
    call(**options)


def test_an_unknown_implementation_is_refused():
  with pytest.raises(ValueError, match="implementation='cuda' must be one of"):
    ps.checkpoint(experts, implementation="cuda")


def test_a_closed_over_traced_value_is_refused():
  @jax.jit
  def step(count, rows, w_in, w_out):
    f = ps.checkpoint(lambda rows, w_in: experts(rows, w_in, w_out, count))
    return f(ps.Stash.empty(64, TWO), ragged_of(count), rows, w_in)[0]

  with pytest.raises(ValueError, match="closes over traced values.*must be passed as arguments"):
    step(COUNTS[0], X, weights()[1][0], weights()[2][0])


def test_a_closed_over_concrete_array_is_fine():
  w_out = weights()[2][0]
  fun = lambda rows, w_in: experts(rows, w_in, w_out, COUNTS[0])
  stashed, plain = gradients_of(fun, X, weights()[1][0], policy=SAVE("residual"))
  assert_trees_equal(stashed, plain)


@needs_devices(2)
def test_a_stash_made_for_values_that_vary_over_devices_varies():
  """So that it can be the carry of a scan in `shard_map(check_vma=True)`."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  f = ps.checkpoint(experts, policy=SAVE("residual"))

  def loss(x, w_in, w_out, count):
    args = (w_in[0], w_out[0], count[0])
    stash = ps.Stash.empty(256, f.residuals(ragged_of(count[0]), x, *args))

    def layer(carry, weights):
      x, stash = carry
      out, stash = f(stash, ragged_of(count[0]), x, *weights, count[0])
      return (x + out, stash), None

    (x, stash), _ = lax.scan(layer, (x, stash), (w_in, w_out))
    return lax.psum(jnp.sum(ps.seal(x, stash) ** 2), "x")

  run = jax.shard_map(
    loss, mesh=mesh, in_specs=(P("x"), P(), P(), P("x")), out_specs=P(), check_vma=True
  )
  gradient = jax.jit(jax.grad(run))(jnp.tile(X, (2, 1)), *weights()[1:], COUNTS[:2])
  assert not is_any_nan(gradient)
