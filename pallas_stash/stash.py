"""The stash: shared row buffers, threaded through a model like a random key.

Forward, a `Stash` is a value that each layer takes and returns with rows added. Backward, its
cotangent is its contents: `seal` hands over the filled buffers, and each layer reads its rows from
the cotangent that it is given and passes that on unchanged.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import arguments, dtypes, kernels
from pallas_stash.checks import debugging
from pallas_stash.checks.misplaced_rows import report_pushed
from pallas_stash.handover import first_order_only, name_slot, next_number
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.kernels.tiling import LANES, round_up, row_alignment
from pallas_stash.ragged import RaggedRows
from pallas_stash.varying import empty, refuse_sharded, vary_alike, vary_over, varying_axes

_MAX_INT32 = jnp.iinfo(jnp.int32).max


class Slot(NamedTuple):
  """Where the rows of one push are: what the forward pass keeps instead of them.

  Attributes:
    start: int32[shards], first row in the stash; -1 where the rows were not stored.
    rows: int32[shards], rows pushed, stored or not; 0 for groups that were invalid.
    checksum: uint32[shards, residuals], of the rows that were pushed in the mode of
      `pallas_stash.debug`; None without it.
    number: int32[shards], of the push among those into its stash, below 2**22 and then from 0
      again; the backward pass requires it.
  """

  start: jax.Array
  rows: jax.Array
  checksum: jax.Array | None = None
  number: jax.Array | None = None

  def is_stored(self) -> jax.Array:
    """Returns bool[shards]."""
    return self.start >= 0


class StashStats(NamedTuple):
  """What happened to a stash, each int32[shards].

  Attributes:
    rows_in_use: rows that hold values now, alignment included.
    peak_rows: most rows that were ever in use.
    overflowed_pushes: pushes that did not fit and stored nothing.
    invalid_pushes: pushes whose groups overlapped or left the buffer, and stored nothing.
    sufficient_rows: the least capacity at which no push would have overflowed. It is `peak_rows` if
      none did.
  """

  rows_in_use: jax.Array
  peak_rows: jax.Array
  overflowed_pushes: jax.Array
  invalid_pushes: jax.Array
  sufficient_rows: jax.Array


class _Counters(NamedTuple):
  """What `Stash.stats` reports, each int32[shards].

  Attributes:
    peak_rows, overflowed_pushes, invalid_pushes, sufficient_rows: as in `StashStats`.
    wanted_rows: rows that would be in use had every push been stored.
    pushes: of every kind, below 2**22 and then from 0 again; the number of the next one.
  """

  peak_rows: jax.Array
  overflowed_pushes: jax.Array
  invalid_pushes: jax.Array
  sufficient_rows: jax.Array
  wanted_rows: jax.Array
  pushes: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class Stash:
  """Buffers for the rows of residuals, one buffer a residual, with one row allocator for all.

  Make one with `Stash.empty`. Every leaf has a leading axis with one entry, or one block of rows,
  for each shard, so `PartitionSpec(mesh_axes)` shards the whole pytree.

  Attributes:
    residuals: static tuple of `jax.ShapeDtypeStruct(row_shape, dtype)`, one for each buffer.
    buffers: one array [shards * rows, width] a residual: rows flattened, their width rounded up to
      128. Rows that are not in use hold undefined values.
    top: int32[shards], first free row. A push starts there, always on a tile boundary.
    counters: what `stats` reports.
    canary: float32[shards]. Forward it is 0, or NaN once the stash was misused; backward it is
      the count of pushes that `pallas_stash.handover` hands over.
  """

  def __init__(self, residuals, buffers, top, counters, canary):
    self.residuals = residuals
    self.buffers = buffers
    self.top = top
    self.counters = counters
    self.canary = canary

  def tree_flatten_with_keys(self):
    names = ("buffers", "top", "counters", "canary")
    children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
    return children, self.residuals

  @classmethod
  def tree_unflatten(cls, residuals, children):
    return cls(residuals, *children)

  def __repr__(self):
    # Of shapes alone: to print values would fetch the buffers, and transformations leave no values.
    specs = ", ".join(map(arguments.describe, self.residuals))
    buffers, top = arguments.describe(self.buffers), arguments.describe(self.top)
    return f"Stash({specs}; buffers={buffers}, top={top})"

  @staticmethod
  def empty(
    capacity_rows: int, residuals: Sequence[jax.ShapeDtypeStruct], num_shards: int = 1
  ) -> "Stash":
    """Returns a stash that holds nothing.

    Args:
      capacity_rows: static int, rows of each shard, rounded up to a tile: 8 rows, or 32 if any
        residual has one-byte elements. Zero is allowed: every layer is then recomputed.
      residuals: the shape of one row and the dtype of each residual, as `f.residuals` gives them.
        A floating-point dtype that has NaN: an integer has no cotangent to come back in, and of
        float4 and float6 no value could say that rows were not stored.
      num_shards: 1 inside `shard_map`; outside, the shards of the global arrays, to be sharded by
        `PartitionSpec(mesh_axes)`.

    Raises:
      ValueError: for a negative capacity, no residuals, another dtype, no shards, or arguments that
        are no such things.
    """
    capacity_rows = _check_int("capacity_rows", capacity_rows, 0)
    num_shards = _check_int("num_shards", num_shards, 1)
    specs = arguments.row_specs(residuals)
    if not specs:
      raise ValueError(
        "residuals is empty: there is nothing to stash. Does the policy save anything that has"
        " one row for each of the ragged rows?"
      )
    for spec in specs:
      if not dtypes.is_of_stash(spec.dtype):
        raise ValueError(
          f"residual {spec} must have a floating-point dtype with NaN: the stash comes back as a"
          " cotangent, which other dtypes have none of, and NaN says that rows were not stored."
          " Bit-cast it, or keep it as an ordinary residual."
        )
    alignment = max(row_alignment(spec.dtype.itemsize) for spec in specs)
    rows = round_up(capacity_rows, alignment) * num_shards
    # Not zeros: no row is read before it is written, and a TPU would write them all every step.
    buffers = tuple(
      empty((rows, round_up(math.prod(s.shape), LANES)), dtypes.storage(s.dtype)) for s in specs
    )
    buffers = debugging.poison_rows_from(0, buffers)
    # An array for each leaf: one that is donated is donated once.
    zeros = lambda dtype=jnp.int32: jnp.zeros((num_shards,), dtype)
    counters = _Counters(*(zeros() for _ in _Counters._fields))
    stash = Stash(specs, buffers, zeros(), counters, zeros(jnp.float32))
    return vary_over(stash, varying_axes(residuals))

  def push(
    self,
    values: Sequence[jax.Array],
    ragged: RaggedRows,
    *,
    axis_name: Any = None,
    implementation: Implementation | None = None,
  ) -> tuple["Stash", Slot]:
    """Stores the ragged rows of `values`, or nothing if they do not fit.

    Not differentiable: for use in forward rules, or outside autodiff altogether.

    Args:
      values: one array [total_rows, *row_shape] a residual, matched to `residuals` by row shape and
        dtype, and by order among equals. What they hold in padding has no influence.
      ragged: where the rows are, with that `total_rows`.
      axis_name: mesh axis or axes; the rows are stored if they fit on every device along them.
      implementation: as for `dynamic_update_slice`.

    Returns:
      The stash with the rows, and the slot where they are. The buffers are updated in place where
      XLA may do so. Groups that overlap or leave the buffer store nothing.

    Raises:
      ValueError: for values that are not those of `residuals`, another `total_rows`, or a stash
        that has several shards here.
    """
    self._check_local()
    kernels.check_implementation(implementation)
    check_ragged(ragged)
    values = arguments.as_list("values", values, "arrays, one a residual")
    values = [arguments.as_array(f"values[{i}]", value) for i, value in enumerate(values)]
    refuse_sharded(stash=self, values=values, ragged=ragged)
    for value in values:
      if value.shape[:1] != (ragged.total_rows,):
        raise ValueError(f"{value.shape=} must start with {ragged.total_rows=}.")
    match_residuals(self.residuals, [(v.shape[1:], v.dtype) for v in values])
    # Here, where it is traced for each program: each says once what it sees.
    report_pushed(*vary_alike(list(values), ragged), name_slot)
    return _push(self, tuple(values), ragged, axis_name, implementation)

  def restore(
    self,
    slot: Slot,
    ragged: RaggedRows,
    *,
    padding: Padding = "zero",
    implementation: Implementation | None = None,
  ) -> tuple[jax.Array, ...]:
    """Returns the rows of a slot, each where `ragged` says, in worst-case buffers.

    Not differentiable, like `push`.

    Args:
      slot: as `push` returned it.
      ragged: as it was pushed with.
      padding, implementation: as for `dynamic_slice`.

    Returns:
      One array [total_rows, *row_shape] a residual, in the order of `residuals`. Padding is zero,
      or undefined. Everything is NaN if the slot was not stored, is no longer in use, or holds
      another number of rows than `ragged`.
    """
    kernels.check_padding(padding)
    self._check_local()
    check_slot(slot)
    check_ragged(ragged)
    refuse_sharded(stash=self, slot=slot, ragged=ragged)
    self = first_order_only(self)
    is_readable = self._is_in_use(slot)
    source = self.residuals, self.buffers, slot, ragged
    return read_rows(*source, is_readable, implementation, padding)

  def pop(self, slot: Slot) -> "Stash":
    """Frees the rows of the slot that was pushed last; of one that was not stored, nothing.

    Popping another slot is known only at run time: it frees nothing and breaks the stash for good,
    so that every later `restore` and every gradient is NaN. Not for use between layers that are
    differentiated: gradients of the layers before it are NaN, as others may reuse their rows.
    """
    self._check_local()
    check_slot(slot)
    self, slot = vary_alike(self, slot)
    rows_taken = round_up(slot.rows, self.alignment)
    is_last = slot.start + rows_taken == self.top
    is_right = is_last | ~slot.is_stored()
    top = jnp.where(is_last & slot.is_stored(), slot.start, self.top)
    canary = jnp.where(is_right, lax.stop_gradient(self.canary), jnp.nan)
    wanted = self.counters.wanted_rows - jnp.where(is_right, rows_taken, 0)
    counters = self.counters._replace(wanted_rows=wanted)
    buffers = debugging.poison_rows_from(top[0], self.buffers)
    return Stash(self.residuals, buffers, top, counters, canary)

  def reset(self) -> "Stash":
    """Frees all rows and keeps what `stats` counts: one stash for many microbatches.

    For use behind the backward pass. Between layers that are differentiated it has the effect of
    `pop`: gradients of the layers before it are NaN.
    """
    top, wanted = jnp.zeros_like(self.top), jnp.zeros_like(self.counters.wanted_rows)
    counters = self.counters._replace(wanted_rows=wanted)
    buffers = debugging.poison_rows_from(0, self.buffers)
    return Stash(self.residuals, buffers, top, counters, lax.stop_gradient(self.canary))

  def stats(self) -> StashStats:
    """Returns the rows in use and what was pushed so far. Usable under `jit`."""
    return StashStats(self.top, *self.counters[:4])

  @property
  def rows_per_shard(self) -> int:
    """Rows that one shard holds: the capacity, rounded up to a tile."""
    return self.buffers[0].shape[0] // self.top.shape[0]

  @property
  def alignment(self) -> int:
    """Rows of a tile: the multiple that every push is rounded up to."""
    return max(row_alignment(spec.dtype.itemsize) for spec in self.residuals)

  def as_cotangent(self, canary: jax.Array) -> "Stash":
    """Returns the cotangent of a stash with these contents: integers have none."""
    counters = _Counters(*[None] * len(_Counters._fields))
    return Stash(self.residuals, self.buffers, None, counters, canary)

  def _is_in_use(self, slot):
    in_use = slot.start + round_up(slot.rows, self.alignment) <= self.top
    return slot.is_stored() & in_use & (self.canary == 0)

  def _check_local(self):
    if self.top.shape != (1,):
      raise ValueError(
        f"The stash has {self.top.shape[0]} shards here and must have 1: a stash made with"
        " num_shards is used inside `shard_map`, with PartitionSpec(mesh_axes) for the whole of it."
      )


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _push(stash, values, ragged, axis_name, implementation):
  # Traced once for the layers of a program: to trace kernels takes long.
  order = match_residuals(stash.residuals, [(v.shape[1:], v.dtype) for v in values])
  stash, values = first_order_only((stash, values))
  stash, values, ragged = vary_alike(stash, values, ragged)
  checksum = None
  if debugging.is_debugging():
    # XLA may compute twice, and round differently, what is stored and what is summed.
    values = lax.optimization_barrier(values)
    checksum = debugging.checksums([values[order.index(i)] for i in range(len(order))], ragged)

  top = stash.top[0]
  is_valid = ragged.is_valid()
  rows = jnp.where(is_valid, ragged.num_rows(), 0)
  fits = rows <= stash.rows_per_shard - top
  is_stored = _all_along(axis_name, is_valid & fits)
  start = jnp.where(is_stored, top, -1)

  runs = ragged.compact_runs(top, stash.rows_per_shard)
  runs = runs._replace(sizes=jnp.where(is_stored, runs.sizes, 0))
  buffers = list(stash.buffers)
  for value, index in zip(values, order, strict=True):
    flat = value if value.ndim == 2 else value.reshape(ragged.total_rows, -1)
    stored = dtypes.bit_cast(flat, dtypes.storage(flat.dtype))
    buffers[index] = kernels.compact(stored, buffers[index], runs, implementation)

  rows_taken = round_up(rows, stash.alignment)
  top += jnp.where(is_stored, rows_taken, 0)
  counters, number = stash.counters, stash.counters.pushes
  # Pushes that overflow may add up to more rows than an int32 counts: it stays at its largest.
  wanted = counters.wanted_rows + jnp.minimum(rows_taken, _MAX_INT32 - counters.wanted_rows)
  counters = _Counters(
    peak_rows=jnp.maximum(counters.peak_rows, top),
    overflowed_pushes=counters.overflowed_pushes + (is_valid & ~is_stored).astype(jnp.int32),
    invalid_pushes=counters.invalid_pushes + (~is_valid).astype(jnp.int32),
    sufficient_rows=jnp.maximum(counters.sufficient_rows, wanted),
    wanted_rows=wanted,
    pushes=next_number(number),
  )
  stash = Stash(stash.residuals, tuple(buffers), top[None], counters, stash.canary)
  return stash, Slot(start[None], rows[None], checksum, number)


def read_rows(residuals, buffers, slot, ragged, is_readable, implementation, padding="zero"):
  """Returns the rows of a slot as `Stash.restore` does; NaN unless `is_readable`, bool[1]."""
  buffers, slot, ragged, is_readable = vary_alike(buffers, slot, ragged, is_readable)
  is_readable = (is_readable & (slot.rows == ragged.num_rows()))[0]
  runs = ragged.expand_runs(slot.start[0], buffers[0].shape[0])
  runs = runs._replace(sizes=jnp.where(is_readable, runs.sizes, 0))
  fill = None if padding == "zero" else ~is_readable

  blank_of = functools.cache(functools.partial(dtypes.blank_or_nan, is_readable))

  def read(spec, buffer):
    blank = dtypes.bit_cast(blank_of(spec.dtype), buffer.dtype)
    width = math.prod(spec.shape)
    rows = kernels.expand(buffer, runs, ragged.total_rows, width, blank, implementation, fill)
    return dtypes.bit_cast(rows, spec.dtype).reshape(ragged.total_rows, *spec.shape)

  values = tuple(map(read, residuals, buffers))
  if slot.checksum is None:
    return values
  return debugging.verify(values, ragged, slot.checksum, is_readable)


def match_residuals(specs, found) -> list[int]:
  """Returns which of `specs` each of `found`, pairs of row shape and dtype, is.

  Equal ones are taken in order.

  Raises:
    ValueError: unless each of `specs` is found exactly once.
  """
  free = list(range(len(specs)))
  order = []
  for shape, dtype in found:
    matches = [i for i in free if specs[i].shape == tuple(shape) and specs[i].dtype == dtype]
    if matches:
      order.append(matches[0])
      free.remove(matches[0])
  if free or len(order) != len(found):
    describe = lambda pairs: sorted(f"{jnp.dtype(dtype)}{list(shape)}" for shape, dtype in pairs)
    raise ValueError(
      f"The rows to store, {describe(found)}, must be those that the stash was made for,"
      f" {describe((s.shape, s.dtype) for s in specs)}."
    )
  return order


def check_slot(slot):
  arguments.check_type("slot", slot, Slot, "a Slot, as `push` returned it")


def check_ragged(ragged):
  arguments.check_type("ragged", ragged, RaggedRows, "RaggedRows")


def _all_along(axis_name, predicate):
  if axis_name is None:
    return predicate
  return lax.pmin(predicate.astype(jnp.int32), axis_name) == 1


def _check_int(name, value, least):
  value = arguments.static_int(name, value)
  if value < least:
    raise ValueError(f"{name}={value} must be at least {least}.")
  return value
