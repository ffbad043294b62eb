"""How many rows of each layer a stash of two tiers sends to the host, and when that pays."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from bench.plan import memory
from bench.plan.choices import Choice
from bench.plan.setup import Setup
from pallas_stash import sizing
from pallas_stash.kernels.tiling import round_up, SUBLANES


def with_staging(setup: Setup, choice: Choice) -> Choice | None:
  """Returns a choice with the least `staging_rows` that HBM has room beside.

  Every layer sends as many: so the link is as busy at the first layer as at the last. Fewer would
  not fit; more would wait for the link, or hide for nothing.

  Returns:
    The choice; as it is without a stash of two tiers. None where there is nothing to choose: HBM
    holds all rows, or not even what is beside them.
  """
  names = choice.names_in("stash_host")
  if not names:
    return choice
  layers = setup.size.layers
  excess = sum(memory.hbm_parts(setup, choice).values()) - setup.hbm_bytes
  # One layer's rows are in the stage, which is in HBM.
  saved_by_row = (layers - 1) * setup.stash_row_bytes(names)
  most = setup.capacity_rows(choice.margin) // layers
  if excess <= 0 or excess > most * saved_by_row:
    return None
  return dataclasses.replace(choice, staging_rows=round_up(-(-excess // saved_by_row), SUBLANES))


def hidden_rows(setup: Setup, names: Sequence[str]) -> int:
  """Returns the rows of a layer that are at the host when its forward pass is over."""
  residuals = [jax.ShapeDtypeStruct((setup.width(name),), jnp.bfloat16) for name in names]
  return sizing.hidden_rows(setup.hiding_seconds, residuals, setup.host_bandwidth)


def spill_share(setup: Setup, names: Sequence[str]) -> float:
  """Returns the share of a layer's rows up to which it pays to send them at once.

  That is what a stash does with the rows that it does not stage and that HBM has no room for: the
  layer waits while they go, and again while they come back. A push is stored whole or not at all.
  So if they are more than this, recomputing the layer, at peak, takes less time.
  """
  replayed = sum(name in setup.needed for name in names) * setup.matmul_seconds
  one_way = setup.layer.rows * setup.stash_row_bytes(names) / setup.host_bandwidth
  return replayed / (2 * one_way)
