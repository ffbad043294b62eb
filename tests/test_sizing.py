"""Sizing: a published table, then the properties that hold for every configuration."""

import dataclasses
import fractions
import math
import types

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.fit import imbalance
from bench.fit.model_sizes import PRESETS
from pallas_stash import sizing
from pallas_stash.allocators import Bump

GIB = 2**30
DEEPSEEK_V3 = dict(batch=2, seq=4096, top_k=8, ep=4)
ROUTED_ROW = jax.ShapeDtypeStruct((7168,), jnp.bfloat16)


@st.composite
def routings(draw):
  """Valid (batch, seq, top_k, ep, num_experts or None)."""
  batch, seq, ep, local_experts = (draw(st.integers(1, 20)) for _ in range(4))
  top_k = draw(st.integers(1, ep * local_experts))
  return batch, seq, top_k, ep, draw(st.sampled_from([None, ep * local_experts]))


@pytest.mark.parametrize("num_experts", [None, 256])
def test_table_of_maxtext_pull_3493(num_experts):
  layers = 60

  def gib(rows):
    return sizing.residual_bytes(rows, [ROUTED_ROW]) / GIB

  def capacity(margin):
    rows = sizing.capacity_rows(
      **DEEPSEEK_V3, num_experts=num_experts, layers=layers, margin=margin
    )
    return gib(rows)

  worst_case = sizing.worst_case_rows(**DEEPSEEK_V3, num_experts=num_experts)
  assert gib(layers * worst_case) == 210.0
  assert gib(layers * worst_case // 2) == capacity(2) == 105.0
  assert capacity(1.5) == 78.75
  assert capacity(1.0) == 52.5


def test_few_local_experts_bound_the_worst_case():
  routing = dict(batch=1, seq=16, top_k=8, ep=4)
  assert sizing.worst_case_rows(**routing) == 4 * 16 * 8
  assert sizing.worst_case_rows(**routing, num_experts=32) == 4 * 16 * 8
  assert sizing.worst_case_rows(**routing, num_experts=8) == 4 * 16 * 2
  assert sizing.expected_rows(**routing, num_experts=8) == 16 * 8


@given(
  routing=routings(),
  layers=st.integers(1, 80),
  margin=st.fractions(min_value=fractions.Fraction(1, 100), max_value=10),
  row_alignment=st.sampled_from([1, 8, 32]),
)
def test_capacity_properties(routing, layers, margin, row_alignment):
  expected = sizing.expected_rows(*routing)
  worst_case = sizing.worst_case_rows(*routing)
  rows = sizing.capacity_rows(*routing, layers=layers, margin=margin, row_alignment=row_alignment)
  assert expected <= worst_case
  assert rows % (layers * row_alignment) == 0
  needed = min(expected * margin, worst_case)
  assert needed <= rows // layers < needed + 1 + row_alignment
  if margin >= 1:
    assert rows >= layers * expected
  assert rows // layers < worst_case + row_alignment


def test_arithmetic_is_exact():
  huge = 2**60 + 1  # a float has 53 bits
  assert sizing.capacity_rows(huge, 1, 2, 8, layers=1, margin=1.5, row_alignment=1) == 3 * huge
  assert sizing.capacity_rows(10, 1, 1, 8, layers=1, margin=1.1, row_alignment=1) == 11
  assert sizing.worst_case_rows(*np.full(4, 2**15, np.int32)) == 2**60


def test_residual_bytes_counts_every_dtype():
  residuals = [
    jax.ShapeDtypeStruct((7,), jnp.float32),
    jax.ShapeDtypeStruct((5, 3), jnp.bfloat16),
    jax.ShapeDtypeStruct((11,), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((), jnp.float16),
  ]
  assert sizing.residual_bytes(10, residuals) == 10 * (7 * 4 + 15 * 2 + 11 + 2)
  assert sizing.residual_bytes(0, residuals) == sizing.residual_bytes(10, []) == 0
  by_type = types.SimpleNamespace(shape=(4,), dtype=jnp.bfloat16)
  assert sizing.residual_bytes(1, [by_type]) == 8


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(batch=0), "batch=0 must be a positive integer"),
    (dict(seq=-1), "seq=-1 must be a positive integer"),
    (dict(top_k=1.0), "top_k=1.0 must be a positive integer"),
    (dict(ep=None), "ep=None must be a positive integer"),
    (dict(num_experts=0), "num_experts=0 must be a positive integer"),
    (dict(num_experts=6), "num_experts=6 must be a multiple of ep=4"),
    (dict(num_experts=4), "top_k=8 must be at most num_experts=4"),
    (dict(layers=0), "layers=0 must be a positive integer"),
    (dict(row_alignment=0), "row_alignment=0 must be a positive integer"),
    (dict(margin=0), "margin=0 must be a finite number above zero"),
    (dict(margin=-1.5), "margin=-1.5 must be a finite number above zero"),
    (dict(margin=math.inf), "margin=inf must be a finite number above zero"),
    (dict(margin=math.nan), "margin=nan must be a finite number above zero"),
    (dict(margin=None), "margin=None must be a finite number above zero"),
  ],
)
def test_errors_name_the_value(change, message):
  with pytest.raises(ValueError, match=f"^{message}$"):
    sizing.capacity_rows(**(DEEPSEEK_V3 | dict(layers=60) | change))


@pytest.mark.parametrize("rows", [-1, 8.0])
def test_residual_bytes_wants_a_row_count(rows):
  with pytest.raises(ValueError, match=f"rows={rows} must be an integer, zero or more"):
    sizing.residual_bytes(rows, [ROUTED_ROW])


def test_bucket_rows():
  assert sizing.bucket_rows(256, 512, 4) == 64 * 512
  assert sizing.bucket_rows(8, 16) == 128
  with pytest.raises(ValueError, match="num_experts=6 must be a multiple of ep=4"):
    sizing.bucket_rows(6, 16, 4)
  with pytest.raises(ValueError, match="capacity=0 must be a positive integer"):
    sizing.bucket_rows(8, 0)


@jax.jit
def recomputed_share(rows, capacity):
  """The share of int32[layers, devices] that a stash of `capacity` rows does not take."""

  def push(allocator, rows):
    is_stored = allocator.has_room(rows)
    return allocator.take(rows, is_stored, jnp.int32(0))[0], ~is_stored

  # Of more rows, the first of which are taken: one program for every capacity.
  allocator = Bump.empty(2**30, 1, 1)
  allocator = dataclasses.replace(allocator, top=allocator.capacity - capacity + allocator.top)
  of_device = lambda rows: jax.lax.scan(push, allocator, rows)[1]
  return jnp.mean(jax.vmap(of_device, 1)(rows))


@pytest.mark.parametrize("share", [0.001, 0.02])
@pytest.mark.parametrize("layers, spread", [(58, 200), (58, 20), (8, 300)])
def test_margin_is_that_of_the_model(layers, spread, share):
  """The bound holds, and is no more than twice what is recomputed."""
  expected, mean = 1000, 980
  margin = sizing.margin(
    mean, spread, expected_rows=expected, layers=layers, recomputed_share=share
  )
  rng = np.random.default_rng(0)
  rows = np.maximum(0, rng.normal(mean, spread, (layers, 100_000))).astype(np.int32)
  found = recomputed_share(rows, int(margin * expected * layers))
  assert share / 2 < found < 1.1 * share  # The sample's own error is below 5%.


@pytest.mark.parametrize("ratio", [1.1, 1.5])
def test_margin_of_simulated_routing(ratio):
  size = PRESETS["deepseek-v3"]
  routing = imbalance.routing(size)
  concentration = imbalance.concentration_of(size, ratio)
  share, rng = 0.005, np.random.default_rng(7)

  def found(is_persistent):
    rows = imbalance.device_rows(rng, size, concentration, is_persistent)
    margin = sizing.margin(
      rows.mean(),
      rows.std(),
      expected_rows=sizing.expected_rows(*routing),
      layers=size.layers,
      recomputed_share=share,
    )
    capacity = sizing.capacity_rows(*routing, layers=size.layers, margin=margin)
    return imbalance.recomputed_share(rows, capacity)

  assert found(False) < 1.5 * share  # Of 64 rings, each of devices that share its tokens.
  assert found(True) > 5 * share  # Popular in all layers: not what is modelled.


def test_margin_at_its_ends():
  options = dict(expected_rows=1000, layers=10)
  assert sizing.margin(1100, 0, **options) == 1.1
  shares = [0.5, 0.1, 0.01, 1e-6, 1e-12]
  margins = [sizing.margin(1000, 100, recomputed_share=s, **options) for s in shares]
  assert margins == sorted(margins) and len(set(margins)) == len(shares)
  assert margins[-1] < 1.3  # Seven spreads of the sum.


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(mean_rows=0), "mean_rows=0 must be a finite number, above zero"),
    (dict(mean_rows=math.nan), "mean_rows=nan must be a finite number, above zero"),
    (dict(spread_rows=-1), "spread_rows=-1 must be a finite number, zero or more"),
    (dict(spread_rows="1"), "spread_rows='1' must be a finite number, zero or more"),
    (dict(recomputed_share=0), "recomputed_share=0 must be a finite number, between 0 and 1"),
    (dict(recomputed_share=1), "recomputed_share=1 must be a finite number, between 0 and 1"),
    (dict(layers=0), "layers=0 must be a positive integer"),
    (dict(expected_rows=1.5), "expected_rows=1.5 must be a positive integer"),
  ],
)
def test_margin_names_the_value(change, message):
  good = dict(mean_rows=10, spread_rows=1, expected_rows=10, layers=2, recomputed_share=0.1)
  with pytest.raises(ValueError, match=f"^{message}$"):
    sizing.margin(**(good | change))


@pytest.mark.parametrize(
  "expected_rows, rows",
  [(1, 128), (8192, 128), (8193, 256), (16_384, 256), (16_385, 512), (65_536, 512), (2**22, 512)],
)
def test_a_push_has_64_pages_or_small_ones(expected_rows, rows):
  assert sizing.page_rows(expected_rows) == rows


def test_pages_of_no_rows_are_refused():
  with pytest.raises(ValueError, match="^expected_rows=0 must be a positive integer$"):
    sizing.page_rows(0)


class TwoTiers:
  """The scheme of a stash with a host tier, of row numbers in place of rows.

  A push leaves its head in the stage, from where the next one stores it; of the rest it puts what
  HBM has room for there, and the others to the host at once. Each part takes whole tiles.
  """

  def __init__(self, hbm_rows, host_rows, staging_rows, tile):
    self.hbm, self.host = [None] * hbm_rows, [None] * host_rows
    self.hbm_top = self.host_top = self.spilled = self.recomputed = 0
    self.staging_rows, self.tile = -(-staging_rows // tile) * tile, tile
    self.stage, self.staged_from, self.slots = [], 0, []

  def push(self, rows):
    """Notes in `slots` where the parts of the rows are; None where there is no room."""
    self.flush()
    hbm_room, host_room = len(self.hbm) - self.hbm_top, len(self.host) - self.host_top
    head = min(len(rows), self.staging_rows, host_room)
    in_hbm = min(len(rows) - head, hbm_room)
    spilled = len(rows) - head - in_hbm
    if head + spilled > host_room:
      self.recomputed += 1
      self.slots.append(None)
      self.stage = []
      return
    self.slots.append((self.host_top, head, self.hbm_top, in_hbm, spilled))
    self.stage, self.staged_from = rows[:head], self.host_top
    self.hbm[self.hbm_top : self.hbm_top + in_hbm] = rows[head : head + in_hbm]
    after = self.host_top + head
    self.host[after : after + spilled] = rows[head + in_hbm :]
    self.hbm_top += -(-in_hbm // self.tile) * self.tile
    self.host_top += -(-(head + spilled) // self.tile) * self.tile
    self.spilled += spilled

  def flush(self):
    self.host[self.staged_from : self.staged_from + len(self.stage)] = self.stage

  def rows_of_all(self):
    """Returns the rows of each push, last first: each is read while the head before it comes in."""
    found, stage = [], self.stage  # As sealed, the last head is there and not in host memory.
    for number in reversed(range(len(self.slots))):
      slot = self.slots[number]
      if slot is None:
        found.append(None)
      else:
        host, head, hbm, in_hbm, spilled = slot
        spill = self.host[host + head : host + head + spilled]
        found.append([*stage, *self.hbm[hbm : hbm + in_hbm], *spill])
      before = self.slots[number - 1] if number else None
      stage = self.host[before[0] : before[0] + before[1]] if before else []
    return found[::-1]


def numbered(sizes):
  """Returns so many rows for each push, no two alike."""
  return [[(push, row) for row in range(rows)] for push, rows in enumerate(sizes)]


def pushed(sizes, *tiers):
  stash = TwoTiers(*tiers)
  for rows in numbered(sizes):
    stash.push(rows)
  return stash


@given(
  rows=st.integers(1, 200),
  staging_rows=st.integers(0, 300),
  layers=st.integers(1, 6),
  tile=st.sampled_from([8, 32]),
)
def test_a_stash_of_these_tiers_holds_exactly(rows, staging_rows, layers, tile):
  hbm, host = sizing.tier_rows(rows, staging_rows, layers, row_alignment=tile)
  sizes = [rows] * layers
  stash = pushed(sizes, hbm, host, staging_rows, tile)
  assert (stash.recomputed, stash.spilled) == (0, 0)
  assert (stash.hbm_top, stash.host_top) == (hbm, host)
  assert stash.rows_of_all() == numbered(sizes)
  assert hbm + host == layers * -(-rows // tile) * tile
  # With a tile less of either, there is no room for the last push.
  if host:
    assert pushed(sizes, hbm, host - tile, staging_rows, tile).recomputed
  if hbm:
    assert pushed(sizes, hbm - tile, host, staging_rows, tile).recomputed


@given(
  sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
  staging_rows=st.integers(0, 60),
  tile=st.sampled_from([8, 32]),
  data=st.data(),
)
def test_layers_that_differ_share_both_tiers(sizes, staging_rows, tile, data):
  """However they are divided, the tiles of both hold what one tier of as many rows would."""
  tiles = sum(-(-rows // tile) for rows in sizes)
  in_hbm = data.draw(st.integers(0, tiles))
  tiers = tile * in_hbm, tile * (tiles - in_hbm)
  stash = pushed(sizes, *tiers, staging_rows, tile)
  assert stash.recomputed == 0
  assert stash.hbm_top + stash.host_top == tile * tiles
  assert stash.rows_of_all() == numbered(sizes)


def test_tiers_at_their_ends():
  assert sizing.tier_rows(20, 0, 3) == (3 * 24, 0)  # All of it in HBM,
  assert sizing.tier_rows(20, 20, 3) == sizing.tier_rows(20, 10**9, 3) == (0, 3 * 24)  # or none.
  assert sizing.tier_rows(20, 1, 3) == (3 * 16, 3 * 8)
  assert sizing.tier_rows(20, 1, 3, row_alignment=32) == (0, 3 * 32)
  tiers = sizing.tier_rows(np.int32(65_536), np.int32(51_568), np.int32(58))
  assert tiers == (810_144, 2_990_944) and sum(tiers) == 58 * 65_536
  assert (tiers.capacity_rows, tiers.host_capacity_rows) == tiers


def test_hidden_rows():
  """A row of 7168 bfloat16 takes 14,336 bytes: in a second, at so many bytes a second, 1000."""
  assert sizing.hidden_rows(1, [ROUTED_ROW], 14_336_000) == 1000
  assert sizing.hidden_rows(1, [ROUTED_ROW], 14_335_999) == 992  # One of them is not through.
  assert sizing.hidden_rows(0.1, [ROUTED_ROW], 143_360_000) == 1000  # As written: a tenth.
  assert sizing.hidden_rows(1e-9, [ROUTED_ROW], 1e9) == 0
  assert sizing.hidden_rows(1, [ROUTED_ROW] * 2, 14_336_000) == 496
  # As wide as a stash holds them, and with one-byte elements in tiles of 32.
  row = lambda width, dtype: [jax.ShapeDtypeStruct(width, dtype)]
  assert sizing.hidden_rows(1, row((130,), jnp.bfloat16), 512_000) == 1000
  assert sizing.hidden_rows(1, row((2, 64), jnp.float8_e4m3fn), 128_000) == 992
  assert sizing.hidden_rows(1, row((), jnp.float32), 512_000) == 1000


@given(
  milliseconds=st.integers(1, 10**6),
  speed=st.integers(1, 10**11),
  widths=st.lists(st.integers(1, 8).map(lambda lanes: 128 * lanes), min_size=1, max_size=3),
)
def test_hidden_rows_are_the_most_that_are_through(milliseconds, speed, widths):
  residuals = [jax.ShapeDtypeStruct((width,), jnp.bfloat16) for width in widths]
  seconds = fractions.Fraction(milliseconds, 1000)
  rows = sizing.hidden_rows(seconds, residuals, speed)
  assert rows % 8 == 0
  assert sizing.residual_bytes(rows, residuals) <= seconds * speed
  assert sizing.residual_bytes(rows + 8, residuals) > seconds * speed


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((0, [ROUTED_ROW], 1), "seconds=0 must be a finite number above zero"),
    ((math.nan, [ROUTED_ROW], 1), "seconds=nan must be a finite number above zero"),
    ((1, [ROUTED_ROW], -1), "host_bytes_per_second=-1 must be a finite number above zero"),
    ((1, [ROUTED_ROW], math.inf), "host_bytes_per_second=inf must be a finite number above zero"),
    ((1, [], 1), r"residuals=\[\] must have elements: nothing is to be moved"),
    ((1, None, 1), r"residuals=None must be a list of jax.ShapeDtypeStruct\(row_shape, dtype\)."),
  ],
)
def test_hidden_rows_names_the_value(arguments, message):
  with pytest.raises(ValueError, match=f"^{message}$"):
    sizing.hidden_rows(*arguments)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(rows_per_layer=0), "rows_per_layer=0 must be a positive integer"),
    (dict(rows_per_layer=1.5), "rows_per_layer=1.5 must be a positive integer"),
    (dict(staging_rows=-8), "staging_rows=-8 must be an integer, zero or more"),
    (dict(staging_rows=True), "staging_rows=True must be an integer, zero or more"),
    (dict(layers=0), "layers=0 must be a positive integer"),
    (dict(row_alignment=0), "row_alignment=0 must be a positive integer"),
  ],
)
def test_tier_rows_names_the_value(change, message):
  good = dict(rows_per_layer=10, staging_rows=8, layers=2)
  with pytest.raises(ValueError, match=f"^{message}$"):
    sizing.tier_rows(**(good | change))
