"""Grouped matmuls that keep their left-hand side in a stash: one contract, two implementations.

On a TPU it is written and read in place (`grouped`); elsewhere by copies, with megablox between.
"""

import functools

import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.kernels import dispatch, grouped
from pallas_stash.kernels.megablox import Megablox
from pallas_stash.kernels.visits import Place
from pallas_stash.ragged import CopyRuns
from pallas_stash.varying import vary_alike


def gmm_and_keep(
  lhs: jax.Array,
  rhs: jax.Array,
  stash: jax.Array,
  group_sizes: jax.Array,
  group_offset: jax.Array | None,
  place: Place,
  options: Megablox,
  implementation: kernels.Implementation | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the product of the rows of each group and its matrix, and the stash with the rows.

  Args are those of `grouped.gmm_and_keep`, whose shapes `fits`; and `implementation`, not "xla".
  """
  operands = lhs, rhs, stash, group_sizes, group_offset, place
  return tuple(_run(_GMM, grouped.gmm_and_keep, implementation, operands, options=options))


def tgmm(
  stash: jax.Array,
  d_out: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  group_offset: jax.Array | None,
  place: Place,
  k: int,
  options: Megablox,
  implementation: kernels.Implementation | None,
) -> jax.Array:
  """Returns the gradient of `rhs`, of its shape and dtype, from the rows of a stash.

  Args are those of `grouped.tgmm`, whose shapes `fits`; and `implementation`, not "xla".
  """
  operands = stash, d_out, rhs, group_sizes, group_offset, place
  (gradient,) = _run(_TGMM, _tgmm_on_tpu, implementation, operands, k=k, options=options)
  return gradient


def _run(primitive, on_tpu, implementation, operands, **params):
  *arrays, group_offset, place = operands
  group_offset = jnp.int32(0) if group_offset is None else group_offset
  leaves = vary_alike(*arrays, group_offset, *place)
  if implementation != "mosaic_interpret":
    return primitive.bind(*leaves, **params, is_for_any=implementation == "mosaic")
  # What is interpreted has effects, which a primitive would have to declare.
  one = _interpreted(on_tpu, tuple(params.items()))
  return jax.custom_batching.sequential_vmap(one)(*leaves)


@functools.cache
def _interpreted(on_tpu, params):
  function = functools.partial(on_tpu, **dict(params), interpret=kernels.INTERPRET)
  return jax.jit(lambda *leaves: function(*leaves[:-3], Place(*leaves[-3:])))


def _gmm_by_copies(lhs, rhs, stash, group_sizes, group_offset, place, *, options):
  stored = jnp.where(place.start >= 0, place.rows, 0)
  runs = CopyRuns(place.first[None], place.start[None], stored[None])
  out = options(lhs, rhs, group_sizes, group_offset)
  return out, kernels.compact(lhs, stash, runs, None)


def _tgmm_by_copies(stash, d_out, rhs, group_sizes, group_offset, place, *, k, options):
  is_stored = place.start >= 0
  stored = jnp.where(is_stored, place.rows, 0)
  runs = CopyRuns(place.start[None], place.first[None], stored[None])
  # Megablox selects the rows of each group. Where there are none of them, they are NaN.
  nan = jnp.full((), jnp.nan, stash.dtype)
  lhs = kernels.expand(stash, runs, d_out.shape[0], k, nan, None, ~is_stored)
  return (options.gradient("rhs", d_out, lhs, rhs, group_sizes, group_offset),)


def _tgmm_on_tpu(stash, d_out, rhs, group_sizes, group_offset, place, *, k, options, **how):
  of_rhs = {"k": k, "dtype": rhs.dtype, "groups_here": rhs.shape[0], "options": options}
  gradient = grouped.tgmm(stash, d_out, group_sizes, group_offset, place, **of_rhs, **how)
  return (gradient.swapaxes(1, 2) if options.transpose_rhs else gradient,)


def _gmm_results(lhs, rhs, stash, *_, options, **params):
  del params
  n = rhs.shape[1 if options.transpose_rhs else 2]
  dtype = jnp.dtype(options.preferred_element_type)
  out = lhs.update(shape=(lhs.shape[0], n), dtype=dtype, weak_type=False)
  return out, stash.update(weak_type=False)


def _tgmm_results(stash, d_out, rhs, *_, **params):
  del stash, d_out, params
  return (rhs.update(weak_type=False),)


def _primitive(name, results, by_copies, on_tpu):
  """Returns a primitive whose last three operands are a `Place`."""

  def lower(function, *leaves, is_for_any, **params):
    if is_for_any:  # It is asked for by name.
      function = on_tpu
    elif params["options"].interpret:  # What megablox interprets, nothing else runs.
      function = by_copies
    return function(*leaves[:-3], Place(*leaves[-3:]), **params)

  lowered = (functools.partial(lower, function) for function in (by_copies, on_tpu))
  return dispatch.make_primitive(name, results, *lowered, **_HOW)


_HOW = {"multiple_results": True, "declares_cost": True}
_GMM = _primitive("stash_gmm", _gmm_results, _gmm_by_copies, grouped.gmm_and_keep)
_TGMM = _primitive("stash_tgmm", _tgmm_results, _tgmm_by_copies, _tgmm_on_tpu)

# What `jax.checkpoint` replays of the first is the product alone: with the stash it would keep, of
# each layer, the whole stash that came in.


def _multiply(lhs, rhs, group_sizes, group_offset, *, options):
  return (options(lhs, rhs, group_sizes, group_offset),)


def _product(lhs, rhs, group_sizes, group_offset, *, options):
  del group_sizes, group_offset
  return _gmm_results(lhs, rhs, lhs, options=options)[:1]


_PRODUCT = dispatch.make_primitive("stash_gmm_product", _product, _multiply, _multiply, **_HOW)


def _eliminate(is_used, *args):
  """Returns which operands are used, and what is left of a `_GMM` some of whose results are not."""
  equation = args[-1]  # Later jaxes say before it which operands are alive.
  if is_used[1]:
    return [True] * len(equation.invars), equation
  if not is_used[0]:
    return [False] * len(equation.invars), None
  # lhs, rhs, stash, group_sizes, group_offset, and the three of a `Place`.
  is_operand = [True, True, False, True, True, False, False, False]
  product = equation.replace(
    primitive=_PRODUCT,
    invars=[x for x, is_one in zip(equation.invars, is_operand, strict=True) if is_one],
    outvars=equation.outvars[:1],
    params={
      name: value for name, value in equation.params.items() if name in ("options", "expected")
    },
  )
  return is_operand, product


partial_eval.dce_rules[_GMM] = _eliminate
