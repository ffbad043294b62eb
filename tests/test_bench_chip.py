"""`make chip`: its steps are right where there is no chip, and it says so where there is none."""

import dataclasses
import subprocess
import sys

import jax
import pytest

from bench.chip import copies, steps
from bench.chip import main as chip
from tests.helpers.checks import long
from tests.helpers.support import ON_TPU

pytestmark = [
  pytest.mark.once,
  pytest.mark.skipif(ON_TPU, reason="`make chip` itself runs on a TPU"),
]

INTERPRETED = dataclasses.replace(
  steps.SMALL,
  implementation="mosaic_interpret",
  dtypes=("bfloat16",),
)


@pytest.mark.long
def test_every_step_runs_here(capsys):
  assert chip.run(list(steps.STEPS), steps.SMALL) == []
  printed = capsys.readouterr().out
  assert printed.count("    ok in ") == len(steps.STEPS)
  assert "compact" in printed and "GB/s" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", ["bits", "many_calls", "large", "matmuls", "mlp"])
def test_steps_with_the_interpreted_kernels(name):
  assert chip.run([name], INTERPRETED) == []


@pytest.mark.parametrize(
  "name", ["bits", "cores", "many_calls", "large", *map(long, ("gradients", "matmuls", "mlp"))]
)
def test_a_step_sees_rows_that_are_wrong(name, monkeypatch, capsys):
  """A row that is not written of each group; and gradients of a stash that is never sealed."""

  def one_less(*args, **options):
    *args, sizes, starts = args
    return update(*args, sizes - 1, starts, **options)

  update = copies.update
  for module in copies, steps:
    monkeypatch.setattr(module, "update", one_less)
  copies.jitted.cache_clear()
  monkeypatch.setattr(steps.ps, "seal", lambda x, stash: x)
  try:
    assert chip.run([name], steps.SMALL) == [name]
  finally:
    copies.jitted.cache_clear()
  assert steps.STEPS[name].if_not in capsys.readouterr().out


def test_a_step_sees_that_kernels_are_missing():
  scale = dataclasses.replace(steps.SMALL, is_tpu=True)
  assert chip.run(["kernels"], scale) == ["kernels"]


def test_without_a_tpu_it_says_so():
  if jax.default_backend() != "cpu":
    pytest.skip("has an accelerator")
  command = [sys.executable, "-m", "bench.chip"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0
  assert "NOTHING WAS RUN. There is no TPU here: JAX has cpu" in done.stdout
