"""The parts of an expert MLP: one contract each, two implementations.

On a TPU they are megablox's matmuls and the kernels of `gate_up` and `gate_up_backward`; elsewhere
`lax.ragged_dot`, with what goes to the stash and comes from it copied. Each is a primitive, as
`dispatch` makes them.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.interpreters import partial_eval
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.kernels import dispatch, gate_up, gate_up_backward, grouped
from pallas_stash.kernels.activation import activate, activate_backward, Activation, Beside, wide
from pallas_stash.kernels.gate_up_backward import Gradients
from pallas_stash.kernels.megablox import Megablox
from pallas_stash.kernels.tiling import LANES, round_up
from pallas_stash.kernels.visits import ALIGN, Place
from pallas_stash.ragged import CopyRuns
from pallas_stash.varying import empty, vary_alike, varying_axes


@dataclasses.dataclass(frozen=True)
class Mlp:
  """What is static of an expert MLP.

  Attributes:
    activation: an elementwise function of gate and up, float32, and of the rows of `Beside`.
    options: of its matmuls.
    implementation: as for `dynamic_update_slice`; with "xla" nothing is of Pallas.
  """

  activation: Activation
  options: Megablox
  implementation: kernels.Implementation | None


def product(mlp: Mlp, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, transpose_rhs=False):
  """Returns the rows of each group times its matrix, in the dtype of `lhs`; padding is undefined.

  Args:
    mlp: static.
    lhs: [m, k]. What it holds outside of groups has no influence.
    rhs: [groups, k, n], or [groups, n, k] if it is transposed.
    sizes: int32[groups]; they are a prefix of the rows.
    transpose_rhs: static.
  """
  (out,) = _run(_PRODUCT, mlp, (lhs, rhs, sizes), transpose_rhs=transpose_rhs)
  return out


def weights_gradient(
  mlp: Mlp, lhs: jax.Array, d_out: jax.Array, like: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Returns lhs[rows of each group].T @ d_out[rows of the group], [groups, k, n].

  Args:
    mlp, sizes: as of `product`.
    lhs, d_out: [m, k] and [m, n]. What they hold outside of groups has no influence.
    like: [groups, k, n], of whose dtype the result is; it has no other influence.
  """
  (gradient,) = _run(_WEIGHTS_GRADIENT, mlp, (lhs, d_out, like, sizes))
  return gradient


def weights_gradients_in_place(
  mlp: Mlp,
  stash: jax.Array,
  d_outs: tuple[jax.Array, ...],
  likes: tuple[jax.Array, ...],
  sizes: jax.Array,
  place: Place,
) -> tuple[jax.Array, ...]:
  """Returns `weights_gradient` of rows of a stash with each of `d_outs`; args are its."""
  return _run(_IN_PLACE, mlp, (stash, d_outs, likes, sizes, place))


def hidden_and_keep(
  mlp: Mlp,
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  sizes: jax.Array,
  beside: Beside,
  stashes: tuple[jax.Array, ...],
  place: Place | None,
) -> tuple[jax.Array, ...]:
  """Returns hidden rows and the stashes with the products' rows; args are of `gate_up.forward`."""
  return tuple(_run(_FORWARD, mlp, (x, w_gate, w_up, sizes, beside, stashes, place)))


def hidden_backward(
  mlp: Mlp,
  d_out: jax.Array,
  w_down: jax.Array,
  sizes: jax.Array,
  beside: Beside,
  stashes: tuple[jax.Array, ...],
  place: Place,
) -> Gradients:
  """Returns what `gate_up_backward.backward` does, whose args these are."""
  leaves = _run(_BACKWARD, mlp, (d_out, w_down, sizes, beside, stashes, place))
  return jax.tree.unflatten(jax.tree.structure(Gradients(0, 0, 0, beside)), leaves)


def products_of(mlp: Mlp, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, sizes: jax.Array):
  """Returns gate and up, [m, n]."""
  return tuple(product(mlp, x, weights, sizes) for weights in (w_gate, w_up))


def hidden_of(mlp: Mlp, gate: jax.Array, up: jax.Array, sizes: jax.Array, beside: Beside):
  """Returns the hidden rows of products, as `gate_up.forward` does."""
  weights, group_rows = _by_row(beside, sizes, gate.shape[0])
  return activate(mlp.activation, gate, up, weights, group_rows).astype(gate.dtype)


def hidden_gradients(
  mlp: Mlp,
  d_hidden: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  sizes: jax.Array,
  beside: Beside,
  is_known: jax.Array,
) -> Gradients:
  """Returns what `gate_up_backward.backward` does, from the gradient of the hidden rows.

  All is NaN unless `is_known`, bool[]: an activation may hide that what it is given is.
  """
  weights, group_rows = _by_row(beside, sizes, gate.shape[0])
  *gradients, d_weights, d_rows = activate_backward(
    mlp.activation, d_hidden, gate, up, weights, group_rows
  )
  gradients = [gradient.astype(d_hidden.dtype) for gradient in gradients]
  if d_weights is not None:
    d_weights = jnp.sum(d_weights, axis=1)
  group = _group_of_rows(sizes, gate.shape[0])
  # Behind the last group: padding, of which anything may have been made.
  sum_up = lambda rows: jax.ops.segment_sum(rows, group, sizes.shape[0] + 1)[:-1]
  gradients = Gradients(*gradients, Beside(d_weights, tuple(map(sum_up, d_rows))))
  return jax.tree.map(lambda x: jnp.where(is_known, x, jnp.full_like(x, jnp.nan)), gradients)


def _group_of_rows(sizes, total_rows):
  """Returns the group of each row, int32[total_rows]; as many as there are for padding."""
  row = jnp.arange(total_rows, dtype=jnp.int32)
  return jnp.sum(row[:, None] >= jnp.cumsum(sizes, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _by_row(beside, sizes, total_rows):
  weights = None if beside.row_weights is None else beside.row_weights[:, None]
  if not beside.group_rows:
    return weights, ()
  group = jnp.minimum(_group_of_rows(sizes, total_rows), sizes.shape[0] - 1)
  return weights, [rows[group] for rows in beside.group_rows]


# The parts, of operands that are pytrees and of `mlp`: by XLA, and on a TPU.


def _product_by_xla(mlp, lhs, rhs, sizes, *, transpose_rhs):
  rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
  return (_ragged_dot(lhs, rhs, sizes).astype(lhs.dtype),)


def _ragged_dot(lhs, rhs, sizes):
  dtypes = lhs.dtype, rhs.dtype
  dtype = lhs.dtype if len(set(dtypes)) == 1 else wide(*dtypes)
  options = {"preferred_element_type": wide(dtype)}
  return lax.ragged_dot(lhs.astype(dtype), rhs.astype(dtype), sizes, **options)


def _product_on_tpu(mlp, lhs, rhs, sizes, *, transpose_rhs):
  options = dataclasses.replace(mlp.options, transpose_rhs=transpose_rhs)
  shape = *lhs.shape, rhs.shape[1 if transpose_rhs else 2]
  if not options.takes(shape, lhs.dtype, rhs.dtype):
    return _product_by_xla(mlp, lhs, rhs, sizes, transpose_rhs=transpose_rhs)
  if not varying_axes((lhs, rhs, sizes)):
    return (options(lhs, rhs, sizes, None),)
  # Megablox does not say along which mesh axes its result varies. With nothing to keep, ours does
  # the same.
  nothing = empty((ALIGN, round_up(lhs.shape[1], LANES)), lhs.dtype), sizes, jnp.int32(0)
  operands = vary_alike(lhs, rhs, *nothing, Place(*map(jnp.int32, (0, 0, -1))))
  return grouped.gmm_and_keep(*operands, options=options)[:1]


def _product_results(mlp, lhs, rhs, sizes, *, transpose_rhs):
  del sizes
  return (lhs.update(shape=(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), weak_type=False),)


def _weights_gradient_by_xla(mlp, lhs, d_out, like, sizes):
  is_in_group = (_group_of_rows(sizes, lhs.shape[0]) < sizes.shape[0])[:, None]
  in_group = lambda rows: jnp.where(is_in_group, rows, jnp.zeros_like(rows))
  multiply = lambda rhs: _ragged_dot(in_group(lhs), rhs, sizes)
  dtype = jax.eval_shape(multiply, like).dtype
  return tuple(jax.linear_transpose(multiply, like)(in_group(d_out).astype(dtype)))


def _weights_gradient_on_tpu(mlp, lhs, d_out, like, sizes):
  shape, dtypes = (*lhs.shape, d_out.shape[1]), (lhs.dtype, d_out.dtype, like.dtype)
  if not mlp.options.takes(shape, *dtypes):
    return _weights_gradient_by_xla(mlp, lhs, d_out, like, sizes)
  is_typed = bool(varying_axes((lhs, d_out)))
  if not (is_typed and grouped.fits(shape, lhs, dtypes, mlp.options.tiles(*shape))):
    return (mlp.options.gradient("rhs", d_out, lhs, like, sizes, None),)
  everything = Place(*map(jnp.int32, (0, lhs.shape[0], 0)))  # As if it lay in a stash.
  operands = vary_alike(lhs, (d_out,), (like,), sizes, everything)
  return _in_place_on_tpu(mlp, *operands)


def _weights_gradient_results(mlp, lhs, d_out, like, sizes):
  del lhs, d_out, sizes
  return (like.update(weak_type=False),)


def _in_place_by_xla(mlp, stash, d_outs, likes, sizes, place):
  total_rows, width = d_outs[0].shape[0], likes[0].shape[1]
  lhs = _load(stash, place, total_rows, width)
  return tuple(
    weights_gradient(mlp, lhs, d_out, like, sizes)
    for d_out, like in zip(d_outs, likes, strict=True)
  )


def _in_place_on_tpu(mlp, stash, d_outs, likes, sizes, place, **how):
  def gradient(d_out, like):
    groups, k, _ = like.shape
    of_rhs = {"k": k, "dtype": like.dtype, "groups_here": groups, "options": mlp.options}
    return grouped.tgmm(stash, d_out, sizes, jnp.int32(0), place, **of_rhs, **how)

  return tuple(map(gradient, d_outs, likes))


def _in_place_results(mlp, stash, d_outs, likes, *_):
  return tuple(like.update(weak_type=False) for like in likes)


def _forward_by_xla(mlp, x, w_gate, w_up, sizes, beside, stashes, place):
  products = products_of(mlp, x, w_gate, w_up, sizes)
  hidden = hidden_of(mlp, *products, sizes, beside)
  if not stashes:
    return (hidden,)
  stored = jnp.where(place.start >= 0, place.rows, 0)
  runs = CopyRuns(place.first[None], place.start[None], stored[None])
  values = (*products, x)[: len(stashes)]
  keep = lambda value, stash: kernels.compact(value, stash, runs, None)
  return hidden, *map(keep, values, stashes)


def _forward_on_tpu(mlp, *operands, **how):
  return gate_up.forward(*operands, activation=mlp.activation, options=mlp.options, **how)


def _forward_results(mlp, x, w_gate, w_up, sizes, beside, stashes, place):
  del w_up, sizes, beside, place
  hidden = x.update(shape=(x.shape[0], w_gate.shape[2]), weak_type=False)
  return hidden, *(stash.update(weak_type=False) for stash in stashes)


def _backward_by_xla(mlp, d_out, w_down, sizes, beside, stashes, place):
  d_hidden = product(mlp, d_out, w_down, sizes, transpose_rhs=True)
  gate, up = (_load(stash, place, *d_hidden.shape) for stash in stashes)
  operands = d_hidden, gate, up, sizes, beside, place.start >= 0
  return jax.tree.leaves(hidden_gradients(mlp, *operands))


def _backward_on_tpu(mlp, *operands, **how):
  static = {"activation": mlp.activation, "options": mlp.options}
  return jax.tree.leaves(gate_up_backward.backward(*operands, **static, **how))


def _backward_results(mlp, d_out, w_down, sizes, beside, stashes, place):
  del sizes, stashes, place
  rows = d_out.update(shape=(d_out.shape[0], w_down.shape[1]), weak_type=False)
  of_beside = (x.update(weak_type=False) for x in jax.tree.leaves(beside))
  return [rows, rows, rows, *of_beside]


def _load(stash, place, total_rows, width):
  """Returns the rows of a stash at their worst-case size; zero in padding, NaN if not stored."""
  is_stored = place.start >= 0
  stored = jnp.where(is_stored, place.rows, 0)
  runs = CopyRuns(place.start[None], place.first[None], stored[None])
  blank = jnp.where(is_stored, jnp.zeros((), stash.dtype), jnp.full((), jnp.nan, stash.dtype))
  return kernels.expand(stash, runs, total_rows, width, blank, None, None)


def _primitive(name, results, by_xla, on_tpu):
  """Returns a primitive of pytrees: its operands are their leaves, `tree` their structure."""

  def of_trees(function, *leaves, tree, mlp, **params):
    if mlp.implementation == "mosaic" and function is by_xla:  # It is asked for by name.
      function = on_tpu
    return function(mlp, *jax.tree.unflatten(tree, leaves), **params)

  functions = (functools.partial(of_trees, function) for function in (results, by_xla, on_tpu))
  primitive = dispatch.make_primitive(f"stash_mlp_{name}", *functions, **_HOW)
  _FUNCTIONS[primitive] = by_xla, on_tpu
  return primitive


def _run(primitive, mlp, operands, **params):
  operands = vary_alike(*operands)
  leaves, tree = jax.tree.flatten(operands)
  if mlp.implementation in (None, "mosaic"):
    return primitive.bind(*leaves, tree=tree, mlp=mlp, **params)
  by_xla, on_tpu = _FUNCTIONS[primitive]
  function = by_xla if mlp.implementation == "xla" else on_tpu
  # What is interpreted has effects, which a primitive would have to declare.
  if mlp.implementation == "mosaic_interpret" and primitive in (_FORWARD, _BACKWARD, _IN_PLACE):
    params["interpret"] = kernels.INTERPRET
  one = _traced(function, mlp, tree, tuple(params.items()))
  return jax.custom_batching.sequential_vmap(one)(*leaves)


@functools.lru_cache  # Not all: activations may be made anew for each call.
def _traced(function, mlp, tree, params):
  return jax.jit(lambda *leaves: function(mlp, *jax.tree.unflatten(tree, leaves), **dict(params)))


_FUNCTIONS = {}
_HOW = {"multiple_results": True, "declares_cost": True}
_PRODUCT = _primitive("product", _product_results, _product_by_xla, _product_on_tpu)
_WEIGHTS_GRADIENT = _primitive(
  "weights_gradient",
  _weights_gradient_results,
  _weights_gradient_by_xla,
  _weights_gradient_on_tpu,
)
_IN_PLACE = _primitive(
  "weights_gradient_in_place", _in_place_results, _in_place_by_xla, _in_place_on_tpu
)
_FORWARD = _primitive("forward", _forward_results, _forward_by_xla, _forward_on_tpu)
_BACKWARD = _primitive("backward", _backward_results, _backward_by_xla, _backward_on_tpu)


def _eliminate(is_used, *args):
  """Returns which operands are used, and what is left of a `_FORWARD` without unused results.

  What `jax.checkpoint` replays of it is the hidden rows alone: with the stashes it would keep, of
  each layer, the whole stashes that came in.
  """
  equation = args[-1]  # Later jaxes say before it which operands are alive.
  if any(is_used[1:]):
    return [True] * len(equation.invars), equation
  if not is_used[0]:
    return [False] * len(equation.invars), None
  *operands, stashes, place = jax.tree.unflatten(equation.params["tree"], equation.invars)
  kept, tree = jax.tree.flatten((*operands, (), None))
  replay = equation.replace(
    invars=kept, outvars=equation.outvars[:1], params=equation.params | {"tree": tree}
  )
  return [True] * len(kept) + [False] * (len(equation.invars) - len(kept)), replay


partial_eval.dce_rules[_FORWARD] = _eliminate
