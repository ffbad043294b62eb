"""`make plan`: arithmetic of memory, replays and traffic, against `make fit` and by hand."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from bench.fit.model_sizes import ModelSize, PRESETS
from bench.kernels import cases
from bench.plan import choices, memory, table, tiers
from bench.plan.setup import BEFORE, BEHIND, NAMES, Setup
from tests.helpers.checks import long

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
DEEPSEEK_V3 = PRESETS["deepseek-v3"]
GATE_AND_UP, ALL = NAMES[:2], NAMES[:3]
# Of a device of 4, 2 of 4 experts: 16 tokens, 32 rows of 64 at worst.
SMALL = ModelSize(
  layers=3, width=128, hidden=256, num_experts=4, top_k=2, batch=1, seq=16, expert_axis=2
)


def setup_of(size=SMALL, routing_weights=BEFORE, devices=4, **changed):
  """Without an optimizer, as `make fit` compiles it."""
  fields = dict(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=0, other_bytes=0)
  fields |= dict(hbm_bytes=10**9, host_bytes=10**9, hbm_bandwidth=1e9, host_bandwidth=1e8)
  fields |= dict(peak_flops=1e12, busiest=1.0)
  return Setup(size, devices, routing_weights, **fields | changed)


def choice_of(placement, names=GATE_AND_UP, margin=1.0):
  placements = {name: placement if name in names else "remat" for name in NAMES}
  return choices.Choice(placements, margin if placement in choices.STASHES else None)


# The compiler's, of `make fit`: docs/deepseek-v3.md. In GB, on 256 devices of v5p and on 512 of
# tpu7x, with room for the rows of balanced routing.
FIT = [
  # Those that it is checked against: nothing kept, gate and up saved, and in a stash.
  (BEFORE, "remat", (), 58, 256, 34.5),
  (BEFORE, "device", GATE_AND_UP, 58, 256, 158.9),
  (BEFORE, "stash", GATE_AND_UP, 58, 256, 69.3),
  # And others.
  (BEFORE, "device", GATE_AND_UP, 58, 512, 154.0),
  (BEHIND, "remat", (), 58, 256, 43.4),
  (BEHIND, "device", ["mlpwo"], 58, 256, 251.9),
  (BEHIND, "stash", ["mlpwo"], 58, 256, 93.2),
  (BEHIND, "device", ALL, 58, 256, 376.4),
  (BEHIND, "stash", ALL, 58, 256, 127.2),
  (BEHIND, "stash", ALL, 36, 256, 86.1),
]


@pytest.mark.parametrize("routing_weights, placement, names, layers, devices, gigabytes", FIT)
def test_memory_is_what_the_compiler_says(
  routing_weights, placement, names, layers, devices, gigabytes
):
  size = dataclasses.replace(DEEPSEEK_V3, layers=layers)
  setup = setup_of(size, routing_weights, devices)
  parts = memory.hbm_parts(setup, choice_of(placement, names))
  is_checked = (routing_weights, layers, devices) == (BEFORE, 58, 256)
  assert sum(parts.values()) / 1e9 == pytest.approx(gigabytes, rel=0.015 if is_checked else 0.05)


def test_the_figures_are_those_of_the_page():
  page = (ROOT / "docs" / "deepseek-v3.md").read_text()
  assert all(str(gigabytes) in page for *_, gigabytes in FIT)


def test_memory_by_hand():
  setup = setup_of(optimizer_bytes=8, other_bytes=77)
  parameters = 3 * 4 * 3 * 128 * 256 // 4 + 3 * 128 * 4  # A quarter of the experts, all routers.
  wide, narrow = 2 * 64 * 128, 2 * 64 * 256
  assert memory.hbm_parts(setup, choice_of("device", ["mlpwi_0", "x_sorted"])) == {
    "parameters": 2 * parameters,
    "gradients": 2 * parameters,
    "optimizer": 8 * parameters,
    "other": 77,
    "inputs of layers": (3 + 2) * 2 * 16 * 128,
    "kept": 3 * (wide + narrow),
    "stash": 0,
    "in flight": 0,
    "one layer": 2 * wide + 3 * narrow + 3 * (2 * 2 * 128 * 256),
  }
  # 3 layers of 32 rows times the margin, of whole tiles of 8.
  stash = memory.hbm_parts(setup, choice_of("stash", margin=1.3))["stash"]
  assert stash == 3 * 48 * 2 * 256 * 2
  offload = choice_of("offload", ["mlpwi_0", "mlpwo"])
  assert memory.hbm_parts(setup, offload)["in flight"] == wide + narrow
  assert memory.host_arrays(setup, offload) == [3 * narrow, 3 * wide]


def test_memory_of_two_tiers_by_hand():
  setup = setup_of()
  one = memory.hbm_parts(setup, choice_of("stash", margin=1.3))
  choice = choices.Choice(choice_of("stash_host").placements, 1.3, staging_rows=16)
  two = memory.hbm_parts(setup, choice)
  row = 2 * 256 * 2
  # Of 48 rows of each of 3 layers 16 are in host memory, and 16 in the stage; and room for a stage.
  assert two == one | {"stash": 3 * 32 * row, "in flight": 16 * row}
  assert memory.host_arrays(setup, choice) == 2 * [4 * 16 * row // 2]


def test_a_layer_stages_the_fewest_rows_with_which_it_fits():
  of = choice_of("stash_host", margin=1.3)
  row, layers = 2 * 256 * 2, 3
  hbm = lambda choice: sum(memory.hbm_parts(setup_of(), choice).values())
  all_in_hbm = hbm(of)
  assert all_in_hbm == hbm(choice_of("stash", margin=1.3))
  # A row less in HBM for each layer but one, whose rows are in the stage.
  for short, staged in (1, 8), (8 * row * (layers - 1), 8), (8 * row * (layers - 1) + 1, 16):
    found = tiers.with_staging(setup_of(hbm_bytes=all_in_hbm - short), of)
    assert found.staging_rows == staged
    assert hbm(found) <= all_in_hbm - short
  most = 48 * row * (layers - 1)
  assert tiers.with_staging(setup_of(hbm_bytes=all_in_hbm - most), of).staging_rows == 48
  assert tiers.with_staging(setup_of(hbm_bytes=all_in_hbm - most - 1), of) is None
  assert tiers.with_staging(setup_of(hbm_bytes=all_in_hbm), of) is None
  of_one = setup_of(dataclasses.replace(SMALL, layers=1), hbm_bytes=10**6)
  assert tiers.with_staging(of_one, of) is None  # Its rows are in the stage.
  assert tiers.with_staging(of_one, choice_of("stash")) == choice_of("stash")


def deepseek_v3(**changed):
  """On v5p, as far as the link and the matmuls go."""
  fields = dict(host_bandwidth=15e9, peak_flops=459e12, hbm_bandwidth=2765e9)
  return setup_of(DEEPSEEK_V3, devices=256, **fields | changed)


def test_when_recomputing_is_cheaper():
  """The figures of docs/host.md: of 65,536 rows, 8,192 bytes each of gate and up."""
  setup = deepseek_v3()
  matmul = 2 * 65_536 * 7168 * 2048 / 459e12
  assert setup.hiding_seconds == pytest.approx(3 * matmul) and round(1e3 * matmul, 2) == 4.19
  assert tiers.hidden_rows(setup, GATE_AND_UP) == int(3 * matmul * 15e9 / 8192) // 8 * 8 == 23_024
  of_layer = deepseek_v3(forward_seconds=0.049)
  assert tiers.hidden_rows(of_layer, GATE_AND_UP) == int(0.049 * 15e9 / 8192) // 8 * 8
  share = tiers.spill_share(setup, GATE_AND_UP)
  assert share == pytest.approx(2 * matmul / (2 * 65_536 * 8192 / 15e9))
  assert round(100 * share) == 12
  behind = deepseek_v3(routing_weights=BEHIND)
  assert tiers.spill_share(behind, ["mlpwo"]) == pytest.approx(
    matmul / (2 * 65_536 * 14_336 / 15e9)
  )
  assert tiers.spill_share(setup, ["mlpwo"]) == 0  # Which nothing needs then.


def test_two_tiers_are_chosen_when_they_pay():
  """Of HBM for half of the rows: while the link keeps up; and not at a tenth of its speed."""
  stash = choice_of("stash")
  needed = sum(memory.hbm_parts(deepseek_v3(), stash).values())
  fields = dict(hbm_bytes=needed - 58 * 65_536 * 8192 // 2, host_bytes=10**11)
  every = [choice_of("remat"), stash, choice_of("stash_host")]
  rows = table.rows_of(deepseek_v3(forward_seconds=0.049, **fields), every)
  assert [row.obstacle for row in rows] == [None, None, "HBM"]
  best, remat, _ = rows
  assert best.choice.staging_rows == 33_344 and remat.choice == every[0]
  assert best.cost.waiting == 0 and best.hbm_bytes <= fields["hbm_bytes"]
  assert best.host_bytes == 59 * best.choice.staging_rows * 8192
  # Behind its own matmuls alone 23,024 rows hide: the others wait, which costs what it says.
  slow = deepseek_v3(**fields)
  rows = table.rows_of(slow, every)
  cost = {row.choice.staging_rows: row.cost for row in rows}[33_344]
  late = 33_344 * 8192 / 15e9 - slow.hiding_seconds
  assert cost.waiting == pytest.approx(late / (3 * slow.hiding_seconds))
  assert rows[0].choice.staging_rows  # Waiting costs 14.9% of the matmuls, replaying two 22.2%.
  rows = table.rows_of(dataclasses.replace(slow, host_bandwidth=1.5e9), every)
  assert rows[0].choice == every[0]
  # Without a row that HBM has no room for there is nothing to send.
  rows = table.rows_of(deepseek_v3(hbm_bytes=needed), every)
  assert {row.choice.staging_rows for row in rows} == {0} and len(rows) == 2


def test_links_to_the_host_have_sources():
  assert {*cases.HOST_LINKS} < {*cases.BANDWIDTH}
  for link in cases.HOST_LINKS.values():
    assert link.source.startswith("https://") and 1e9 < link.bytes_per_second < 1e11
  assert [chip for chip, link in cases.HOST_LINKS.items() if link.is_assumed] == ["v5p"]


def test_rows_of_a_stash_are_padded_to_lanes():
  setup = setup_of(dataclasses.replace(SMALL, hidden=130))
  assert memory.hbm_parts(setup, choice_of("stash"))["stash"] == 3 * 32 * 2 * 256 * 2


@pytest.mark.parametrize(
  "routing_weights, names, matmuls",
  [
    (BEFORE, (), 11),
    (BEFORE, ["mlpwo"], 11),
    (BEFORE, ["mlpwi_0"], 10),
    (BEFORE, GATE_AND_UP, 9),
    (BEHIND, (), 12),
    (BEHIND, ["mlpwo"], 11),
    (BEHIND, GATE_AND_UP, 10),
    (BEHIND, ALL, 9),
  ],
)
def test_replays(routing_weights, names, matmuls):
  """The table of docs/choosing-residuals.md, which jax counts there."""
  setup = setup_of(routing_weights=routing_weights)
  for placement in "device", "stash":
    cost = choices.cost_of(setup, choice_of(placement, names), {1.0: 0.0})
    assert 9 * cost.replayed == pytest.approx(matmuls - 9)


def test_cost_by_hand():
  setup = setup_of()
  total = 9 * 2 * 32 * 128 * 256 / 1e12
  wide, narrow = 2 * 128, 2 * 256  # Bytes of a row; 32 rows of 64.
  gather = 2 * 64 * wide
  traffic = lambda *args: choices.cost_of(setup, *args).traffic * total * 1e9
  assert traffic(choice_of("remat"), {}) == pytest.approx(gather + 2 * 32 * narrow)
  assert traffic(choice_of("device"), {}) == pytest.approx(gather + 2 * 4 * 64 * narrow)
  stash = 2 * (3 * 32 + 64) * narrow
  assert traffic(choice_of("stash"), {1.0: 0.0}) == pytest.approx(gather + stash)
  assert traffic(choice_of("device", ["x_sorted"]), {}) == pytest.approx(
    4 * 64 * wide + 2 * 32 * narrow
  )
  # Of a quarter of the layers, gate and up do not fit.
  cost = choices.cost_of(setup, choice_of("stash"), {1.0: 0.25})
  assert cost.replayed == pytest.approx(2 * 0.25 / 9)
  assert traffic(choice_of("stash"), {1.0: 0.25}) == pytest.approx(
    gather + stash + 0.25 * 2 * 32 * narrow
  )
  # Of two tiers: 16 rows of each layer go through HBM once more each way, and over the link.
  two = choices.Choice(choice_of("stash_host").placements, 1.0, staging_rows=16)
  assert traffic(two, {1.0: 0.0}) == pytest.approx(gather + stash + 2 * 2 * 16 * narrow)
  cost = choices.cost_of(setup, two, {1.0: 0.0})
  assert cost.waiting * total == pytest.approx(2 * 16_384 / 1e8 - total)
  hides = lambda seconds: setup_of(forward_seconds=seconds)
  assert choices.cost_of(hides(16_384 / 1e8), two, {1.0: 0.0}).waiting == 0
  assert choices.cost_of(hides(1e-4), two, {1.0: 0.0}).waiting * total == pytest.approx(6.384e-5)
  # 65,536 bytes go out while 3 matmuls run, and come back while 6 do.
  cost = choices.cost_of(setup, choice_of("offload"), {})
  assert cost.waiting * total == pytest.approx(2 * 65_536 / 1e8 - total)
  assert cost.total == cost.replayed + cost.traffic + cost.waiting
  quick = setup_of(host_bandwidth=1e12)
  assert choices.cost_of(quick, choice_of("offload"), {}).waiting == 0


def test_choices():
  groups = choices.useful(setup_of(), [["mlpwi_0", "mlpwi_1"], ["mlpwo"], ["x_sorted"]])
  assert groups == [["mlpwi_0", "mlpwi_1"], ["x_sorted"]]
  assert len(choices.useful(setup_of(routing_weights=BEHIND), [["mlpwo"], ["x_sorted"]])) == 2
  found = list(choices.choices_of(setup_of(), groups, [1.0, 1.25]))
  of_a_stash = 4 * 4 - 3 * 3
  assert len(found) == 3 * 3 + 2 * 2 * of_a_stash
  assert all((choice.margin is None) == (not choice.names_in(*choices.STASHES)) for choice in found)
  assert not any(choice.names_in("stash") and choice.names_in("stash_host") for choice in found)
  assert all(choice.placements["mlpwi_0"] == choice.placements["mlpwi_1"] for choice in found)
  found = list(choices.choices_of(setup_of(host_bandwidth=0), groups, [1.0]))
  assert len(found) == 3 * 3
  assert not any(choice.names_in("offload", "stash_host") for choice in found)


def test_more_room_recomputes_less():
  shares = choices.recomputed_shares(setup_of(DEEPSEEK_V3, devices=256, busiest=1.5), [1.0, 1.25])
  # The row of docs/capacity.md.
  assert [round(100 * share, 1) for share in shares.values()] == [10.7, 4.0]


def row_of(cost, hbm, host=0):
  return table.Row(choice_of("remat"), {"kept": hbm}, host, choices.Cost(cost, 0, 0), None)


def test_rows_that_fit_come_first_and_the_quickest_of_them():
  setup = setup_of(DEEPSEEK_V3, BEHIND, 256, hbm_bytes=10**11, host_bytes=10**11)
  every = [choice_of("remat"), choice_of("stash"), choice_of("device"), choice_of("offload")]
  rows = table.rows_of(setup, [*every, choice_of("offload", ["mlpwo"])])
  assert [row.obstacle for row in rows] == [None, None, "HBM", "host", "array"]
  assert rows[0].cost.total < rows[1].cost.total
  assert rows[0].choice.margin == 1.0 and rows[1].choice == every[0]
  with_room = dataclasses.replace(setup, host_bytes=2 * 10**11)
  assert [row.obstacle for row in table.rows_of(with_room, every)] == [None, None, None, "HBM"]


def test_what_another_one_beats_is_left_out():
  rows = [row_of(1, 5), row_of(1, 6), row_of(2, 5), row_of(2, 3), row_of(1, 5), row_of(3, 4, 0)]
  assert table.not_beaten(rows) == [rows[0], rows[3]]
  assert table.not_beaten([row_of(1, 5, 2), row_of(2, 5, 1)]) == [row_of(1, 5, 2), row_of(2, 5, 1)]


def test_what_to_paste():
  setup = setup_of(routing_weights=BEHIND)
  pasted = table.paste_of(setup, choice_of("stash", margin=1.25))
  assert pasted == [
    "Plain:",
    '  policy = ps.policy_by_name({"mlpwi_0": "stash", "mlpwi_1": "stash"})',
    "  layer = jax.checkpoint(layer, policy=policy)",
    "  model = ps.threaded(model, capacity_rows=120)",
    "MaxText:",
    "  python -m pallas_stash.integrations.maxtext train CONFIG \\",
    "    remat_policy=custom moe_mlpwi_0=stash moe_mlpwi_1=stash stash_capacity=1.25",
  ]
  two = choices.Choice(choice_of("stash_host").placements, 1.25, staging_rows=16)
  assert table.paste_of(setup, two) == [
    "Plain:",
    '  policy = ps.policy_by_name({"mlpwi_0": "stash_host", "mlpwi_1": "stash_host"})',
    "  layer = jax.checkpoint(layer, policy=policy)",
    "  model = ps.threaded(model, capacity_rows=72, host_capacity_rows=48, staging_rows=16)",
    "MaxText has no setting for a stash of two tiers.",
  ]
  pasted = table.paste_of(setup, choice_of("device"))
  assert not [line for line in pasted if "threaded" in line or "stash" in line]
  assert pasted[-1].endswith("moe_mlpwi_1=device")


def test_the_report_of_two_tiers():
  setup = deepseek_v3(hbm_bytes=60 * 10**9, host_bytes=10**11)
  rows = table.rows_of(setup, [choice_of("remat"), choice_of("stash_host")])
  lines = table.report(setup, rows, [GATE_AND_UP])
  staged = rows[0].choice.staging_rows
  assert lines[0].split()[:3] == ["mlpwi_0+mlpwi_1", "margin", "staged"]
  assert lines[1].split()[:3] == ["stash_host", "1", str(staged)]
  assert lines[2].split()[:3] == ["remat", "-", "-"]
  text = " ".join(lines)
  assert f"Each layer stages {staged} rows for the host; 23024 hide behind a forward pass" in text
  assert "where they are more than 12% of a layer's, recomputing it takes less time." in text
  assert max(map(len, lines)) <= 100


def test_where_nothing_fits_it_says_what_the_least_takes():
  setup = setup_of(DEEPSEEK_V3, devices=256, hbm_bytes=3 * 10**10)
  rows = table.rows_of(setup, [choice_of("device"), choice_of("remat")])
  lines = table.report(setup, rows, [GATE_AND_UP])
  assert " ".join(lines[-2:]).startswith(
    "Nothing fits. The least takes 34.1 GB of 30.0: parameters 5.3, grad"
  )
  assert "Plain:" not in lines and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
  "change, message",
  [
    ({"expert_axis": 3}, "devices=4 must be a multiple of expert_axis=3"),
    ({"num_experts": 5}, "num_experts=5 must be a multiple of ep=2"),
    ({"top_k": 5}, "top_k=5 must be at most num_experts=4"),
  ],
)
def test_what_does_not_go_together_is_said(change, message):
  with pytest.raises(ValueError, match=message):
    setup_of(dataclasses.replace(SMALL, **change))


# In processes of their own: its flags have names that those of `make fit` have.


def run(output, *arguments):
  command = [sys.executable, "-m", "bench.plan", f"--output={output}", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.long
def test_the_page_shows_what_it_prints(tmp_path):
  page = (ROOT / "docs" / "deepseek-v3.md").read_text()
  process = run(tmp_path, "--only_best")
  assert process.returncode == 0, process.stderr
  assert f"```text\n{process.stdout}```" in page
  rows = json.loads((tmp_path / "plan.json").read_text())
  of_two_tiers = [row for row in rows if row["choice"]["staging_rows"]]
  assert len(rows) - len(of_two_tiers) == 3 * 3 + 4 * 7
  assert 0 < len(of_two_tiers) < 4 * 7  # Not where all fits, or nothing would.
  assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.long
def test_sizes_and_memory_are_those_of_the_flags(tmp_path):
  """Of a chip whose link is not known, without offload."""
  process = run(tmp_path, "--chip=tpu7x", "--layers=2", "--hbm_gb=20", "--other_gb=19.5")
  assert process.stdout.startswith("deepseek-v3, 2 MoE layers, 256 devices of tpu7x\n")
  assert "give --host_gb_per_second" in process.stdout and "Nothing fits" in process.stdout
  rows = json.loads((tmp_path / "plan.json").read_text())
  assert len(rows) == 2 * 2 + 4 * 5
  assert all(row["hbm"]["other"] == 19_500_000_000 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
  "flag, message",
  [
    long(
      "--group=mlpwi_0+mlp", "must be of ['mlpwi_0', 'mlpwi_1', 'mlpwo', 'x_sorted'], joined by +"
    ),
    long("--margins=1,nan", "must be numbers above zero"),
    ("--devices=6", "plan: devices=6 must be a multiple of expert_axis=4"),
  ],
)
def test_flags_are_checked(tmp_path, flag, message):
  process = run(tmp_path, flag)
  assert process.returncode and message in process.stderr
  assert "Traceback" not in process.stderr
