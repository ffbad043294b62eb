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
