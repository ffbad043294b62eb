"""`checkpoint`: `jax.checkpoint` whose saved values live in a stash."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import kernels
from pallas_stash.batching import batch_alike
from pallas_stash.kernels import Implementation
from pallas_stash.misplaced_rows import watch_results
from pallas_stash.ragged import RaggedRows
from pallas_stash.stash import (
  first_order_only,
  match_residuals,
  name_slot,
  poison_unless,
  read_rows,
  Stash,
  stash_cotangent,
)
from pallas_stash.varying import vary_alike, vary_over, varying_axes


def checkpoint(
  fun: Callable[..., Any],
  *,
  policy: Callable[..., bool] | None = None,
  axis_name: Any = None,
  implementation: Implementation | None = None,
) -> Callable[..., Any]:
  """Makes `fun` keep its row-shaped residuals in a stash.

  Call `f = checkpoint(fun, policy=policy)` as `out, stash = f(stash, ragged, *args)`. `out` and the
  gradients are those of `jax.checkpoint(fun, policy=policy)(*args)`; of what that would save, every
  value with one row for each of the ragged rows is compacted into the stash, and expanded again in
  the backward pass. If the rows do not fit, nothing is stored and the backward pass recomputes
  them. Under a `jax.checkpoint` around the layer, let its policy save `SLOT_NAME`.

  Stashed are the residuals of a floating-point dtype and two or more axes whose first is
  `ragged.total_rows`, except arguments of `fun` themselves. They come back bit for bit, with zero
  in padding: a function whose result or gradient depends on what padding holds is not for a stash.

  Differentiable once, in reverse mode. Undifferentiated, `fun` just runs, and the stash passes
  through untouched.

  Args:
    fun: any function of pytrees of arrays, to pytrees of arrays. It must not close over traced
      values. The leaves of its arguments may be of any dtype, or None.
    policy: a `jax.checkpoint` policy: which values to save. None saves all that autodiff keeps.
    axis_name: mesh axis or axes of the collectives in `fun`. Their devices must agree on whether to
      recompute, so they then store rows only where those of all of them fit.
    implementation: as for `dynamic_update_slice`.

  Returns:
    `f`. `f.residuals(ragged, *args)` gives what `Stash.empty` needs; its arguments may be
    `jax.ShapeDtypeStruct`s.

  Raises:
    ValueError: when `f` is called, for a function that closes over traced values, or a stash that
      was not made for these residuals; here, for an unknown `implementation`.
  """
  kernels.check_implementation(implementation)
  saving = fun if policy is None else jax.checkpoint(fun, policy=policy)

  def row_residuals(ragged, *args, specs=None):
    _, vjp = jax.vjp(saving, *args)
    return split_residuals(vjp, ragged, args, specs)[0]

  @jax.custom_vjp
  def stashed(stash, ragged, *args):
    return fun(*args), batch_alike(stash, (ragged, args))

  def forward(stash, ragged, *args):
    out, vjp = jax.vjp(saving, *args)
    rows, rebuild = split_residuals(vjp, ragged, args, stash.residuals)
    stash = batch_alike(stash, (ragged, args))
    stash, slot = stash.push(rows, ragged, axis_name=axis_name, implementation=implementation)
    return (out, stash), (rebuild, name_slot(slot), ragged, args)

  def backward(saved, cotangents):
    rebuild, slot, ragged, args = saved
    d_out, d_stash = cotangents
    specs = d_stash.residuals
    operands = (d_stash.buffers, slot, ragged, args)

    def restore(buffers, slot, ragged, args):
      del args
      return read_rows(specs, buffers, slot, ragged, slot.is_stored(), implementation)

    def recompute(buffers, slot, ragged, args):
      del buffers, slot
      return vary_over(row_residuals(ragged, *args, specs=specs), varying_axes(operands))

    rows = lax.cond(slot.is_stored()[0], restore, recompute, *operands)
    d_out = poison_unless(d_stash.canary[0] == 1, first_order_only(d_out))
    return stash_cotangent(d_stash, d_stash.canary), None, *rebuild(rows, args)(d_out)

  stashed.defvjp(forward, backward)

  @functools.wraps(fun)
  def f(stash, ragged, *args):
    if not isinstance(stash, Stash):
      raise ValueError(f"The first argument, {stash!r}, must be a Stash.")
    check_ragged(ragged)
    refuse_closed_over_tracers(fun, args)
    out, stash = stashed(*vary_alike(stash, ragged, *args))
    return watch_results(out, ragged, name_slot), stash

  def residuals(ragged, *args):
    """Returns a `jax.ShapeDtypeStruct(row_shape, dtype)` for each residual to stash."""
    check_ragged(ragged)
    trace = lambda ragged, *args: row_residuals(*vary_alike(ragged, *args))
    rows = jax.eval_shape(trace, ragged, *args)
    return [
      jax.ShapeDtypeStruct(row.shape[1:], row.dtype, manual_axis_type=row.manual_axis_type)
      for row in rows
    ]

  f.residuals = residuals
  return f


def split_residuals(vjp, ragged, args, specs):
  """Takes the rows to stash out of a vjp function.

  Args:
    vjp: the second result of `jax.vjp`, a pytree whose leaves are the residuals.
    ragged: where the rows are.
    args: the arguments that it was taken at.
    specs: the residuals of the stash, whose order the rows are to have; None for any order.

  Returns:
    The leaves to stash, a tuple, and a function of such a tuple and of `args` that returns the vjp
    function again, itself a pytree of the leaves that are neither.
  """
  leaves, treedef = jax.tree.flatten(vjp)
  arguments = jax.tree.leaves(args)
  rows, kept, sources = [], [], []
  for leaf in leaves:
    # By identity: an argument may have the shape of a residual.
    is_argument = [leaf is argument for argument in arguments]
    if any(is_argument):
      sources.append(("argument", is_argument.index(True)))
    elif is_row_shaped(leaf, ragged.total_rows):
      sources.append(("row", len(rows)))
      rows.append(leaf)
    else:
      sources.append(("kept", len(kept)))
      kept.append(leaf)
  if not rows:
    shapes = sorted({f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in kept})
    raise ValueError(
      f"No residual has ragged.total_rows={ragged.total_rows} rows, at least two axes and a"
      f" floating-point dtype. Residuals beside the arguments: {', '.join(shapes) or 'none'}."
    )
  order = list(range(len(rows)))
  if specs is not None:
    order = match_residuals(specs, [(row.shape[1:], row.dtype) for row in rows])

  def join(kept, rows, args):
    found = {"argument": jax.tree.leaves(args), "row": [rows[i] for i in order], "kept": kept}
    return jax.tree.unflatten(treedef, [found[source][index] for source, index in sources])

  rows = tuple(rows[order.index(i)] for i in range(len(rows)))
  return rows, jax.tree_util.Partial(join, kept)


def is_row_shaped(leaf, total_rows):
  is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
  return is_floating and leaf.ndim >= 2 and leaf.shape[0] == total_rows


def check_ragged(ragged):
  if not isinstance(ragged, RaggedRows):
    raise ValueError(f"The argument before those of the function, {ragged!r}, must be RaggedRows.")


def refuse_closed_over_tracers(fun, args):
  """Raises unless everything traced that `fun` uses comes in through its arguments.

  The backward pass runs `fun` again, where the values that it closed over no longer exist.
  """
  traced = [c for c in jax.make_jaxpr(fun)(*args).consts if isinstance(c, jax.core.Tracer)]
  if traced:
    raise ValueError(
      f"{getattr(fun, '__name__', fun)} closes over traced values, "
      f"{', '.join(str(jax.typeof(c)) for c in traced)}; they must be passed as arguments."
    )
