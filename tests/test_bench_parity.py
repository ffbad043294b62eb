"""`make parity`: what it takes for a failure, and its table."""

import numpy as np
import pytest

from bench.parity import main
from reference.modes import MODES

pytestmark = pytest.mark.once

STEPS, DEVICES = 3, 8
ROWS = main.CONFIG.layers * main.BATCH * main.SEQ * main.CONFIG.top_k  # Of all devices.


def trainings():
  """Returns trainings in which all is well, saved and with the stash."""
  losses = np.array([4.0, 3.0, 2.0], np.float32)
  sizes = np.ones((STEPS, main.CONFIG.layers, main.CONFIG.num_experts), int)
  peak_rows = np.full((STEPS, DEVICES), ROWS // DEVICES)
  of_stash = peak_rows, np.zeros_like(peak_rows)
  saved = {mode: main.Training(losses.copy(), sizes.copy(), None, None) for mode in MODES}
  stashed = {mode: main.Training(losses.copy(), sizes.copy(), *of_stash) for mode in MODES}
  return saved, stashed


def one_bit_more(losses, step):
  losses = losses.copy()
  losses[step] = np.nextafter(losses[step], np.float32(9))
  return losses


def test_all_is_well():
  assert main.check(*trainings()) == []
  saved, _ = trainings()
  saved["fsdp"] = saved["fsdp"]._replace(losses=one_bit_more(saved["fsdp"].losses, 1))
  assert main.check(saved, {}) == []  # Between modes, a bit is rounding.


@pytest.mark.parametrize(
  "change, message",
  [
    (
      lambda t: dict(losses=one_bit_more(t.losses, 1)),
      "the losses of steps [2] with the stash are",
    ),
    (lambda t: dict(losses=t.losses * np.float32("nan")), "the losses of steps [1, 2, 3]"),
    (lambda t: dict(losses=t.losses[::-1]), "the loss does not fall"),
    (lambda t: dict(peak_rows=t.peak_rows - 1), "0 pushes lost"),
    (lambda t: dict(lost_pushes=t.lost_pushes + 1), "24 pushes lost"),
  ],
)
def test_what_is_wrong_with_a_stash(change, message):
  saved, stashed = trainings()
  stashed["all_to_all"] = stashed["all_to_all"]._replace(**change(stashed["all_to_all"]))
  failures = main.check(saved, stashed)
  assert any(f.startswith("all_to_all: ") and message in f for f in failures), failures
  assert all(f.startswith("all_to_all: ") for f in failures)


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda t: dict(losses=t.losses * np.float32(1.00001)), "a loss differs by 1.0e-05 of ring's"),
    (lambda t: dict(losses=t.losses * np.float32("nan")), "a loss differs by nan of ring's"),
    (lambda t: dict(sizes=t.sizes + 1), "other rows than ring's are sent to the experts"),
  ],
)
def test_what_is_wrong_between_modes(change, message):
  saved, _ = trainings()
  saved["dense_ep"] = saved["dense_ep"]._replace(**change(saved["dense_ep"]))
  (failure,) = main.check(saved, {})
  assert failure.startswith("dense_ep: ") and message in failure


def test_the_table_marks_what_differs():
  saved, stashed = trainings()
  stashed["fsdp"] = stashed["fsdp"]._replace(losses=one_bit_more(saved["fsdp"].losses, 2))
  head, *steps = (line.split() for line in main.table_of(saved, stashed))
  assert head[:6] == ["step", *MODES]
  assert [line[0] for line in steps] == ["1", "2", "3"]
  assert [line[6] for line in steps] == ["identical", "identical", "NOT"]
  assert "fsdp" in steps[2]
