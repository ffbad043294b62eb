"""The training step of a case of `tests.composition`."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

import pallas_stash as ps
from tests.helpers.composition import EXAMPLES
from tests.helpers.composition_layers import loss_function, MESH_AXES, mesh_of, RESIDUALS
from tests.helpers.composition_model import params_and_tokens, split_tokens

OPTIMIZER = optax.adam(0.5, b1=0.5, b2=0.5)


def step_function(case, capacity):
  """Returns `step(params, optimizer_state, stash, tokens) -> dict` of results by name."""
  loss = loss_function(case, capacity)
  reuses_stash = case.reuses_stash

  def example_loss(params, x, stash):
    value, after = loss(params, x, stash)
    return value, after if reuses_stash else after.stats()

  def microbatch_loss(params, x, stash):
    if case.vmap == "none":
      return example_loss(params, x[0], stash)
    axes = (0 if case.vmap == "models" else None, 0, 0)
    values, state = jax.vmap(example_loss, in_axes=axes)(params, x, stash)
    return jnp.sum(values), state

  def gradient(params, x, stash):
    """Returns (loss, stash or stats), gradients, as far as the case asks for them."""
    if case.result == "grad" and not reuses_stash:
      return (None, None), jax.grad(lambda *args: microbatch_loss(*args)[0])(params, x, stash)
    return jax.value_and_grad(microbatch_loss, has_aux=True)(params, x, stash)

  def step(params, optimizer_state, stash, tokens):
    if case.microbatches == "none":
      (value, stats), gradients = gradient(params, tokens[0], None)
    else:

      def accumulate(carry, x):
        so_far, stash = carry
        (value, state), gradients = gradient(params, x, stash)
        if reuses_stash:
          reset = ps.Stash.reset if case.vmap == "none" else jax.vmap(ps.Stash.reset)
          stash, state = reset(state), None
        so_far = jax.tree.map(jnp.add, so_far, (value, gradients))
        return (so_far, stash), state

      value = None if case.result == "grad" and not reuses_stash else jnp.zeros(())
      nothing = value, jax.tree.map(jnp.zeros_like, params)
      ((value, gradients), stash), stats = lax.scan(accumulate, (nothing, stash), tokens)
      if reuses_stash:
        stats = (ps.Stash.stats if case.vmap == "none" else jax.vmap(ps.Stash.stats))(stash)
    results = {"loss": value, "stats": stats, "stash": stash if reuses_stash else None}
    if case.result != "adam":
      return results | {"gradients": gradients}
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state)
    params = optax.apply_updates(params, updates)
    return results | {"params": params, "optimizer_state": optimizer_state}

  return step


def arguments(case, capacity):
  """Returns params, optimizer_state, stash and tokens [microbatches, examples, tokens, width]."""
  params, tokens = params_and_tokens()
  if case.vmap == "models":
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, params_and_tokens(1)[0])
  stash = None
  if case.reuses_stash:
    empty = lambda _: ps.Stash.empty(capacity, RESIDUALS, num_shards=case.num_devices)
    stash = empty(None)
    if case.vmap != "none":
      stash = jax.vmap(empty, out_axes=0)(jnp.arange(EXAMPLES))
  optimizer_state = OPTIMIZER.init(params) if case.result == "adam" else None
  return params, optimizer_state, stash, split_tokens(tokens, case.split)


def place(case, args):
  """Puts the arguments on the devices: experts along their axis, a stash along both."""
  mesh, params, stash = mesh_of(case), args[0], args[2]
  shard = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
  leading = (None,) if case.vmap == "models" else ()
  experts = {name: shard(params[name], *leading, None, "expert") for name in ("wi", "wo")}
  leading = (None,) if case.vmap != "none" else ()
  params, optimizer_state, tokens = shard((params, args[1], args[3]))
  return params | experts, optimizer_state, shard(stash, *leading, MESH_AXES), tokens


def run(case, capacity):
  """Runs the step of a case."""
  step, args = step_function(case, capacity), arguments(case, capacity)
  if case.shard_map != "none":
    args = place(case, args)
  if case.call == "eager":
    return step(*args)
  if case.call == "donated":
    results = jax.jit(step, donate_argnums=(0, 1, 2))(*args)
    # XLA may shard what the optimizer returns otherwise than what it was given.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((args[0], args[2])))
    return results
  if case.call == "jit":
    return jax.jit(step)(*args)
  # What is exported has plain arrays for arguments and results.
  leaves, treedef = jax.tree.flatten(args)
  structures = []

  def flat(*leaves):
    leaves, structure = jax.tree.flatten(step(*jax.tree.unflatten(treedef, leaves)))
    structures.append(structure)
    return leaves

  exported = jax.export.export(jax.jit(flat))(*leaves)
  exported = jax.export.deserialize(exported.serialize())
  return jax.tree.unflatten(structures[0], jax.jit(exported.call)(*leaves))
