"""Expert MLP whose gate and up products are kept in a stash for the backward pass."""

from collections.abc import Callable, Hashable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.arguments import as_array, as_groups, as_list, describe
from pallas_stash.batching import batch_alike
from pallas_stash.checks import debugging
from pallas_stash.checks.misplaced_rows import watch_results
from pallas_stash.elementwise import check_elementwise
from pallas_stash.handover import first_order_only, name_slot, receive, with_rules
from pallas_stash.kernels import gate_up, Implementation, mlp
from pallas_stash.kernels.activation import Beside, wide
from pallas_stash.kernels.megablox import Megablox
from pallas_stash.kernels.visits import Place
from pallas_stash.pushed_rows import (
  are_kept_rows_intact,
  check_push,
  read_rows,
  sum_kept_rows,
  take_rows,
)
from pallas_stash.ragged import as_int32, RaggedRows
from pallas_stash.stash import Stash
from pallas_stash.storage import match_residuals
from pallas_stash.tiers import before_loads, on_device, with_host_rows
from pallas_stash.varying import empty, refuse_sharded, vary_alike


def silu_and_multiply(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns silu(gate) * up, the SwiGLU of https://arxiv.org/abs/2002.05202."""
  return jax.nn.silu(gate) * up


def grouped_mlp(
  stash: Stash,
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  w_down: jax.Array,
  group_sizes: jax.Array,
  *,
  row_weights: jax.Array | None = None,
  activation: Callable[..., jax.Array] = silu_and_multiply,
  group_rows: Sequence[jax.Array] = (),
  keep_x: bool = False,
  tiling: Any = (512, 1024, 1024),
  axis_name: Any = None,
  implementation: Implementation | None = None,
) -> tuple[jax.Array, Stash]:
  """Gated MLP of each group of rows that keeps its two products in the stash.

  Computes `(activation(x @ w_gate, x @ w_up) * row_weights) @ w_down`, each group of rows with its
  own matrices. For the backward pass the stash keeps the rows of `x @ w_gate` and `x @ w_up`, and
  nothing else is a residual but the arguments: of the hidden rows it makes them again, and what is
  behind the down projection it needs for nothing, the gradient of `row_weights` included.

  On a TPU the matmul of the forward pass writes both products to the stash as it makes them, and
  the backward pass reads them there: neither exists at worst-case size but where it did not fit.
  The other matmuls are megablox's. Elsewhere all are `lax.ragged_dot`, and rows are copied to the
  stash and back. So they are on a TPU where the stash has pages or host memory, where row tiles are
  no multiple of 16 or have more rows than the stash, and where column tiles do not divide the width
  of the stash; and what megablox does not take, which is other dtypes than float32 and bfloat16,
  rows that are no multiple of the row tile and tiles of columns that are none of 128, is
  `lax.ragged_dot` there, too.

  Gradients are exact at any capacity: products that do not fit are made again from `x`. They are
  those of the matmuls, each rounded to the dtype of `x`, and of the activation in float32.

  Args:
    stash: for two residuals, `[jax.ShapeDtypeStruct((hidden,), x.dtype)] * 2`; with `keep_x` also
      for `jax.ShapeDtypeStruct((width,), x.dtype)`, in any order.
    x: [m, width], the rows of each group from the first row on. The others are padding, whose
      contents have no influence.
    w_gate, w_up: [groups, width, hidden].
    w_down: [groups, hidden, out_width].
    group_sizes: int32[groups], rows of each group. Groups that reach past the end of `x` store
      nothing and count as invalid; what is computed of them is undefined.
    row_weights: float[m], by which hidden rows are multiplied, such as routing weights; or None.
    activation: an elementwise function of gate and up, in float32, and of the rows of `group_rows`.
      It is part of kernels: of operations that Pallas knows on a TPU, and of no arrays but its
      arguments; constants are Python numbers.
    group_rows: arrays [groups, hidden], of each of which `activation` is also given the row of the
      group, in float32. Biases, for example:
      `activation=lambda gate, up, b_gate, b_up: silu_and_multiply(gate + b_gate, up + b_up)`.
    keep_x: whether the rows of `x` go to the stash as well, so that a `jax.checkpoint` around the
      layer need not make them again. Then nothing is left to compute products from: if the rows do
      not fit, gradients are NaN, and `stash.stats()` counts an overflowed push.
    tiling: the row, k and n tile sizes of all matmuls, or a function of (m, k, n) that gives them.
    axis_name: mesh axis or axes; the rows are stored if they fit on every device along them.
    implementation: as for `dynamic_update_slice`. "mosaic_interpret" interprets the matmuls, too;
      with "xla" they are `lax.ragged_dot` on any platform.

  Returns:
    out: [m, out_width] of the dtype of `x`. Its padding is undefined; that of gradients is zero.
    stash: with the rows.

  Raises:
    ValueError: for a stash that was not made for these rows, shapes that do not match, or an
      activation that is not elementwise or closes over arrays.
  """
  if not isinstance(stash, Stash):
    raise ValueError(f"The first argument, {describe(stash)}, must be a Stash.")
  kernels.check_implementation(implementation)
  x = as_array("x", x)
  w_gate, w_up, w_down = (
    as_array(name, w) for name, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down))
  )
  group_sizes = as_int32(as_groups("group_sizes", group_sizes))
  group_rows = as_list("group_rows", group_rows, "arrays")
  group_rows = [as_array(f"group_rows[{i}]", rows) for i, rows in enumerate(group_rows)]
  if row_weights is not None:
    row_weights = as_array("row_weights", row_weights)
  _check_shapes(x, w_gate, w_up, w_down, group_sizes, row_weights, group_rows)
  refuse_sharded(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, row_weights=row_weights)
  check_elementwise("activation", activation, 2 + len(group_rows))
  if not isinstance(activation, Hashable):
    activation = functools.partial(activation)

  as_float = lambda array: array.astype(wide(x.dtype))
  beside = Beside(
    None if row_weights is None else as_float(row_weights), tuple(map(as_float, group_rows))
  )
  as_static = lambda value: tuple(value) if isinstance(value, list) else value
  matmuls = Megablox(x.dtype, as_static(tiling), False, implementation == "mosaic_interpret")
  of_mlp = mlp.Mlp(activation, matmuls, implementation)
  static = _Static(of_mlp, bool(keep_x), as_static(axis_name))
  operands = vary_alike(stash, x, w_gate, w_up, w_down, group_sizes, beside)
  stashed = with_rules(_primal, _forward, _backward, nondiff_argnums=(0,))
  out, stash = stashed(static, *operands)
  return watch_results(out, RaggedRows(group_sizes, x.shape[0]), name_slot), stash


@dataclasses.dataclass(frozen=True)
class _Static:
  mlp: mlp.Mlp
  keep_x: bool
  axis_name: Any

  def is_in_place(self, stash, x, *matrices):
    """Returns whether the kernels for a TPU write and read the stash themselves. All is static."""
    (m, k), (w_gate, _, w_down) = x.shape, matrices
    n = w_gate.shape[2]
    shapes = (m, k, n), (m, w_down.shape[2], n)
    dtypes = x.dtype, *(weights.dtype for weights in matrices)
    is_known = self.mlp.implementation != "xla" and not stash.page_rows and stash.host is None
    return is_known and all(
      gate_up.fits(shape, self.buffers(stash, k, n), dtypes, self.mlp.options) for shape in shapes
    )

  def order(self, stash, k, n):
    """Returns which buffers of the stash are those of gate, of up, and of x if it is kept."""
    dtype = self.mlp.options.preferred_element_type
    found = [((n,), dtype)] * 2 + [((k,), dtype)] * self.keep_x
    return match_residuals(stash.residuals, found)

  def buffers(self, stash, k, n):
    return tuple(stash.buffers[index] for index in self.order(stash, k, n))


def _primal(static, stash, x, w_gate, w_up, w_down, group_sizes, beside):
  operands = x, w_gate, w_up, group_sizes, beside
  if static.is_in_place(stash, x, w_gate, w_up, w_down):
    (hidden,) = mlp.hidden_and_keep(static.mlp, *operands, (), None)
  else:
    products = mlp.products_of(static.mlp, x, w_gate, w_up, group_sizes)
    hidden = mlp.hidden_of(static.mlp, *products, group_sizes, beside)
  out = mlp.product(static.mlp, hidden, w_down, group_sizes)
  return out, batch_alike(stash, (*operands, w_down))


def _forward(static, stash, x, w_gate, w_up, w_down, group_sizes, beside):
  (m, k), n = x.shape, w_gate.shape[2]
  operands = x, w_gate, w_up, group_sizes, beside
  ragged = RaggedRows(group_sizes, m)
  stash = batch_alike(stash, (*operands, w_down))
  if static.is_in_place(stash, x, w_gate, w_up, w_down):
    check_push(stash, [jax.ShapeDtypeStruct((m, n), x.dtype)] * 2 + [x] * static.keep_x, ragged)
    stash, operands = first_order_only((stash, operands))
    order = static.order(stash, k, n)
    stash, slot = take_rows(stash, ragged, static.axis_name)
    buffers, place = static.buffers(stash, k, n), _place(slot)
    hidden, *kept = mlp.hidden_and_keep(static.mlp, *operands, buffers, place)
    kept = dict(zip(order, kept, strict=True))
    stash = dataclasses.replace(stash, buffers=tuple(kept[i] for i in range(len(order))))
    slot = sum_kept_rows(stash, slot, m)
  else:
    gate, up = mlp.products_of(static.mlp, x, w_gate, w_up, group_sizes)
    hidden = mlp.hidden_of(static.mlp, gate, up, group_sizes, beside)
    options = {"axis_name": static.axis_name, "implementation": static.mlp.implementation}
    values = [gate, up, *[x] * static.keep_x]
    if debugging.is_debugging():
      # Whatever padding holds is right here, and is not to be spoken of.
      is_in_group = ragged.is_in_group()[:, None]
      values = [jnp.where(is_in_group, value, jnp.zeros_like(value)) for value in values]
    stash, slot = stash.push(values, ragged, **options)
  out = mlp.product(static.mlp, hidden, w_down, group_sizes)
  saved_x = None if static.keep_x else x
  return (out, stash), (name_slot(slot), saved_x, w_gate, w_up, w_down, group_sizes, beside)


def _backward(static, saved, cotangents):
  slot, x, w_gate, w_up, w_down, group_sizes, beside = saved
  d_out, d_stash = cotangents
  if d_stash.part == "late":  # The early half was all of it.
    return receive(d_stash, slot, ())[0], *[None] * 6
  contents = d_stash.as_cotangent(d_stash.canary)  # Without the zeros of its integers.
  m, k = d_out.shape[0], w_gate.shape[1]
  of_x = jax.ShapeDtypeStruct((m, k), d_out.dtype)
  is_in_place = static.is_in_place(contents, of_x, w_gate, w_up, w_down)
  products = None
  if not is_in_place:
    products = _products(static, contents, slot, m, x, w_gate, w_up, group_sizes)
    slot, products = before_loads(contents, slot, products)
  d_stash, d_out = receive(d_stash, slot, d_out)
  # An activation may hide that its gradient is NaN, so that it is said beside.
  is_known = ~jnp.isnan(d_stash.canary[0])
  if is_in_place:
    is_known &= are_kept_rows_intact(contents, slot, m)
  if static.keep_x:  # There is nothing to make the products from.
    is_known &= slot.is_stored()[0]
    d_out = jnp.where(is_known, d_out, jnp.full_like(d_out, jnp.nan))
  operands = is_known, d_out, x, w_gate, w_up, w_down, group_sizes, beside
  if is_in_place:
    rows, d_w_gate, d_w_up = _backward_in_place(static, contents, slot, *operands)
  else:
    rows, d_w_gate, d_w_up = _backward_by_copies(static, products, *operands)

  matmul = functools.partial(mlp.product, static.mlp, sizes=group_sizes, transpose_rhs=True)
  d_x = matmul(rows.d_gate, w_gate) + matmul(rows.d_up, w_up)
  d_w_down = mlp.weights_gradient(static.mlp, rows.hidden, d_out, w_down, group_sizes)
  is_in_group = jnp.arange(m, dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
  d_x = jnp.where(is_in_group[:, None], d_x, jnp.zeros_like(d_x))
  d_row_weights, d_group_rows = rows.of_beside
  if d_row_weights is not None:
    d_row_weights = jnp.where(is_in_group, d_row_weights, 0)
  return d_stash, d_x, d_w_gate, d_w_up, d_w_down, None, Beside(d_row_weights, d_group_rows)


def _backward_in_place(
  static, contents, slot, is_known, d_out, x, w_gate, w_up, w_down, group_sizes, beside
):
  """Returns (`Gradients`, d_w_gate, d_w_up)."""
  k, n = w_gate.shape[1:]
  gate, up, *of_x = static.buffers(contents, k, n)
  backward = functools.partial(mlp.hidden_backward, static.mlp, d_out, w_down, group_sizes, beside)
  known = lambda place: place._replace(start=jnp.where(is_known, place.start, -1))
  if static.keep_x:
    rows = backward((gate, up), known(_place(slot)))
    operands = *of_x, (rows.d_gate, rows.d_up), (w_gate, w_up), group_sizes, _place(slot)
    return rows, *mlp.weights_gradients_in_place(static.mlp, *operands)

  def make_again():
    m, everything = x.shape[0], Place(*map(jnp.int32, (0, x.shape[0], 0)))
    fresh = tuple(empty((m, buffer.shape[1]), buffer.dtype) for buffer in (gate, up))
    made_of = x, w_gate, w_up, group_sizes, beside
    _, *fresh = mlp.hidden_and_keep(static.mlp, *made_of, fresh, everything)
    return backward(tuple(fresh), known(everything))

  is_stored = slot.is_stored()[0]
  rows = lax.cond(is_stored, lambda: backward((gate, up), known(_place(slot))), make_again)
  return rows, *_weights_gradients(static, rows, x, w_gate, w_up, group_sizes)


def _products(static, contents, slot, m, x, w_gate, w_up, group_sizes):
  """Returns gate and up, and `x` if it is kept, from the stash or else made again."""
  order = static.order(contents, *w_gate.shape[1:])
  ragged = RaggedRows(group_sizes, m)

  def read():
    is_held = contents.allocator.holds(slot)
    restored = read_rows(on_device(contents), slot, ragged, is_held, static.mlp.implementation)
    return tuple(restored[index] for index in order)

  if static.keep_x:
    rows = read()
  else:
    make_again = lambda: mlp.products_of(static.mlp, x, w_gate, w_up, group_sizes)
    rows = lax.cond(slot.is_stored()[0], read, make_again)
  return with_host_rows(contents, slot, ragged, rows, order, static.mlp.implementation)


def _backward_by_copies(
  static, products, is_known, d_out, x, w_gate, w_up, w_down, group_sizes, beside
):
  """Returns what `_backward_in_place` does."""
  gate, up, *of_x = products
  x = of_x[0] if static.keep_x else x
  d_hidden = mlp.product(static.mlp, d_out, w_down, group_sizes, transpose_rhs=True)
  rows = mlp.hidden_gradients(static.mlp, d_hidden, gate, up, group_sizes, beside, is_known)
  return rows, *_weights_gradients(static, rows, x, w_gate, w_up, group_sizes)


def _weights_gradients(static, rows, x, w_gate, w_up, group_sizes):
  pairs = (rows.d_gate, w_gate), (rows.d_up, w_up)
  return [mlp.weights_gradient(static.mlp, x, d, like, group_sizes) for d, like in pairs]


def _place(slot):
  return Place(jnp.zeros_like(slot.rows[0]), slot.rows[0], slot.start[0])


def _check_shapes(x, w_gate, w_up, w_down, group_sizes, row_weights, group_rows):
  if x.ndim != 2 or w_gate.ndim != 3 or w_down.ndim != 3:
    raise ValueError(f"{x.shape=} must have rank 2, {w_gate.shape=} and {w_down.shape=} rank 3.")
  (m, width), (groups, _, hidden) = x.shape, w_gate.shape
  wanted = {
    "w_gate": (w_gate, (groups, width, hidden)),
    "w_up": (w_up, (groups, width, hidden)),
    "w_down": (w_down, (groups, hidden, w_down.shape[-1])),
    "group_sizes": (group_sizes, (groups,)),
  }
  if row_weights is not None:
    wanted["row_weights"] = row_weights, (m,)
  for index, rows in enumerate(group_rows):
    wanted[f"group_rows[{index}]"] = rows, (groups, hidden)
  for name, (array, shape) in wanted.items():
    if name != "group_sizes" and not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} of dtype {array.dtype} must have a floating-point dtype.")
    if array.shape != shape:
      raise ValueError(
        f"{name} of shape {array.shape} must have shape {shape}, for {x.shape=} and"
        f" {w_gate.shape=}."
      )
