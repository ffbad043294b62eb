"""The reference model with its residuals saved, and with them in a stash, in both structures."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_stash as ps
from reference import model, moe
from tests.helpers.checks import FUSED, OPTIMIZED
from tests.helpers.stashes import with_rows_taken

SAVE = jax.checkpoint_policies.save_only_these_names
NAMES = ("mlpwi_0", "mlpwi_1", "mlpwo")
CONFIG = model.Config(vocab=64, width=32, hidden=16, num_experts=8, top_k=2, layers=3, num_heads=0)
BATCH, SEQ = 4, 12  # Of all devices together.


@functools.cache
def params_and_tokens(config):
  params = jax.jit(functools.partial(model.init, config))(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, config.vocab)
  return params, tokens


def expert_ffn(config):
  return functools.partial(moe.expert_ffn, grouped_matmul=config.grouped_matmul)


def saving_ffn(config):
  """Saves the residuals at worst-case size."""
  saving = jax.checkpoint(expert_ffn(config), policy=SAVE(*NAMES))
  return lambda state, group_sizes, *args: (saving(*args), state)


def stashing_ffn(config, **options):
  """Keeps the residuals in the stash."""
  f = ps.checkpoint(expert_ffn(config), policy=SAVE(*NAMES), **options)

  def ffn(stash, group_sizes, *args):
    return f(stash, ps.RaggedRows(group_sizes, args[1].shape[0]), *args)

  return ffn, f.residuals


def residuals_of(config, devices, residuals):
  """Returns the residuals of one device, from shapes alone."""
  args = moe.expert_ffn_shapes(config, BATCH * SEQ, config.num_experts // devices)
  return residuals(ps.RaggedRows(args[4], args[1].shape[0]), *args)


def loss_function(
  config, devices, structure, check_vma=True, capacity=None, seals=1, page_rows=None, **options
):
  """Returns `loss(params, tokens, room) -> (loss, (stats, group_sizes))` of the model.

  With an int32 for `room` all rows of the stash but so many are taken before the first layer. A
  push fits where `top + rows <= capacity`, and nothing else looks at either; so that is a stash of
  `room` rows, all at a higher place, and one program does for every capacity.

  Args:
    config: of the reference model.
    devices: the size of the expert axis.
    structure: "inside", the scan inside one shard_map, or "outside", a shard_map in each layer.
    check_vma: of the shard_map.
    capacity: rows of the stash on each device; None saves the residuals instead.
    seals: how often the stash is sealed.
    page_rows: of the stash.
    **options: of `pallas_stash.checkpoint`.
  """
  mesh = Mesh(np.array(jax.devices()[:devices]), ("expert",))
  ffn, names = saving_ffn(config), NAMES
  if capacity is not None:
    ffn, residuals = stashing_ffn(config, **options)
    residuals, names = residuals_of(config, devices, residuals), (ps.SLOT_NAME,)

  def finish(x, stash):
    for _ in range(seals if capacity is not None else 0):
      x = ps.seal(x, stash)
    return x

  run = functools.partial(model.loss, config=config, ffn=ffn, policy=SAVE(*names), finish=finish)

  def empty_stash(room, num_shards=1):
    stash = ps.Stash.empty(capacity, residuals, num_shards, page_rows=page_rows)
    if room is not None:
      stash = with_rows_taken(stash, capacity - room)
    return stash

  def stats_of(stash):
    return None if stash is None else stash.stats()

  def inside(params, tokens, room):
    stash = None
    if capacity is not None:
      stash = empty_stash(room)
      if check_vma:
        stash = jax.tree.map(lambda leaf: lax.pcast(leaf, ("expert",), to="varying"), stash)
    loss, (stash, sizes) = run(params, tokens, state=stash)
    return lax.pmean(loss, "expert"), (stats_of(stash), sizes)

  def outside(params, tokens, room):
    def block(x, layer_params, stash, *, config, ffn):
      return jax.shard_map(
        functools.partial(moe.moe_block, config=config, ffn=ffn),
        mesh=mesh,
        in_specs=(P("expert"), moe.param_specs(config), P("expert")),
        out_specs=P("expert"),
        check_vma=check_vma,
      )(x, layer_params, stash)

    stash = None
    if capacity is not None:
      stash = empty_stash(room, devices)
      sharding = NamedSharding(mesh, P("expert"))
      stash = lax.with_sharding_constraint(stash, jax.tree.map(lambda _: sharding, stash))
    loss, (stash, sizes) = run(params, tokens, state=stash, moe=block)
    return loss, (stats_of(stash), sizes)

  if structure == "outside":
    return outside
  return jax.shard_map(
    inside,
    mesh=mesh,
    in_specs=(model.param_specs(config), P("expert"), P()),
    out_specs=(P(), (P("expert"), P(None, "expert"))),
    check_vma=check_vma,
  )


@functools.cache
def _program(config, devices, structure, is_optimized, **options):
  loss = loss_function(config, devices, structure, **options)
  compiler_options = dict(OPTIMIZED if is_optimized else FUSED)
  if config.dtype != jnp.float32:
    # XLA may keep in float32 what the program rounds to bfloat16, in one program and not in
    # another. Without that, a value is the same wherever it is computed.
    compiler_options["xla_allow_excess_precision"] = False
  return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=compiler_options)


@functools.cache
def gradients(config, devices, structure, room=None, is_optimized=False, **options):
  """Returns (loss, gradients, stats, group_sizes [layers, experts]).

  Args:
    config, devices, structure: as for `loss_function`.
    room: rows of the stash that are not taken before the first layer, a multiple of its alignment;
      None for all.
    is_optimized: compile as users do.
    **options: as for `loss_function`.
  """
  gradient = _program(config, devices, structure, is_optimized, **options)
  traced_room = None if room is None else jnp.int32(room)
  (loss, (stats, sizes)), gradients = gradient(*params_and_tokens(config), traced_room)
  if room is not None:
    taken = options["capacity"] - room
    stats = stats._replace(rows_in_use=stats.rows_in_use - taken, peak_rows=stats.peak_rows - taken)
  return loss, gradients, stats, sizes
