"""Runs a tick table on one rank: pipeline parallelism in plain JAX, as one scan over the ticks.

All ranks run the same program. At each tick a rank looks up whether to run a forward pass, and
which backward pass, of which of its chunks and which microbatch; behind it the ranks exchange what
they made. What waits to be used is in buffers whose places the table has numbered.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_stash.pipeline import route_name, Table
from pallas_stash.pipeline.ticks import KINDS


class Model(NamedTuple):
  """What the ranks compute.

  Attributes:
    forward: `(state, params, x) -> (y, state, saved)`, of a chunk with these parameters; `y` has
      the shape of `x`, and `saved` always the same shapes.
    backward: `(state, saved, d_y, params, x) -> (state, (d_params, d_x))`.
    early, late: the same, of the two halves of it; where a half has no gradient is None. That of
      `x` is early.
    loss: `(head, y, target) -> float32[]`, of a microbatch of the last stage.
    observe: what to record of the state behind each tick: `state -> ` a pytree.
  """

  forward: Callable[..., Any]
  backward: Callable[..., Any]
  early: Callable[..., Any]
  late: Callable[..., Any]
  loss: Callable[..., jax.Array]
  observe: Callable[[Any], Any]


class Result(NamedTuple):
  """What a rank has in the end.

  Attributes:
    loss: float32[], of all microbatches, the same on all ranks.
    d_params: of the rank's own parameters.
    d_head: the same on all ranks.
    d_inputs: [microbatches, ...], the same on all ranks.
    state: behind the last pass.
    observed: what was observed, each with an axis of ticks in front.
  """

  loss: jax.Array
  d_params: Any
  d_head: Any
  d_inputs: jax.Array
  state: Any
  observed: Any


class _Carry(NamedTuple):
  """What goes from tick to tick: the buffers of the table, and what adds up."""

  state: Any
  x: jax.Array
  saved: Any
  d_y: jax.Array
  loss: jax.Array
  d_params: Any
  d_head: Any
  d_inputs: jax.Array


def run(
  model: Model,
  table: Table,
  axis_name: str,
  params: Any,
  head: Any,
  inputs: Any,
  targets: Any,
  state: Any,
) -> Result:
  """Runs a schedule on one rank. Call it inside a `shard_map` over `axis_name`.

  Args:
    model: what to compute.
    table: what to do at each tick.
    axis_name: the mesh axis of the ranks.
    params: of this rank, a pytree of arrays [chunks, ...].
    head: of the last stage, on every rank.
    inputs: [microbatches, ...], of the first stage.
    targets: a pytree of arrays [microbatches, ...].
    state: any pytree, such as a stash.
  """
  rank, ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
  # The ranks differ in all that they hold.
  params, head, inputs, targets, state = _vary((params, head, inputs, targets, state), axis_name)
  x, target = _at(inputs, 0), _at(targets, 0)
  _, _, saved = jax.eval_shape(model.forward, state, _at(params, 0), x)
  loss_and_gradients = jax.value_and_grad(model.loss, (0, 1))
  of_loss = jax.eval_shape(loss_and_gradients, head, x, target)

  def run_forward(row, carry):
    number = row["f_microbatch"]
    x = _input(table, row["f_x"], number, inputs, carry.x)
    y, state, saved = model.forward(carry.state, _at(params, row["f_chunk"]), x)
    saved = _put(carry.saved, row["f_saved"], saved)
    is_last = row[route_name("d_loss", 0)] != table.places["dy"]
    none = lambda *operands: _zeros(of_loss)
    loss, (d_head, d_y) = lax.cond(is_last, loss_and_gradients, none, head, y, _at(targets, number))
    d_head = jax.tree.map(jnp.add, carry.d_head, d_head)
    return carry._replace(state=state, saved=saved, loss=carry.loss + loss, d_head=d_head), y, d_y

  def run_backward(kind, row, carry):
    chunk, number = row["b_chunk"], row["b_microbatch"]
    x = _input(table, row["b_x"], number, inputs, carry.x)
    saved, d_y = _at(carry.saved, row["b_saved"]), _at(carry.d_y, row["b_dy"])
    backward = {"B": model.backward, "I": model.early, "W": model.late}[kind]
    state, (d_params, d_x) = backward(carry.state, saved, d_y, _at(params, chunk), x)
    add = functools.partial(_add_at, chunk)
    d_params = jax.tree.map(add, carry.d_params, d_params, is_leaf=lambda leaf: leaf is None)
    carry = carry._replace(state=state, d_params=d_params)
    if kind != "W":
      is_first = row["b_x"] == table.places["x"]
      at = jnp.where(is_first, number, len(inputs))
      carry = carry._replace(d_inputs=_put(carry.d_inputs, at, d_x))
    return carry, d_x if kind != "W" else jnp.zeros_like(x)

  # Those that the schedule has: each is compiled.
  kinds = np.unique(table.columns["b"])
  backward = [
    functools.partial(run_backward, KINDS[kind])
    if KINDS[kind]
    else lambda row, carry: (carry, jnp.zeros_like(x))
    for kind in kinds
  ]

  def tick(carry, row):
    row = {name: column[rank] for name, column in row.items()}
    nothing = lambda row, carry: (carry, jnp.zeros_like(x), jnp.zeros_like(x))
    carry, y, d_loss = lax.cond(row["f"] == 1, run_forward, nothing, row, carry)
    carry, d_x = lax.switch(jnp.searchsorted(kinds, row["b"]), backward, row, carry)
    made = {"y": y, "dx": d_x, "d_loss": d_loss}
    for what, shift in table.routes:
      around = [(i, (i + shift) % ranks) for i in range(ranks)]
      arrived = lax.ppermute(made[what], axis_name, around) if shift else made[what]
      buffer = "x" if what == "y" else "d_y"
      place = row[route_name(what, shift)]
      carry = carry._replace(**{buffer: _put(getattr(carry, buffer), place, arrived)})
    return carry, model.observe(carry.state)

  carry = _Carry(
    state=state,
    x=_buffer(table.places["x"] + 1, x),  # The last place is for what nobody reads.
    saved=_buffer(table.places["saved"], saved),
    d_y=_buffer(table.places["dy"] + 1, x),
    loss=_zeros(of_loss[0]),
    d_params=_zeros(params),
    d_head=_zeros(head),
    d_inputs=_buffer(len(inputs) + 1, x),
  )
  rows = {name: jnp.asarray(column) for name, column in table.columns.items()}
  carry, observed = lax.scan(tick, carry, rows)
  on_all = lambda tree: lax.psum(tree, axis_name)  # One rank has it, the others have zeros.
  return Result(
    loss=on_all(carry.loss),
    d_params=carry.d_params,
    d_head=on_all(carry.d_head),
    d_inputs=on_all(carry.d_inputs[: len(inputs)]),
    state=carry.state,
    observed=observed,
  )


def _input(table, place, number, inputs, buffer):
  """Returns what a stage is given: the first one of the model's inputs."""
  return jnp.where(place == table.places["x"], _at(inputs, number), _at(buffer, place))


def _at(tree, index):
  pick = lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False)
  return jax.tree.map(pick, tree)


def _add_at(index, array, one):
  """Returns `array` with `one` added at an index of its first axis; None is nothing."""
  return array if one is None else _put(array, index, _at(array, index) + one)


def _put(tree, index, new):
  update = lambda array, one: lax.dynamic_update_index_in_dim(array, one, index, 0)
  return jax.tree.map(update, tree, new)


def _buffer(places, shapes):
  """Returns zeros for `places` values of these shapes."""
  stacked = lambda leaf: jnp.broadcast_to(leaf, (places, *leaf.shape))
  return jax.tree.map(stacked, _zeros(shapes))


def _zeros(shapes):
  """Returns zeros, each of a shape, that vary over the mesh axes over which that does."""

  def zeros(leaf):
    axes = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    varying = axes.manual_axis_type.varying if axes.manual_axis_type else ()
    zeros = jnp.zeros(leaf.shape, leaf.dtype)
    return lax.pcast(zeros, tuple(sorted(varying)), to="varying") if varying else zeros

  return jax.tree.map(zeros, shapes)


def _vary(tree, axis_name):
  """Returns `tree`, each leaf of it varying over the axis, as `shard_map(check_vma=True)` asks."""

  def vary(leaf):
    axes = jax.typeof(leaf).manual_axis_type
    is_varying = axes and axis_name in axes.varying
    return leaf if is_varying else lax.pcast(leaf, axis_name, to="varying")

  return jax.tree.map(vary, tree)
