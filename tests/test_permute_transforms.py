"""Rows to expert order and back under transformations: what is kept, vmap, shard_map, modes."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_stash import permute
from reference.permute import scaled_sum
from tests.helpers.checks import assert_trees_equal, needs_devices
from tests.helpers.permuting import experts_of, operands_of, value_and_gradients


def test_no_row_is_kept_and_none_is_scattered():
  x, weights, _, ids = operands_of(16, 32, 4)
  p = permute.sort_rows(ids, 4, align_groups_to=8)
  rows, index = jnp.ones((p.ragged.total_rows, 32)), p.row_choices // 2
  kept = lambda fun, *args: [
    leaf.shape
    for leaf in jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  cases = {
    "to_experts": (lambda x: permute.to_experts(x, p), x),
    "to_tokens": (lambda rows: permute.to_tokens(rows, p), rows),
    "row_weights": (lambda weights: permute.row_weights(weights, p), weights),
    "gather_rows": (lambda x: permute.gather_rows(x, index, pad_to_multiple=64), x),
  }
  assert {name: kept(*case) for name, case in cases.items()} == dict.fromkeys(cases, [])
  weighted = lambda rows, weights: permute.to_tokens(rows, p, weights), rows, weights
  assert sorted(kept(*weighted)) == sorted([rows.shape, weights.shape])
  for name, (fun, *args) in {**cases, "weighted": weighted}.items():
    gradient = jax.grad(lambda *args, fun=fun: jnp.sum(fun(*args) ** 2), range(len(args)))
    assert ("scatter" in str(jax.make_jaxpr(gradient)(*args))) == (name == "gather_rows")


OPERANDS = operands_of(12, 8, 4)


def assert_as_dense(transform, *operands):
  actual = transform(functools.partial(experts_of, alignment=8))(*(operands or OPERANDS))
  assert_trees_equal(actual, transform(scaled_sum)(*(operands or OPERANDS)))


def test_under_vmap_and_checkpoint():
  run = lambda fun: functools.partial(value_and_gradients, jax.checkpoint(fun))
  batch = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), OPERANDS)
  assert_as_dense(lambda fun: jax.vmap(run(fun)), *batch)


def test_gradients_of_gradients():
  def twice(fun):
    squares = lambda args: jnp.sum(fun(*args, OPERANDS[3]) ** 2)
    return jax.jit(jax.grad(lambda args: sum(map(jnp.sum, jax.grad(squares)(args)))))

  assert_as_dense(twice, OPERANDS[:3])


def test_under_other_modes():
  run = lambda fun: functools.partial(value_and_gradients, fun)
  with jax.numpy_dtype_promotion("strict"):
    jax.eval_shape(run(functools.partial(experts_of, alignment=8)), *OPERANDS)
  with jax.enable_x64(True):
    *operands, ids = map(np.asarray, OPERANDS)
    operands = [jnp.asarray(operand, "float64") for operand in operands]
    assert_as_dense(run, *operands, ids.astype(np.int64))
    x = operands[0]
    gathered = permute.gather_rows(x, np.array([2**32, 1, -(2**32)]))
    np.testing.assert_array_equal(gathered, [0 * x[1], x[1], 0 * x[1]])


@needs_devices(4)
@pytest.mark.both
@pytest.mark.parametrize("check_vma, before", [(True, False), (True, True), (False, True)])
def test_in_shard_map(check_vma, before):
  """Each of four devices has one expert, and every fourth token; the tokens are the same on all."""
  mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

  def on_device(x, weights, scale, ids):
    device, token = jax.lax.axis_index("x"), jnp.arange(len(x))
    out = experts_of(x, weights, scale, ids, alignment=8, before=before, first=device)
    out += permute.gather_rows(x, jnp.where(token % 4 == device, token, -1))
    return jax.lax.psum(out, "x")

  options = {"mesh": mesh, "in_specs": (P(), P(), P("x"), P()), "out_specs": P()}
  sharded = jax.shard_map(on_device, check_vma=check_vma, **options)
  expected = value_and_gradients(lambda x, *args: x + scaled_sum(x, *args), *OPERANDS)
  assert_trees_equal(value_and_gradients(sharded, *OPERANDS), expected)


@needs_devices(2)
def test_in_an_explicit_mesh():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
  expected = value_and_gradients(scaled_sum, *OPERANDS)
  with jax.set_mesh(mesh):
    assert_trees_equal(value_and_gradients(experts_of, *OPERANDS), expected)
    with pytest.raises(ValueError, match="^x, .* must not be sharded here"):
      permute.gather_rows(jax.reshard(OPERANDS[0], P("x")), np.arange(3))
