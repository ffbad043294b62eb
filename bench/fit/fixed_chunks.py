"""Fixed-chunk stashing, for comparison: what `lax.dynamic_update_slice` alone can do.

The scheme of MaxText's pull request 3493, paged stashing: of each residual, one layer
writes a chunk of fixed size into a shared buffer, at a running row pointer that advances by the
rows which are really there. The next layer overwrites the rest of the chunk. A chunk is the
expected rows times a margin, so a layer that receives more than that cannot be stored, and every
layer moves all of its chunk.

What was left open there is completed here: the backward pass reads the buffers out of their own
cotangent, a layer that does not fit is recomputed, the buffers end with a chunk of slack so that no
write is clamped onto earlier rows, and rows of later layers are masked when a chunk is read.
"""

from typing import NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

SLOT_NAME = "chunk_slot"


class Chunks(NamedTuple):
  """The state threaded through the layers.

  Attributes:
    buffers: one array [capacity_rows + chunk_rows, width] a residual.
    top: int32[], the rows in use.
  """

  buffers: tuple[jax.Array, ...]
  top: jax.Array


def empty(capacity_rows, chunk_rows, residuals):
  """Returns `Chunks` that hold nothing.

  Args:
    capacity_rows: rows to have room for.
    chunk_rows: the most rows of one layer that can be stored.
    residuals: a `jax.ShapeDtypeStruct((width,), dtype)` for each residual.
  """
  rows = capacity_rows + chunk_rows
  residuals = sorted(residuals, key=lambda r: r.shape)
  return Chunks(tuple(lax.empty((rows, *r.shape), r.dtype) for r in residuals), jnp.int32(0))


def checkpoint(fun, policy, chunk_rows):
  """Makes `fun` keep in `Chunks` the rows that `jax.checkpoint(fun, policy=policy)` saves.

  Returns:
    `f(chunks, ragged_rows, *args) -> (fun(*args), chunks)`. `ragged_rows` is a pair: how many rows
    there are, int32[], and an array whose leading axis is that of every residual to store. Those
    have two axes, their rows in front; no argument of `fun` has such a shape.
  """
  saving = jax.checkpoint(fun, policy=policy)

  @jax.custom_vjp
  def f(chunks, ragged_rows, *args):
    del ragged_rows
    return fun(*args), chunks

  def vjp_leaves(ragged_rows, args):
    """Returns fun(*args), the leaves of its vjp function, which are rows, and its structure."""
    out, vjp = jax.vjp(saving, *args)
    leaves, treedef = jax.tree.flatten(vjp)
    rows = [
      i for i, leaf in enumerate(leaves) if leaf.ndim == 2 and len(leaf) == len(ragged_rows[1])
    ]
    return out, leaves, sorted(rows, key=lambda i: leaves[i].shape), treedef

  def forward(chunks, ragged_rows, *args):
    out, leaves, rows, treedef = vjp_leaves(ragged_rows, args)
    num_rows, (buffers, top) = ragged_rows[0], chunks
    fits = (num_rows <= chunk_rows) & (top + num_rows <= len(buffers[0]) - chunk_rows)
    # Written even if it does not fit: into free rows, which the next layer overwrites.
    write = lambda buffer, i: lax.dynamic_update_slice(buffer, leaves[i][:chunk_rows], (top, 0))
    buffers = tuple(map(write, buffers, rows))
    slot = checkpoint_name(jnp.where(fits, top, -1), SLOT_NAME)
    kept = [leaf for i, leaf in enumerate(leaves) if i not in rows]

    def join(kept, stored):
      stored, kept = dict(zip(rows, stored, strict=True)), iter(kept)
      leaves = [stored[i] if i in rows else next(kept) for i in range(treedef.num_leaves)]
      return jax.tree.unflatten(treedef, leaves)

    saved = (jax.tree_util.Partial(join, kept), slot, ragged_rows, args)
    return (out, Chunks(buffers, top + jnp.where(fits, num_rows, 0))), saved

  def backward(saved, cotangents):
    rebuild, slot, ragged_rows, args = saved
    d_out, d_chunks = cotangents

    def restore(buffers, args):
      del args
      live = (jnp.arange(chunk_rows) < ragged_rows[0])[:, None]

      def read(buffer):
        chunk = lax.dynamic_slice(buffer, (slot, 0), (chunk_rows, buffer.shape[1]))
        padding = ((0, len(ragged_rows[1]) - chunk_rows), (0, 0))
        return jnp.pad(jnp.where(live, chunk, 0), padding)

      return [read(buffer) for buffer in buffers]

    def recompute(buffers, args):
      del buffers
      _, leaves, rows, _ = vjp_leaves(ragged_rows, args)
      return [leaves[i] for i in rows]

    rows = lax.cond(slot >= 0, restore, recompute, d_chunks.buffers, args)
    return d_chunks, None, *rebuild(rows)(d_out)

  f.defvjp(forward, backward)
  return f


@jax.custom_vjp
def seal(y, chunks):
  """Hands the filled chunks over to the backward pass; returns `y`."""
  del chunks
  return y


seal.defvjp(
  lambda y, chunks: (y, chunks.buffers), lambda buffers, d_y: (d_y, Chunks(buffers, None))
)
