"""The names of trainers, of experts and of latent attention, each placed where a policy can."""

import functools
import random

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_stash as ps
from reference import mla, model, moe
from tests.helpers.checks import assert_trees_equal, FUSED

EXPERTS = "mlpwi_0", "mlpwi_1", "mlpwo"
NAMES = *EXPERTS, *mla.NAMES
CONFIG = model.Config(
  vocab=32,
  width=16,
  hidden=8,
  num_experts=4,
  top_k=2,
  layers=2,
  num_heads=2,
  latent_attention=mla.Sizes(query_rank=8, kv_rank=4, nope=4, rope=2, value=4),
)
BATCH, SEQ = 2, 6


def ffn(state, group_sizes, *args):
  """The experts. Marks their rows, and the tokens, each of which has a row of attention."""
  tokens, rows = args[0].shape[0], args[1].shape[0]
  ps.mark_rows(ps.RaggedRows(jnp.array([tokens], jnp.int32), tokens))
  ps.mark_rows(ps.RaggedRows(group_sizes, rows))
  return moe.expert_ffn(*args, grouped_matmul=lax.ragged_dot), state


def gradients(placements):
  policy = ps.policy_by_name(placements)
  loss = lambda *args: model.loss(*args, config=CONFIG, policy=policy, ffn=ffn)[0]
  if policy.names:
    loss = ps.threaded(loss, lambda rows: rows)
  mesh = Mesh(np.array(jax.devices()[:1]), ("expert",))
  specs = model.param_specs(CONFIG), P("expert")
  of_device = lambda *args: lax.pmean(loss(*args), "expert")
  of_all = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P())
  params = model.init(CONFIG, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, CONFIG.vocab)
  return jax.jit(jax.value_and_grad(of_all), compiler_options=FUSED)(params, tokens)


@functools.cache
def saved(*names):
  return gradients(dict.fromkeys(names, "device"))


@pytest.mark.long
def test_all_in_the_stash():
  """Experts and attention have a stash each: their rows are others."""
  assert_trees_equal(gradients(dict.fromkeys(NAMES, "stash")), saved(*NAMES))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_one_in_the_stash(name):
  assert_trees_equal(gradients({name: "stash"}), saved(name))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_some_here_and_some_there(seed):
  """XLA may round in another way what it fuses with what is made again."""
  draw = random.Random(seed)
  placements = {name: draw.choice(["remat", "device", "offload", "stash"]) for name in NAMES}
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, gradients(placements), saved(*NAMES))
