"""`make fit`: what the TPU compiler says of a model's gradient step, and what is made of it."""

import dataclasses
import json

from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from bench.fit import gradient_step, imbalance, pipeline_step, plot
from bench.fit import main as fit
from bench.fit.model_sizes import ModelSize, PRESETS
from bench.tpu import aot
from tests.helpers.checks import long

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

WAYS = ["save", "stash"]
CHOICES = ["mlpwi_0+mlpwi_1", "mlpwo", "mlpwi_0+mlpwi_1+mlpwo"]
WEIGHTS = [fit.BEFORE, fit.BEHIND, fit.BEHIND]
NO_SPARE = {fit.BEFORE: 0, fit.BEHIND: 0}
# Large enough that XLA moves no buffer of the stash to VMEM, which would count as a copy of it.
SMALL = ModelSize(
  layers=58, width=512, hidden=2048, num_experts=8, top_k=2, batch=1, seq=256, expert_axis=4
)
DEEPSEEK_V3 = PRESETS["deepseek-v3"]


@pytest.mark.parametrize("choices", [long(CHOICES)])
def test_small_model_keeps_the_promises(choices):
  def row(way, weights, residuals=fit.NONE):
    names = () if residuals == fit.NONE else tuple(residuals.split("+"))
    # Small tiles compile faster, here of eight devices, four to a ring.
    tiling = dict(tiling=(128, 128, 128))
    step = gradient_step.Step(SMALL, "v5p:2x2x2", way, names, weights == fit.BEFORE, **tiling)
    found = dict(way=way, weights=weights, residuals=residuals, layers=SMALL.layers)
    return found | gradient_step.compile_step(step)

  rows, least = [], None
  for residuals, weights in zip(choices, WEIGHTS, strict=False):
    remat, save, stash = row("remat", weights), *(row(w, weights, residuals) for w in WAYS)
    # Half of what saving takes more than remat, at least: a quarter of its rows are there.
    assert stash["peak_bytes"] - remat["peak_bytes"] < save["peak_bytes"] - stash["peak_bytes"]
    assert stash["flops"] == save["flops"] < remat["flops"]
    # Of nine grouped matmuls, remat repeats those whose result is a residual; routers are small.
    least = least or save["flops"]
    repeated = 2 if weights == fit.BEFORE else 3
    assert remat["flops"] == pytest.approx((9 + repeated) / 9 * least, rel=0.01)
    assert (save["flops"] == least) == (residuals != "mlpwo")
    stash["cpu_seconds"] = 0  # That it compiles as fast as `save` is for `make fit` to say.
    rows += remat, save, stash
  # At this size XLA holds what is restored of a layer beside all that remat holds.
  assert fit.broken_promises(rows, {fit.BEFORE: 2, fit.BEHIND: 2}) == []


def step(way, residuals, topology="v5p:8x8x4"):
  names = tuple(residuals.split("+")) if residuals else ()
  return gradient_step.Step(DEEPSEEK_V3, topology, way, names, residuals != "mlpwo")


@pytest.mark.long
def test_saving_deepseek_v3_is_refused():
  row = gradient_step.compile_step(step("save", CHOICES[0]))
  assert not row["fits"]
  assert row["needed_bytes"] / 2**30 == pytest.approx(148, abs=2)


def test_what_the_compiler_refuses_takes_is_all_that_it_says():
  """The number has arguments and results in it: it is that of all allocations of the program."""
  message = "total memory required for HLO temporaries (147.97G) exceeds available HBM (95.73G)."
  assert gradient_step.refusal(message) == {"needed_bytes": round(147.97 * 2**30)}


@pytest.mark.long
def test_offloading_deepseek_v3_is_refused():
  row = gradient_step.compile_step(step("offload", "mlpwo"))
  assert not row["fits"]
  assert row["host_bytes"] == 58 * 262_144 * 7168 * 2


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5p:8x8x4", "v5p:8x16x16", "tpu7x:8x8x4"])
def test_stashing_deepseek_v3_fits(topology):
  row = gradient_step.compile_step(step("stash", CHOICES[0], topology))
  remat = gradient_step.compile_step(step("remat", "", topology))
  assert row["fits"]
  # With a layer's restored rows twice: see docs/deepseek-v3.md.
  extra = row["peak_bytes"] - remat["peak_bytes"]
  assert extra <= 1.02 * row["stash_bytes"] + 2 * row["layer_bytes"]
  assert row["peak_bytes"] < aot.hbm_bytes(topology)
  assert row["stash_bytes"] == 58 * 65_536 * 2 * 2048 * 2
  assert row["stash_copies"] == 0


# jax before 0.12 does not say how much of what is allocated is in HBM.
TELLS_HBM = jax.__version_info__ >= (0, 12)


@pytest.mark.long
@pytest.mark.parametrize("has_expected_rows", [False, True])
def test_small_model_with_rows_at_the_host(has_expected_rows):
  steps = {
    way: gradient_step.Step(
      SMALL, "v5p:2x2x2", way, tuple(CHOICES[2].split("+")), False, tiling=(128, 128, 128)
    )
    for way in ("save", "stash", "stash_host")
  }
  steps["stash_host"] = dataclasses.replace(
    steps["stash_host"], has_expected_rows=has_expected_rows
  )
  save, stash, host = map(gradient_step.compile_step, steps.values())
  assert host["flops"] == save["flops"]
  assert host["host_bytes"] == steps["stash_host"].stash_host_bytes
  assert host["stash_copies"] == host["stage_copies"] == 0
  if TELLS_HBM:
    spared = steps["stash"].stash_bytes - steps["stash_host"].stash_bytes
    assert host["peak_bytes"] < stash["peak_bytes"] - 0.9 * spared


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5p:8x8x4", "tpu7x:8x8x4"])
def test_rows_at_the_host_make_deepseek_v3_fit(topology):
  """At this depth the compiler aborts if it may look behind the turns of a loop; not at four."""
  without = gradient_step.compile_step(step("stash", CHOICES[2], topology))
  assert not without["fits"] and without["needed_bytes"] > aot.hbm_bytes(topology)
  row = gradient_step.compile_step(step("stash_host", CHOICES[2], topology))
  found = dict(way="stash_host", weights=fit.BEHIND, residuals=CHOICES[2], layers=58)
  assert row["fits"]
  assert fit.broken_promises([found | row], NO_SPARE) == []
  if TELLS_HBM:
    assert row["peak_bytes"] < aot.hbm_bytes(topology)


def test_rows_of_deepseek_v3_in_two_tiers():
  of_both = step("stash_host", CHOICES[2])
  assert of_both.staging_rows == 29_496  # 0.45 of 65,536, and up to a tile
  assert of_both.tier_rows == (58 * (65_536 - 29_496), 58 * 29_496)
  row_bytes = 2 * (2048 + 2048 + 7168)
  assert of_both.stash_bytes == (58 * (65_536 - 29_496) + 29_496) * row_bytes
  assert of_both.stash_host_bytes == (58 + 1) * 29_496 * row_bytes
  assert step("stash", CHOICES[2]).stash_host_bytes == 0
  # With few rows on their way at once, there is room for a chunk of what is not.
  of_few = dataclasses.replace(of_both, staged=0.001)
  assert of_few.stash_host_bytes == (58 * 72 + 512) * row_bytes


def test_host_memory_is_compiled_if_asked(parsed_flags, monkeypatch):
  monkeypatch.setattr(fit, "compile_row", answer)
  parsed_flags.ways = ["save", "stash", "stash_host"]
  parsed_flags.residuals = [CHOICES[2]]
  rows = fit.measure(DEEPSEEK_V3)
  fits = {row["way"]: row["fits"] for row in rows if row["layers"] == 58}
  assert fits == {"remat": True, "save": False, "stash": False, "stash_host": True}
  assert {"save", "stash", "stash_host"} <= {row["way"] for row in rows if row["layers"] < 58}
  assert fit.broken_promises(rows, NO_SPARE) == []
  lines = fit.beside_of(rows)
  assert lines[1] == (CHOICES[2], "58", "3 of 3", "1", "2 of 6", "4") and len(lines) == 3
  plot.plot(rows, 58, aot.hbm_bytes("v5p:8x8x4"), "title")


def test_what_the_scheduler_is_told_is_for_host_memory(parsed_flags):
  parsed_flags.scheduler_features = True
  of = lambda way: fit.step_of(SMALL, way, CHOICES[0], fit.BEFORE)
  assert [of(way).has_scheduler_flag for way in ("stash", "stash_host")] == [False, True]
  assert [of(way).has_expected_rows for way in ("stash", "stash_host")] == [False, True]
  parsed_flags.expected_rows = False
  assert not of("stash_host").has_expected_rows


@pytest.fixture
def parsed_flags():
  flags.FLAGS(["fit"])
  with flagsaver.flagsaver():
    yield flags.FLAGS


def answer(step):
  """What a compiler might say: the residuals take what they must, everything else 25 GB or more."""
  layers = step.size.layers
  row = dict.fromkeys(fit.KEYS) | dict(
    residuals="+".join(step.residuals) or fit.NONE,
    weights=fit.BEFORE if step.weights_before_down_projection else fit.BEHIND,
    way=step.way,
    layers=layers,
  )
  kept = {"save": step.worst_case_bytes}
  kept |= dict.fromkeys(("chunks", "stash", "stash_host"), step.stash_bytes)
  needed = 25 * 10**9 + layers * 3 * 10**8 + kept.get(step.way, 0)
  row |= dict(stash_host_bytes=step.stash_host_bytes)
  row |= dict(weight_bytes=10**10, stash_bytes=step.stash_bytes, layer_bytes=0, trace_seconds=1.0)
  if needed > aot.hbm_bytes(step.topology):
    return row | {"fits": False, "needed_bytes": needed}
  if step.way == "offload" and step.worst_case_bytes > 2**37:
    return row | {"fits": False, "needed_bytes": step.worst_case_bytes, "host_bytes": 1}
  if step.way == "stash_host":
    row |= dict(
      host_bytes=step.stash_host_bytes, beside={"forward": (3, 3, 1), "backward": (2, 6, 4)}
    )
  flops = layers * (12 if step.way == "remat" else 11)
  row |= dict(fits=True, stash_copies=0, stage_copies=0, flops=flops)
  return row | dict(peak_bytes=needed, compile_seconds=30.0, cpu_seconds=50.0)


@pytest.mark.parametrize(
  "residuals, refused", [(CHOICES[1], "save offload"), (CHOICES[2], "save offload chunks stash")]
)
def test_what_is_refused_is_compiled_where_it_fits(parsed_flags, monkeypatch, residuals, refused):
  monkeypatch.setattr(fit, "compile_row", answer)
  parsed_flags.residuals = [residuals]
  rows = fit.measure(DEEPSEEK_V3)
  full = {row["way"]: row for row in rows if row["layers"] == 58}
  ways = ["remat", "save", "offload", "chunks", "stash"]
  assert list(full) == ways + ["grouped_mlp"] * (residuals == fit.GATE_AND_UP)
  assert {way for way in full if not full[way]["fits"]} == set(refused.split())
  fewer = [row for row in rows if row["layers"] != 58]
  assert all(row["fits"] for row in fewer)
  # `save` with all that is compared with it; `stash` with `remat` if it was refused.
  (depth,) = {row["layers"] for row in fewer if row["way"] == "save"}
  assert depth >= 5
  assert {row["way"] for row in fewer if row["layers"] == depth} == set(refused.split()) | {"stash"}
  others = {row["way"]: row["layers"] for row in fewer if row["layers"] != depth}
  assert others.keys() == ({"remat", "stash"} if "stash" in refused else set())
  assert len(set(others.values())) <= 1 and all(layers > 30 for layers in others.values())

  lines = fit.table_of(rows)
  assert len(lines) == len(rows) + 2
  assert lines[2][2:5] == ("remat", "58", "yes") and lines[2][8] == "1.091"
  assert lines[3][2:5] == ("save", "58", "NO") and lines[3][8] == "-"
  assert fit.broken_promises(rows, NO_SPARE) == []
  plot.plot(rows, 58, aot.hbm_bytes("v5p:8x8x4"), "title")


@pytest.mark.parametrize(
  "flag, value, message",
  [
    ("topology", "v4:2x2x1", "must be of .'v5e', 'v5p'"),
    ("ways", ["stash", "swap"], "must be of .'chunks', 'grouped_mlp', 'offload', 'save', 'stash'"),
    ("residuals", ["mlpwo+mlp"], "must be of .'mlpwi_0', 'mlpwi_1', 'mlpwo'., joined by"),
  ],
)
def test_flags_are_checked(parsed_flags, flag, value, message):
  with pytest.raises(flags.IllegalFlagValueError, match=message):
    setattr(parsed_flags, flag, value)


def test_a_compiler_that_aborts_costs_one_row(parsed_flags):
  parsed_flags.topology = "v5p:of no such shape"
  row = fit.compile_row(fit.step_of(SMALL, "stash", "mlpwo", fit.BEHIND))
  assert row == dict.fromkeys(fit.KEYS) | dict(
    model="deepseek-v3",
    topology="v5p:of no such shape",
    layers=58,
    weights=fit.BEHIND,
    residuals="mlpwo",
    way="stash",
  )
  json.dumps(row)
  (broken,) = fit.broken_promises([row], NO_SPARE)
  assert "no answer" in broken


@pytest.mark.parametrize(
  "way, change, message",
  [
    ("stash", {"peak_bytes": 2031}, "1,031 bytes more than remat for 1,000 stashed"),
    ("stash", {"stash_copies": 1}, "copies the stash 1 times"),
    ("chunks", {"stash_copies": 2}, "copies the stash 2 times"),
    ("stash", {"flops": 101}, "101 FLOPs, 100 of save"),
    ("stash", {"flops": None}, "None FLOPs, 100 of save"),
    ("stash", {"cpu_seconds": 12.6}, "to trace and compile takes 12.6 s, 10.0 s of save"),
    ("save", {"fits": None}, "no answer"),
    ("stash_host", {"peak_bytes": 2031}, "1,031 bytes more than remat for 1,000 stashed"),
    ("stash_host", {"stash_copies": 1}, "copies the stash 1 times"),
    ("stash_host", {"stage_copies": 1}, "copies staged rows 1 times"),
    ("stash_host", {"stage_copies": None}, "copies staged rows None times"),
    ("stash_host", {"host_bytes": 301}, "301 bytes of host memory for 300 of rows"),
    ("stash_host", {"host_bytes": 299}, "299 bytes of host memory for 300 of rows"),
    ("stash_host", {"flops": 101}, "101 FLOPs, 100 of save"),
    ("stash_host", {"cpu_seconds": 50.0}, None),
    ("stash_host", {"peak_bytes": None}, None),
    ("stash", {}, None),
    ("stash", {"fits": False, "peak_bytes": None, "flops": None}, None),
  ],
)
def test_broken_promises(way, change, message):
  good = dict(fits=True, layers=58, stash_bytes=1000, peak_bytes=2000, stash_copies=0, flops=100)
  good |= dict(weights=fit.BEHIND, residuals="mlpwo", cpu_seconds=10.0, layer_bytes=7)
  at_host = dict(host_bytes=300, stash_host_bytes=300, stage_copies=0)
  rows = [good | dict(way=way) for way in ("save", "chunks", "stash")]
  rows.append(good | at_host | dict(way="stash_host"))
  rows.append(good | dict(way="remat", residuals=fit.NONE, peak_bytes=1000))
  rows = [row | change if row["way"] == way else row for row in rows]
  broken = fit.broken_promises(rows, NO_SPARE)
  assert len(broken) == (message is not None)
  assert message is None or message in broken[0]
  if change.get("peak_bytes") and broken:  # 11 bytes too many
    assert fit.broken_promises(rows, {fit.BEHIND: 1}) == broken
    assert fit.broken_promises(rows, {fit.BEHIND: 2}) == []


# Imbalance.


@pytest.mark.parametrize("ratio", imbalance.RATIOS)
def test_routing_is_as_imbalanced_as_asked(ratio):
  concentration = imbalance.concentration_of(DEEPSEEK_V3, ratio)
  rows = imbalance.device_rows(np.random.default_rng(7), DEEPSEEK_V3, concentration, False)
  assert rows.shape == (imbalance.RINGS, 58, 4)
  assert (rows.sum(-1) == 4 * 65_536).all()
  assert (rows.max(-1) / 65_536).mean() == pytest.approx(ratio, rel=0.02)


def test_recomputed_share():
  # One ring, three layers, two devices. Row 8 of the first is the last of 16.
  rows = np.array([[[5, 17], [8, 3], [1, 16]]])
  assert imbalance.recomputed_share(rows, 16) == 3 / 6  # 17, and 16 after 3, and 1 after 5 and 8
  assert imbalance.recomputed_share(rows, 17) == 1 / 6 * 2
  assert imbalance.recomputed_share(rows, 100) == 0
  assert imbalance.recomputed_share(rows, 0) == 1


def test_curves_fall_and_repeat():
  curves = imbalance.simulate(DEEPSEEK_V3)
  assert curves == imbalance.simulate(DEEPSEEK_V3)
  for (ratio, kind), shares in curves.items():
    assert 0.3 < shares[0] and shares == sorted(shares, reverse=True)
    if kind == "independent" and ratio <= 1.5:
      assert shares[-1] == 0
  lines = imbalance.table(curves)
  assert len(lines) == 1 + len(curves)
  imbalance.plot(curves, "title")


def test_each_place_of_the_weights_has_its_remat(parsed_flags, monkeypatch):
  monkeypatch.setattr(fit, "compile_row", answer)
  rows = [row for row in fit.measure(DEEPSEEK_V3) if row["layers"] == 58]
  found = [(row["weights"], row["residuals"]) for row in rows if row["way"] in ("remat", "stash")]
  of_remat = [(fit.BEFORE, fit.NONE), (fit.BEHIND, fit.NONE)]
  assert found == [
    of_remat[0],
    (fit.BEFORE, CHOICES[0]),
    of_remat[1],
    *((fit.BEHIND, residuals) for residuals in CHOICES[1:]),
  ]
  plot.plot(rows, 58, aot.hbm_bytes("v5p:8x8x4"), "title")


def pipeline_of(size, way, topology="v5p:8x8x4", ranks=16, microbatches=32):
  return pipeline_step.PipelineStep(size, topology, "1F1B", ranks, microbatches, way)


def test_the_stages_of_deepseek_v3():
  step = pipeline_of(DEEPSEEK_V3, "stash")
  # 58 layers in 16 stages; the first rank has 16 passes in flight, of 65,536 rows a layer.
  assert (step.stage_layers, step.page_rows) == (4, 512)
  assert step.capacity_rows == 16 * 4 * 65_536
  assert step.stash_bytes == step.capacity_rows * 2 * 2048 * 2
  assert step.worst_case_bytes == 4 * step.stash_bytes


@pytest.mark.long
def test_a_pipeline_keeps_the_rows_and_no_more():
  size = ModelSize(
    layers=4, width=512, hidden=1024, num_experts=8, top_k=2, batch=1, seq=4096, expert_axis=2
  )
  options = {"topology": "v5p:2x2x2", "ranks": 2, "microbatches": 4}
  save, stash = (
    pipeline_step.compile_step(pipeline_of(size, way, **options)) for way in pipeline_step.WAYS
  )
  assert save["fits"] and stash["fits"] and stash["stash_copies"] == 0
  step = pipeline_of(size, "stash", **options)
  spared = save["peak_bytes"] - stash["peak_bytes"]
  # Two passes are in flight; beside the stash one layer is restored at worst-case size.
  layer = step.worst_case_bytes // (2 * step.stage_layers)
  assert spared > step.worst_case_bytes - step.stash_bytes - 2 * layer


@pytest.mark.long
def test_deepseek_v3_in_a_pipeline():
  assert not pipeline_step.compile_step(pipeline_of(DEEPSEEK_V3, "save"))["fits"]
  stash = pipeline_step.compile_step(pipeline_of(DEEPSEEK_V3, "stash"))
  assert stash["fits"] and stash["stash_copies"] == 0
