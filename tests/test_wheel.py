"""The wheel is all that an environment needs in which there is nothing else."""

import os
import pathlib
import subprocess
import sys
import venv

import pytest

import pallas_stash as ps

pytestmark = [pytest.mark.long, pytest.mark.once]

PROGRAM = """
import importlib.resources
import jax.numpy as jnp
import pallas_stash as ps

assert importlib.resources.files(ps).joinpath("py.typed").is_file()
sizes, rows = jnp.array([2, 1]), jnp.arange(12.0).reshape(4, 3)
operand = ps.dynamic_update_slice(jnp.zeros((5, 3)), rows, (1, 0), group_sizes=sizes)
print(ps.__version__, jnp.sum(operand[1:4] == rows[:3]))
"""


def run(*command, **options):
  """Returns what a command prints; it sees no other package than those of its environment."""
  environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
  found = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
  assert found.returncode == 0, found.stderr
  return found.stdout


def test_a_wheel_works_in_an_empty_environment(tmp_path):
  root = pathlib.Path(__file__).parent.parent
  run(sys.executable, "-m", "build", "--outdir", tmp_path, root)  # By way of the source archive.
  (wheel,) = tmp_path.glob("*.whl")
  venv.create(tmp_path / "env", with_pip=True)
  python = tmp_path / "env" / "bin" / "python"
  run(python, "-m", "pip", "install", "--quiet", wheel)
  assert run(python, "-c", PROGRAM, cwd=tmp_path).split() == [ps.__version__, "9"]
