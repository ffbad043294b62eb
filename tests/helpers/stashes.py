"""Stashes as they are behind pushes that were not made."""

import dataclasses

import jax.numpy as jnp

import pallas_stash as ps


def with_rows_taken(stash: ps.Stash, rows) -> ps.Stash:
  """Returns a stash of whose rows the first `rows`, an int or int32[], are not free."""
  if stash.page_rows is None:
    return with_allocator(stash, top=jnp.full_like(stash.top, rows))
  holder = stash.allocator.holder
  page = jnp.arange(holder.shape[0]) % (stash.rows_per_shard // stash.page_rows)
  nobody = 2.0**24
  return with_allocator(stash, holder=jnp.where(page < rows // stash.page_rows, nobody, holder))


def with_allocator(stash: ps.Stash, **fields) -> ps.Stash:
  """Returns a stash with other values of some fields of its allocator."""
  return dataclasses.replace(stash, allocator=dataclasses.replace(stash.allocator, **fields))
