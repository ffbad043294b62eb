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

NAMES = "mlpwi_0", "mlpwi_1", "mlpwo", *mla.NAMES
# Of trainers whose dense layers have those of experts already: MaxText's.
PREFIXED = "moe_x_sorted", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", *mla.NAMES
FUSED_NAMES = "moe_x_sorted", "moe_mlpwi", "moe_mlpwo"
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


def gradients(placements):
  """Returns loss and gradients of the model whose names are those of `placements`."""
  policy = ps.policy_by_name(placements)
  options = {"prefix": "moe_" * ("mlpwo" not in placements), "is_fused": "moe_mlpwi" in placements}

  def ffn(state, group_sizes, *args):
    """Marks the rows of experts, and the tokens, each of which has a row of attention."""
    tokens, rows = args[0].shape[0], args[1].shape[0]
    ps.mark_rows(ps.RaggedRows(jnp.array([tokens], jnp.int32), tokens))
    ps.mark_rows(ps.RaggedRows(group_sizes, rows))
    return moe.expert_ffn(*args, grouped_matmul=lax.ragged_dot, **options), state

  loss = lambda *args: model.loss(*args, config=CONFIG, policy=policy, ffn=ffn)[0]
  if policy.names:
    all_rows = lambda rows: rows
    on_host = {"host_capacity_rows": all_rows, "staging_rows": 8} if policy.host_names else {}
    loss = ps.threaded(loss, all_rows, **on_host)
  mesh = Mesh(np.array(jax.devices()[:1]), ("expert",))
  specs = model.param_specs(CONFIG), P("expert")
  of_device = lambda *args: lax.pmean(loss(*args), "expert")
  of_all = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P())
  params = model.init(CONFIG, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, CONFIG.vocab)
  return jax.jit(jax.value_and_grad(of_all), compiler_options=FUSED)(params, tokens)


@functools.cache
def saved(names):
  return gradients(dict.fromkeys(names, "device"))


def placed(names, **others):
  return dict.fromkeys(names, "remat") | others


@pytest.mark.long
@pytest.mark.parametrize("names", [NAMES, PREFIXED, FUSED_NAMES])
def test_all_in_the_stash(names):
  """Experts and attention have a stash each: their rows are others."""
  assert_trees_equal(gradients(dict.fromkeys(names, "stash")), saved(names))


ONE_OF = [(name, names) for names in (NAMES, PREFIXED[:4], FUSED_NAMES) for name in names]


@pytest.mark.long
@pytest.mark.parametrize("name, names", ONE_OF)
def test_one_in_the_stash(name, names):
  expected = gradients(placed(names, **{name: "device"}))
  assert_trees_equal(gradients(placed(names, **{name: "stash"})), expected)


@pytest.mark.long
@pytest.mark.parametrize("names", [NAMES, PREFIXED, FUSED_NAMES])
@pytest.mark.parametrize("seed", range(4))
def test_some_here_and_some_there(seed, names):
  """XLA may round in another way what it fuses with what is made again."""
  draw = random.Random(seed)
  placements = {
    name: draw.choice(["remat", "device", "offload", "stash", "stash_host"]) for name in names
  }
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, gradients(placements), saved(names))
