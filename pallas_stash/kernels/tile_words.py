"""Arithmetic on VMEM tiles [rows, width] of any dtype, as 32-bit words: bits in, bits out.

A word holds `word_rows` rows of one column, the first row in its lowest bits. A block is the rows
that fill the eight sublanes of a vector register: 8 words, `block_rows` rows.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_stash.kernels.int32 import div, rem, repeat
from pallas_stash.kernels.tiling import LANES, SUBLANES

CHUNK = 8 * LANES  # Columns worked on together: enough to hide latency, few enough for registers.


def merge(landed, tile, first, last, shift, meanwhile, *, block_rows, interpreted):
  """Sets rows `first` to `last` of a tile to the rows `shift` further down in `landed`.

  Args:
    landed: VMEM [tile_rows + block_rows, width].
    tile: VMEM [tile_rows, width]; its other rows keep every bit.
    first, last: int32[], rows of the tile, [first, last). It takes least time if `last` is a
      multiple of `block_rows`.
    shift: int32[], `0 <= shift < block_rows`.
    meanwhile: called once, where the compiler can pack scalar code with that for vectors.
    block_rows: static.
    interpreted: whether this is interpreted.

  Returns:
    What `meanwhile` returns.
  """
  word_rows = block_rows // SUBLANES
  row_bits = 32 // word_rows
  words, rest = div(shift, word_rows), rem(shift, word_rows)
  chunks = [
    [_Words(ref, columns, block_rows, interpreted) for ref in (landed, tile)]
    for columns in _chunks(tile)
  ]

  def word_below(here, there, move):
    """Returns the words `move` further down, `0 <= move <= SUBLANES`; `there` is below `here`."""
    both = jnp.where(_sublane(here.shape) >= move, here, there)
    return pltpu.roll(both, (SUBLANES - move) & (SUBLANES - 1), 0)

  def rows_below(here, there):
    """Returns the words of the rows `shift` further down; `there` is the block below `here`."""
    first = word_below(here, there, words)
    if word_rows == 1:
      return first
    # Rows that are no whole words away straddle two words; the others are in both of them.
    second = word_below(here, there, words + jnp.minimum(rest, 1))
    bits = lambda rows: jnp.full(first.shape, row_bits * rows, jnp.int32)
    low = lax.shift_right_logical(first, bits(rest))
    return low | lax.shift_left(second, bits((word_rows - rest) & (word_rows - 1)))

  def row_mask(block):
    """Returns words int32[SUBLANES, LANES] whose bits are set in rows `first` to `last`."""
    sublane = _sublane((SUBLANES, LANES))
    mask = jnp.zeros(sublane.shape, jnp.int32)
    for row_in_word in range(word_rows):
      row = block * block_rows + sublane * word_rows + row_in_word
      bits = jnp.uint32(((1 << row_bits) - 1) << (row_bits * row_in_word)).astype(jnp.int32)
      mask |= jnp.where((row >= first) & (row < last), bits, 0)
    return mask

  def merge_block(block, landed_here, mask=None):
    """Merges a block whose landed words are given, or (); returns those of the block below."""
    landed_here = landed_here or [landed.load(block) for landed, _ in chunks]
    landed_below = [landed.load(block + 1) for landed, _ in chunks]
    for (_, tile), here, there in zip(chunks, landed_here, landed_below, strict=True):
      new = rows_below(here, there)
      if mask is not None:
        inside = jnp.tile(mask, (1, tile.width // LANES))
        new = (new & inside) | (tile.load(block) & ~inside)
      tile.store(block, new)
    return landed_below if is_carried else ()

  # To load a block again costs less than to carry it through a loop, unless it has to be arranged.
  is_carried = word_rows == 2
  first_block, last_block = div(first, block_rows), div(last, block_rows)
  landed_below = merge_block(first_block, (), row_mask(first_block))
  result = meanwhile()
  landed_below = lax.fori_loop(first_block + 1, last_block, merge_block, landed_below)

  @pl.when((rem(last, block_rows) != 0) & (first_block < last_block))
  def _():
    merge_block(last_block, landed_below, row_mask(last_block))

  return result


def _sublane(shape):
  return lax.broadcasted_iota(jnp.int32, shape, 0)


def fill(tile, word, *, block_rows, interpreted):
  """Sets every word of a tile [tile_rows, width] to `word`, int32[]."""
  for columns in _chunks(tile):
    words = _Words(tile, columns, block_rows, interpreted)
    blank = jnp.full((SUBLANES, words.width), word, jnp.int32)
    store = lambda block, _, w=words, b=blank: w.store(block, b)
    repeat(jnp.int32(tile.shape[0] // block_rows), store, None)


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
    # Of two-byte elements an HBM tile is four words high: a register loads two halves side by side,
    # which each operation would arrange anew. To `or` them to a zero that is arranged does it once.
    self._arranged = None
    if block_rows == 2 * SUBLANES:
      self._arranged = div(_sublane((SUBLANES, self.width)), SUBLANES)  # Zero.

  def _rows(self, block, rows):
    return pl.ds(pl.multiple_of(block * rows, rows), rows), self._columns

  def load(self, block):
    if self._interpreted:
      return pltpu.bitcast(self._tile[self._rows(block, self._block_rows)], jnp.int32)
    words = self._view[self._rows(block, SUBLANES)]
    return words if self._arranged is None else self._arranged | words

  def store(self, block, words):
    if self._interpreted:
      words = pltpu.bitcast(words, self._tile.dtype)
      self._tile[self._rows(block, self._block_rows)] = words
    else:
      self._view[self._rows(block, SUBLANES)] = words
