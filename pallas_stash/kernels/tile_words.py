"""Arithmetic on VMEM tiles [rows, width] of any dtype, as 32-bit words: bits in, bits out.

A word holds `word_rows` rows of one column, the first row in its lowest bits. A block is the rows
that fill the eight sublanes of a vector register: 8 words, `block_rows` rows.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from pallas_stash.kernels.int32 import div, rem
from pallas_stash.kernels.tiling import LANES, SUBLANES

CHUNK = 8 * LANES  # Columns worked on together: enough to hide latency, few enough for registers.


def merge(landed, tile, first, last, shift, *, block_rows, interpreted):
  """Sets rows `first` to `last` of a tile to the rows `shift` further down in `landed`.

  Args:
    landed: VMEM [tile_rows + block_rows, width].
    tile: VMEM [tile_rows, width]; its other rows keep every bit.
    first, last: int32[], rows of the tile, [first, last).
    shift: int32[], `0 <= shift < block_rows`.
    block_rows: static.
    interpreted: whether this is interpreted.
  """
  for columns in _chunks(tile):
    words = [_Words(ref, columns, block_rows, interpreted) for ref in (landed, tile)]
    _merge_columns(*words, first, last, shift, block_rows)


def _merge_columns(landed, tile, first, last, shift, block_rows):
  """Rotates blocks so that whole words are in place, then joins the bits of neighbours."""
  word_rows = block_rows // SUBLANES
  row_bits = 32 // word_rows
  shape = (SUBLANES, tile.width)
  sublane = lax.broadcasted_iota(jnp.int32, shape, 0)
  words, rest = div(shift, word_rows), rem(shift, word_rows)
  # Rows that are no whole words away straddle two words.
  moves = [words, words + 1] if word_rows > 1 else [words]

  def rotations(block):
    """Returns the block rotated upwards by each of the moves."""
    down = [rem(2 * SUBLANES - move, SUBLANES) for move in moves]
    return tuple(pltpu.roll(landed.load(block), shift, 0) for shift in down)

  def row_mask(block):
    """Returns words whose bits are set in rows `first` to `last`."""
    mask = jnp.zeros(shape, jnp.int32)
    for row_in_word in range(word_rows):
      row = block * block_rows + sublane * word_rows + row_in_word
      bits = jnp.uint32(((1 << row_bits) - 1) << (row_bits * row_in_word)).astype(jnp.int32)
      mask |= jnp.where((row >= first) & (row < last), bits, 0)
    return mask

  def copy_block(block, current, *, is_edge):
    following = rotations(block + 1)
    new, *beyond = (
      jnp.where(sublane < SUBLANES - move, here, there)
      for move, here, there in zip(moves, current, following, strict=True)
    )
    if beyond:
      low = lax.shift_right_logical(new, jnp.full(shape, row_bits * rest, jnp.int32))
      high = lax.shift_left(beyond[0], jnp.full(shape, 32 - row_bits * rest, jnp.int32))
      new = jnp.where(rest == 0, new, low | high)
    if is_edge:
      mask = row_mask(block)
      new = (new & mask) | (tile.load(block) & ~mask)
    tile.store(block, new)
    return following

  edge = functools.partial(copy_block, is_edge=True)
  interior = functools.partial(copy_block, is_edge=False)
  first_block = div(first, block_rows)
  last_block = div(last - 1, block_rows)
  current = edge(first_block, rotations(first_block))
  current = lax.fori_loop(first_block + 1, last_block, interior, current)
  lax.fori_loop(jnp.maximum(first_block + 1, last_block), last_block + 1, edge, current)


def fill(tile, word, *, block_rows, interpreted):
  """Sets every word of a tile [tile_rows, width] to `word`, int32[]."""
  for columns in _chunks(tile):
    words = _Words(tile, columns, block_rows, interpreted)
    blank = jnp.full((SUBLANES, words.width), word, jnp.int32)
    pl.loop(np.int32(0), np.int32(tile.shape[0] // block_rows))(
      lambda block, w=words, b=blank: w.store(block, b)
    )


def _chunks(tile):
  width = tile.shape[1]
  return [pl.ds(column, min(CHUNK, width - column)) for column in range(0, width, CHUNK)]


class _Words:
  """Some columns of a VMEM tile, to be loaded and stored a block at a time, as int32[8, width]."""

  def __init__(self, tile, columns, block_rows, interpreted):
    self.width = columns.size
    self._tile, self._columns, self._block_rows = tile, columns, block_rows
    # The interpreter cannot view a reference as another dtype, so there the values are cast. The
    # compiler can, and takes it for every dtype; the cast it takes for some.
    self._interpreted = interpreted
    self._view = None if interpreted else tile.bitcast(jnp.int32)

  def _rows(self, block, rows):
    return pl.ds(pl.multiple_of(block * rows, rows), rows), self._columns

  def load(self, block):
    if self._interpreted:
      return pltpu.bitcast(self._tile[self._rows(block, self._block_rows)], jnp.int32)
    return self._view[self._rows(block, SUBLANES)]

  def store(self, block, words):
    if self._interpreted:
      words = pltpu.bitcast(words, self._tile.dtype)
      self._tile[self._rows(block, self._block_rows)] = words
    else:
      self._view[self._rows(block, SUBLANES)] = words
