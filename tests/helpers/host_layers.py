"""A model of a few layers whose rows, in gaps and groups, are in HBM and in host memory."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_stash as ps
from pallas_stash.kernels import host
from tests.helpers.checks import OPTIMIZED
from tests.helpers.few_layers import SAVE

TOTAL_ROWS, TOKENS, WIDTH, HIDDEN = 256, 32, 16, 8
ALIGNMENT = 8
CAPACITY = 400  # Of each tier: more than all layers push.

# An empty group, no rows at all, one row, and more than half of the rows of all layers in one.
SIZES = np.array([[50, 30], [3, 0], [0, 0], [100, 61], [77, 1], [1, 40]], np.int32)
STARTS = np.array([[0, 50], [9, 100], [0, 0], [0, 128], [100, 0], [200, 7]], np.int32)
LAYERS = len(SIZES)
SPECS = [jax.ShapeDtypeStruct((HIDDEN,), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.float32)]


def experts(x, w_in, w_out, sizes, starts):
  """From tokens to tokens; in between, rows of which padding is zero."""
  row = jnp.arange(TOTAL_ROWS)[:, None]
  is_live = jnp.any((row >= starts) & (row < starts + sizes), axis=1)[:, None]
  mask = lambda rows: jnp.where(is_live, rows, 0)
  rows = mask(jnp.tile(x, (TOTAL_ROWS // TOKENS, 1)))
  gate = checkpoint_name(mask(rows @ w_in), "residual")
  up = checkpoint_name(mask(rows @ (w_in * 2)).reshape(TOTAL_ROWS, 2, 4), "residual")
  hidden = jnp.tanh(gate) * up.reshape(gate.shape)
  return mask(hidden @ w_out).reshape(-1, *x.shape).sum(0)


stashed = ps.checkpoint(experts, policy=SAVE("residual"))


@functools.cache
def arrays(shards=1):
  """Returns the weights, the tokens of all shards, and sizes and starts [layers, shards * 2]."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
  weights = tuple(
    jax.random.normal(key, (LAYERS, *shape)) / 6 for key, shape in zip(keys, shapes, strict=False)
  )
  of_shards = lambda table: np.concatenate([table, table[::-1]][:shards], axis=1)
  x = jax.random.normal(keys[3], (shards * TOKENS, WIDTH))
  return weights, x, of_shards(SIZES), of_shards(STARTS)


def with_little_room(stash: ps.Stash, room, host_room) -> ps.Stash:
  """Returns a stash with NaN everywhere, of which only so many rows are free in each tier.

  A push looks at nothing but what is free, so one program does for all capacities.
  """
  tier = stash.host
  taken = [jnp.full_like(stash.top, CAPACITY - rows) for rows in (room, host_room)]
  nan = lambda array: jnp.full_like(array, jnp.nan)
  fill = lambda array: host.fill(array, jnp.int32(0), array.shape[0], jnp.nan)
  tier_fields = {
    "buffers": tuple(map(fill, tier.buffers)),
    "stage": tuple(map(nan, tier.stage)),
    "staged_row": taken[1],
    "top": taken[1],
  }
  stash.host = tier.__class__(**{**vars(tier), **tier_fields})
  stash.buffers = tuple(map(nan, stash.buffers))
  stash.allocator = stash.allocator.__class__(**{**vars(stash.allocator), "top": taken[0]})
  return stash


def run_layers(block, weights, x, sizes, starts, stash):
  """Returns what comes of `x`, and the stash."""

  @functools.partial(jax.checkpoint, policy=SAVE(ps.SLOT_NAME), prevent_cse=False)
  def layer(x, stash, weights, sizes, starts):
    y, stash = block(stash, jnp.sin(x @ weights[0]), *weights[1:], sizes, starts)
    return x + y, stash

  body = lambda carry, xs: (layer(*carry, *xs), None)
  return lax.scan(body, (x, stash), (weights, sizes, starts))[0]


def saving(stash, *args):
  return jax.checkpoint(experts, policy=SAVE("residual"))(*args), stash


def stashing(stash, *args):
  return stashed(stash, ps.RaggedRows(args[-2], TOTAL_ROWS, args[-1]), *args)


def loss(weights, x, sizes, starts, room=None, seals=1, **capacities):
  """Returns the loss, and the statistics; without capacities the residuals are saved."""
  stash, block = None, saving
  if capacities:
    ragged = ps.RaggedRows(sizes[0], TOTAL_ROWS, starts[0])
    args = x, *(w[0] for w in weights[1:]), sizes[0], starts[0]
    residuals = stashed.residuals(ragged, *args)  # They vary over the axes that `x` does.
    stash, block = ps.Stash.empty(residuals=residuals, **capacities), stashing
    if room is not None:
      stash = with_little_room(stash, *room)
  x, stash = run_layers(block, weights, x, sizes, starts, stash)
  stats = None if stash is None else stash.stats()
  for _ in range(seals if stash is not None else 0):
    x = ps.seal(x, stash)
  return jnp.sum(x**2), stats


@functools.partial(
  jax.jit,
  static_argnames=("seals", "capacity_rows", "host_capacity_rows", "staging_rows"),
  compiler_options=OPTIMIZED,
)
def gradients(*args, **options):
  """Returns ((loss, stats), gradients); arguments of `loss`."""
  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*args, **options)


def expected_stats(room, host_room, staging_rows):
  """Returns by a plain model (HBM, its peak, host, its peak, spilled, overflowed) of the layers."""
  used, peak, spilled, overflowed = [0, 0], [0, 0], [], 0
  for rows in SIZES.sum(1).tolist():
    free = room - used[0], host_room - used[1]
    if rows > sum(free):
      overflowed += 1
      continue
    head = min(rows, staging_rows, free[1])
    device = min(rows - head, free[0])
    for tier, taken in enumerate((device, rows - device)):
      used[tier] += -(-taken // ALIGNMENT) * ALIGNMENT
      peak[tier] = max(peak[tier], used[tier])
    spilled.append(rows - head - device)
  return used[0], peak[0], used[1], peak[1], sum(spilled), sum(map(bool, spilled)), overflowed


def sharded_loss(structure, check_vma, **capacities):
  """Returns `loss(weights, x, sizes, starts)` on two devices, in one of two structures.

  Args:
    structure: "inside", all layers in one `shard_map`, or "outside", a `shard_map` in each.
    check_vma: of that.
    **capacities: of the stash; without, residuals are saved.
  """
  mesh, sharded = Mesh(np.array(jax.devices()[:2]), ("x",)), P("x")
  options = {"mesh": mesh, "check_vma": check_vma}

  def inside(*args):
    return lax.psum(loss(*args, **capacities)[0], "x")

  if structure == "inside":
    specs = P(), sharded, P(None, "x"), P(None, "x")
    return jax.shard_map(inside, in_specs=specs, out_specs=P(), **options)

  def place(array):
    kind = "pinned_host" if host.is_on_host(array) else "device"
    return lax.with_sharding_constraint(array, NamedSharding(mesh, sharded, memory_kind=kind))

  def outside(weights, x, sizes, starts):
    stash, block = None, saving
    if capacities:
      stash = jax.tree.map(place, ps.Stash.empty(residuals=SPECS, num_shards=2, **capacities))
      block = stashing
    specs = sharded, sharded, P(), P(), sharded, sharded
    block = jax.shard_map(block, in_specs=specs, out_specs=sharded, **options)
    x, stash = run_layers(block, weights, x, sizes, starts, stash)
    return jnp.sum((x if stash is None else ps.seal(x, stash)) ** 2)

  return outside


def values_of(seed):
  """Returns an array [total_rows, *row_shape] of each residual."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(TOTAL_ROWS, *spec.shape)).astype(spec.dtype) for spec in SPECS]


def ragged_of(layer):
  """Returns where the rows of a layer are."""
  return ps.RaggedRows(*map(jnp.asarray, (SIZES[layer],)), TOTAL_ROWS, STARTS[layer])
