"""The stash: shared row buffers, threaded through a model like a random key.

Forward, a `Stash` is a value that each layer takes and returns with rows added. Backward, its
cotangent is its contents: `seal` hands over the filled buffers, and each layer reads its rows from
the cotangent that it is given and passes that on unchanged.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash import arguments, dtypes, kernels, storage, tiers
from pallas_stash.allocators import Allocator, Bump, Pages, Slot
from pallas_stash.handover import first_order_only
from pallas_stash.host_tier import HostTier
from pallas_stash.kernels import Implementation, Padding
from pallas_stash.kernels.tiling import round_up, row_alignment
from pallas_stash.pushed_rows import push_some, read_rows
from pallas_stash.ragged import RaggedRows
from pallas_stash.stats import Counters, StashStats, TierStats
from pallas_stash.varying import refuse_sharded, vary_alike, vary_over, varying_axes

PAGE_MULTIPLE = 32  # The rows of a tile of any dtype.

# What the cotangent of a stash asks the backward rules for. "early" and "late" are the halves of a
# backward pass, which `split_passes` tells apart; "again" is all of it, behind "early".
Part = Literal["all", "early", "late", "again"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, repr=False)
class Stash:
  """Buffers for the rows of residuals, one buffer a residual, with one row allocator for all.

  Make one with `Stash.empty`. Every leaf has a leading axis with one entry, or one block of rows,
  for each shard, so `PartitionSpec(mesh_axes)` shards the whole pytree.

  Attributes:
    residuals: static tuple of `jax.ShapeDtypeStruct(row_shape, dtype)`, one for each buffer.
    buffers: one array [shards * rows, width] a residual: rows flattened, their width rounded up to
      128. Rows that are not in use hold undefined values.
    allocator: which rows a push gets.
    counters: what `stats` reports; None in a cotangent.
    canary: float32[shards]. Forward it is 0, or NaN once the stash was misused; backward it is
      the count of pushes that `pallas_stash.handover` hands over.
    host: rows in host memory; None without.
    part: static, of the backward pass that the rules run.
  """

  residuals: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(metadata={"static": True})
  buffers: tuple[jax.Array, ...]
  allocator: Allocator
  counters: Counters | None
  canary: jax.Array
  host: HostTier | None = None
  part: Part = dataclasses.field(default="all", metadata={"static": True})

  def __repr__(self):
    # Of shapes alone: to print values would fetch the buffers, and transformations leave no values.
    specs = ", ".join(map(arguments.describe, self.residuals))
    buffers = arguments.describe(self.buffers)
    if self.host is not None:
      buffers += f", host={arguments.describe(self.host.buffers)}"
    if self.page_rows is None:
      return f"Stash({specs}; buffers={buffers}, top={arguments.describe(self.top)})"
    holder = arguments.describe(self.allocator.holder)
    return f"Stash({specs}; buffers={buffers}, page_rows={self.page_rows}, holder={holder})"

  @staticmethod
  def empty(
    capacity_rows: int,
    residuals: Sequence[jax.ShapeDtypeStruct],
    num_shards: int = 1,
    *,
    page_rows: int | None = None,
    host_capacity_rows: int = 0,
    staging_rows: int = 0,
  ) -> "Stash":
    """Returns a stash that holds nothing.

    With host memory, each push leaves its first `staging_rows` rows in a stage in HBM, from which
    they go to host memory while the next layer computes, and come back so in the backward pass. Its
    other rows go to HBM as far as `capacity_rows` reaches, and those behind it to host memory while
    all else waits: see `TierStats.spilled_rows`. Only where they have no room either is a layer
    recomputed. Host memory in a stash that is not sealed is an error of jax's: that the type of a
    cotangent is to be `<host>`.

    Args:
      capacity_rows: static int, rows of each shard, rounded up to a tile, 8 rows, or 32 if any
        residual has one-byte elements; or to a page. Zero is allowed: every layer is then
        recomputed.
      residuals: the shape of one row and the dtype of each residual, as `f.residuals` gives them.
        A floating-point dtype that has NaN: an integer has no cotangent to come back in, and of
        float4 and float6 no value could say that rows were not stored.
      num_shards: 1 inside `shard_map`; outside, the shards of the global arrays, to be sharded by
        `PartitionSpec(mesh_axes)`.
      page_rows: static int, a multiple of 32: each push takes whole pages of so many rows, and
        frees them in any order (see `sizing.page_rows`). None: the rows of a push are contiguous,
        the last ones are freed first, and a matmul can read them where they are.
      host_capacity_rows: static int, rows of each shard in pinned host memory, beside those in HBM;
        0 for none. A matmul then reads no rows where they are. Leaves of the stash that are of host
        memory, `stash.host.buffers`, keep `memory_kind="pinned_host"` in any `NamedSharding`.
      staging_rows: static int, the most rows of a push that go to host memory beside the compute of
        the next layer; so many more rows of HBM are taken. 0 for none: then only what has no room
        in HBM goes there.

    Raises:
      ValueError: for a negative capacity, 2**31 rows of host memory, no residuals, another dtype,
        no shards, pages of another size or beside host memory, `staging_rows` without host memory,
        or arguments that are no such things.
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
    host_capacity_rows = _check_int("host_capacity_rows", host_capacity_rows, 0)
    staging_rows = _check_int("staging_rows", staging_rows, 0)
    if staging_rows and not host_capacity_rows:
      raise ValueError(f"{staging_rows=} must be 0 without host memory, host_capacity_rows=0.")
    if host_capacity_rows and page_rows is not None:
      # Its rows are freed last in, first out, and heads come back in that order.
      raise ValueError(f"{page_rows=} must be None with {host_capacity_rows=}: it has no pages.")
    alignment = max(row_alignment(spec.dtype.itemsize) for spec in specs)
    if page_rows is None:
      allocator = Bump.empty(round_up(capacity_rows, alignment), alignment, num_shards)
    elif (page_rows := _check_int("page_rows", page_rows, PAGE_MULTIPLE)) % PAGE_MULTIPLE:
      raise ValueError(f"{page_rows=} must be a multiple of {PAGE_MULTIPLE}.")
    else:
      capacity = round_up(capacity_rows, page_rows)
      allocator = Pages.empty(capacity, alignment, num_shards, page_rows)
    buffers = storage.empty_buffers(specs, allocator.capacity * num_shards)
    buffers = storage.poison_free_rows(buffers, allocator)
    canary = jnp.zeros((num_shards,), jnp.float32)
    host = None
    if host_capacity_rows:
      sizes = host_capacity_rows, staging_rows, alignment, num_shards
      host = HostTier.empty(specs, *sizes)
    stash = Stash(specs, buffers, allocator, Counters.zero(num_shards), canary, host)
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
    kernels.check_implementation(implementation)
    tiers.check_implementation(self.host, implementation)
    check_ragged(ragged)
    values = arguments.as_list("values", values, "arrays, one a residual")
    values = [arguments.as_array(f"values[{i}]", value) for i, value in enumerate(values)]
    return push_some(self, values, ragged, (), axis_name, implementation)

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
    tiers.check_implementation(self.host, implementation)
    arguments.check_local(self)
    check_slot(slot)
    check_ragged(ragged)
    refuse_sharded(stash=self, slot=slot, ragged=ragged)
    self = first_order_only(self)
    is_readable = self.allocator.holds(tiers.device_part(slot)) & (self.canary == 0)
    if self.host is not None:
      is_readable &= self.host.holds(slot)
    return read_rows(self, slot, ragged, is_readable, implementation, padding)

  def free(self, slot: Slot) -> "Stash":
    """Frees the rows of a slot: with pages any one's, else those of the one that was pushed last.

    Of a slot that was not stored it frees nothing. One that is freed already, or without pages is
    not the last, is known only at run time: it frees nothing and breaks the stash for good, so that
    every later `restore` and every gradient is NaN. Not for use between layers that are
    differentiated: gradients of the layers before it are NaN, as others may reuse their rows.
    """
    arguments.check_local(self)
    check_slot(slot)
    self, slot = vary_alike(self, slot)
    stash, is_right = self.release(slot)
    canary = jnp.where(is_right, lax.stop_gradient(self.canary), jnp.nan)
    return dataclasses.replace(stash, canary=canary)

  def pop(self, slot: Slot) -> "Stash":
    """`free`, as one says of a stash without pages."""
    return self.free(slot)

  def release(self, slot: Slot) -> tuple["Stash", jax.Array]:
    """Returns the stash, or the cotangent, without the rows of a slot, and bool[1], as `free` does.

    The backward pass of a stash without pages frees nothing, nor does the early half of any.
    """
    if self.part == "early":
      return self, self.allocator.holds(slot) | ~slot.is_stored()
    host = self.host
    if host is None:
      allocator, is_right = self.allocator.free(slot)
    else:
      allocator, host, is_right = tiers.free_both(self.allocator, host, slot)
    buffers = self.buffers
    if allocator is not self.allocator:
      buffers = storage.poison_free_rows(buffers, allocator)
    return dataclasses.replace(self, buffers=buffers, allocator=allocator, host=host), is_right

  def set_aside(self, slot: Slot) -> "Stash":
    """Returns the stash, or the cotangent, with the pages of a slot set aside, or back again."""
    return dataclasses.replace(self, allocator=self.allocator.set_aside(slot))

  def reset(self) -> "Stash":
    """Frees all rows and keeps what `stats` counts: one stash for many microbatches.

    For use behind the backward pass. Between layers that are differentiated it has the effect of
    `pop`: gradients of the layers before it are NaN.
    """
    allocator = self.allocator.reset()
    canary = lax.stop_gradient(self.canary)
    buffers = storage.poison_free_rows(self.buffers, allocator)
    host = None if self.host is None else self.host.reset()
    fields = {"buffers": buffers, "allocator": allocator, "canary": canary, "host": host}
    return dataclasses.replace(self, **fields)

  def stats(self) -> StashStats | TierStats:
    """Returns the rows in use and what was pushed so far. Usable under `jit`."""
    stats = self.allocator.rows_in_use(), *self.counters[:4]
    if self.host is None:
      return StashStats(*stats)
    return TierStats(*stats, self.host.top, *self.host.counters[:3])

  @property
  def top(self) -> jax.Array:
    """The first row that is free, int32[shards]: a push starts in its tile. Not with pages."""
    return self.allocator.top

  @property
  def page_rows(self) -> int | None:
    """Rows of a page; None without pages."""
    return self.allocator.page_rows

  @property
  def rows_per_shard(self) -> int:
    """Rows that one shard holds in HBM: the capacity, rounded up to a tile or to a page."""
    return self.allocator.capacity

  @property
  def host_rows_per_shard(self) -> int:
    """Rows that one shard holds in host memory: the capacity, rounded up to a tile."""
    return 0 if self.host is None else self.host.capacity

  @property
  def alignment(self) -> int:
    """Rows of a tile: the multiple that every push is rounded up to."""
    return self.allocator.alignment

  def as_cotangent(self, canary: jax.Array) -> "Stash":
    """Returns the cotangent of a stash with these contents: integers have none."""
    allocator = self.allocator.as_cotangent()
    host = None if self.host is None else self.host.as_cotangent()
    fields = {"allocator": allocator, "counters": None, "canary": canary, "host": host}
    return dataclasses.replace(self, **fields)


def check_slot(slot):
  arguments.check_type("slot", slot, Slot, "a Slot, as `push` returned it")


def check_ragged(ragged):
  arguments.check_type("ragged", ragged, RaggedRows, "RaggedRows")


def _check_int(name, value, least):
  if (value := arguments.static_int(name, value)) < least:
    raise ValueError(f"{name}={value} must be at least {least}.")
  return value
