"""Models whose layers name values for the stash, each written in another way."""

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import pallas_stash as ps

TOKENS, WIDTH, GROUPS, LAYERS = 24, 8, 3, 3
X = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))


def weights_of(layers=LAYERS, width=WIDTH):
  return jax.random.normal(jax.random.key(1), (layers, GROUPS, WIDTH, width)) / 3


def route(x, share=2):
  """Returns the order of the tokens, and the rows of each group: some `1 / share` of all."""
  order = jnp.argsort(x[:, 0])
  wanted = jnp.sum(x[:, 1] > 0, dtype=jnp.int32) // share
  return order, jnp.stack([wanted // 2, jnp.zeros_like(wanted), wanted - wanted // 2])


def mask(rows, sizes):
  return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], rows, 0)


def experts(rows, weights, sizes, name="hidden"):
  hidden = checkpoint_name(mask(lax.ragged_dot(rows, weights, sizes), sizes), name)
  return mask(jnp.sin(hidden) * hidden, sizes)


def marked(sizes, total_rows):
  ps.mark_rows(ps.RaggedRows(sizes, total_rows))


def plain(x, weights):
  """All in one function: routing, marks and names."""
  order, sizes = route(x)
  rows = x[order]
  marked(sizes, x.shape[0])
  return x.at[order].add(experts(rows, weights, sizes))


def names_under_jit(x, weights):
  order, sizes = route(x)
  marked(sizes, TOKENS)
  return x.at[order].add(jax.jit(experts)(x[order], weights, sizes))


def all_under_jit(x, weights):
  return jax.jit(plain)(x, weights)


def marks_under_jit(x, weights):
  @jax.jit
  def permute(x):
    order, sizes = route(x)
    marked(sizes, TOKENS)
    return order, sizes, x[order]

  order, sizes, rows = permute(x)
  return x.at[order].add(experts(rows, weights, sizes))


def rows_named_before_the_mark(x, weights):
  order, sizes = route(x)
  rows = checkpoint_name(mask(jnp.cos(x[order]), sizes), "sorted")
  marked(sizes, TOKENS)
  return x.at[order].add(experts(rows, weights, sizes))


def chunks(x, weights):
  """One push each."""
  outs = []
  for part in jnp.split(x, 2):
    order, sizes = route(part, share=1)
    marked(sizes, part.shape[0])
    outs.append(part.at[order].add(experts(part[order], weights, sizes)))
  return jnp.concatenate(outs)


def rows_of_two_lengths(x, weights):
  order, sizes = route(x)
  marked(sizes, TOKENS)
  twice, sizes_of_twice = jnp.concatenate([x[order], x[order]]), 2 * sizes
  marked(sizes_of_twice, 2 * TOKENS)
  first = experts(x[order], weights, sizes)
  both = experts(mask(twice, sizes_of_twice), weights, sizes_of_twice, "twice")
  return x.at[order].add(first + both[:TOKENS] + both[TOKENS:])


def rows_of_other_ranks(x, weights):
  """The second mark has residuals of one and of two axes a row."""
  order, sizes = route(x)
  marked(sizes, TOKENS)
  first = experts(x[order], weights, sizes)
  marked(2 * sizes, 2 * TOKENS)
  twice = mask(jnp.concatenate([first, first]), 2 * sizes)
  flat = checkpoint_name(jnp.sin(twice), "twice")
  folded = checkpoint_name(jnp.cos(twice)[:, :, None], "folded")
  both = mask(flat * folded.reshape(flat.shape) * flat, 2 * sizes)
  return x.at[order].add(both[:TOKENS] + both[TOKENS:])


def groups_with_starts(x, weights):
  order, sizes = route(x)
  sizes, starts = sizes[::2], jnp.array([0, TOKENS // 2], jnp.int32)
  ragged = ps.RaggedRows(sizes, TOKENS, starts)
  ps.mark_rows(ragged)
  live = ragged.is_in_group()[:, None]
  hidden = checkpoint_name(jnp.where(live, x[order] @ weights[0], 0), "hidden")
  return x.at[order].add(jnp.where(live, jnp.sin(hidden) * hidden, 0))


def in_cond(x, weights):
  return lax.cond(x[0, 0] > -9, plain, lambda x, weights: x, x, weights)


def scanned(layer, reverse=False):
  """Returns `model(policy) -> fun(x, weights)`."""

  def model(policy):
    step = jax.checkpoint(lambda x, weights: (layer(x, weights), None), policy=policy)
    return lambda x, weights: lax.scan(step, x, weights, reverse=reverse)[0]

  return model


def unrolled(policy):
  layer = jax.checkpoint(jax.jit(plain), policy=policy)
  return lambda x, weights: functools.reduce(layer, list(weights), x)


def blocks(policy):
  """A layer apart, then a scan of blocks of two layers: a `jax.checkpoint` around both."""
  both = lambda x, weights: (plain(plain(x, weights[0]), weights[1]), None)

  def model(x, weights):
    x = jax.checkpoint(plain, policy=policy)(x, weights[0])
    return lax.scan(
      jax.checkpoint(both, policy=policy), x, weights[1:].reshape(-1, 2, *weights.shape[1:])
    )[0]

  return model


def two_widths(policy):
  """Layers whose residuals are of other widths, and one that names none."""

  def wide(x, weights):
    order, sizes = route(x)
    marked(sizes, TOKENS)
    hidden = mask(lax.ragged_dot(x[order], weights, sizes), sizes)
    hidden = checkpoint_name(hidden, "wide")
    return x.at[order].add(mask((jnp.sin(hidden) * hidden)[:, :WIDTH], sizes)), None

  dense = jax.checkpoint(lambda x, weights: jnp.sin(x @ weights[0]), policy=policy)

  def model(x, weights):
    x = dense(x, weights[0])
    x = scanned(plain)(policy)(x, weights)
    wider = jnp.concatenate([weights, weights], axis=-1)
    return lax.scan(jax.checkpoint(wide, policy=policy), x, wider)[0]

  return model


def other_results(policy):
  """A key, flags and nothing among what a layer is given and gives."""

  def layer(carry, weights):
    x, key, nothing, is_odd = carry
    key, used = jax.random.split(key)
    kept = jax.random.bernoulli(used, 0.9, x.shape)
    x = jnp.where(kept & is_odd, plain(x, weights), x)
    return (x, key, nothing, ~is_odd | (x[0, 0] < 9)), (None, jnp.argmax(x))

  layer = jax.checkpoint(layer, policy=policy)
  return lambda x, weights: lax.scan(layer, (x, jax.random.key(3), None, jnp.bool_(True)), weights)[
    0
  ][0]


MODELS = {
  "plain": scanned(plain),
  "reversed": scanned(plain, reverse=True),
  "names under jit": scanned(names_under_jit),
  "all under jit": scanned(all_under_jit),
  "marks under jit": scanned(marks_under_jit),
  "rows named before the mark": scanned(rows_named_before_the_mark),
  "chunks": scanned(chunks),
  "rows of two lengths": scanned(rows_of_two_lengths),
  "rows of other ranks": scanned(rows_of_other_ranks),
  "groups with starts": scanned(groups_with_starts),
  "in cond": scanned(in_cond),
  "unrolled": unrolled,
  "blocks": blocks,
  "two widths": two_widths,
  "other results": other_results,
}
_NAMES = {
  "rows named before the mark": ("sorted", "hidden"),
  "rows of two lengths": ("hidden", "twice"),
  "rows of other ranks": ("hidden", "twice", "folded"),
  "two widths": ("hidden", "wide"),
}


def names_in(name):
  """Returns the names that a model of `MODELS` has for the stash."""
  return _NAMES.get(name, ("hidden",))
