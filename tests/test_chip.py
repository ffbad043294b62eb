"""What `make chip` runs on a TPU is run here, smaller, on what is there."""

import subprocess
import sys

import pytest

from bench import chip
from tests.support import ON_TPU


@pytest.mark.parametrize("step", chip.steps(is_rehearsal=True))
def test_steps_run(step, monkeypatch):
  monkeypatch.setattr(chip, "DTYPES", ("bfloat16", "int8"))
  assert chip.steps(is_rehearsal=True)[step]()


@pytest.mark.parametrize("changed", ["write", "read"])
def test_a_wrong_bit_is_seen(changed, monkeypatch):
  function = getattr(chip, changed)
  wrong = lambda *args: function(*args).at[7, 100].set(1)
  monkeypatch.setattr(chip, changed, wrong)
  with pytest.raises(AssertionError, match="bfloat16, a prefix, stash row 0: 1 rows differ.*row 7"):
    chip.copy_bits("bfloat16", 256)


@pytest.mark.skipif(ON_TPU, reason="there is a TPU")
def test_without_a_tpu_it_says_so():
  command = [sys.executable, "-m", "bench.chip"]
  run = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert run.returncode == 0
  assert "chip NOT RUN: there is no TPU here" in run.stdout
