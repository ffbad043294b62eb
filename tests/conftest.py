"""Runs the suite on a host without a TPU, for TPUs: interpreted there, compiled ahead of time.

On a TPU host nothing is set and the same tests run the compiled kernels.
"""

import collections
import gc
from importlib import metadata
import itertools
import os

from bench.tpu.environment import ENVIRONMENT, has_tpu

OPTIMIZATION = "xla_backend_optimization_level"

if not has_tpu():
  # Before jax is imported: eight devices, and a TPU compiler that looks for no TPU.
  flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
  # Most of the time would be spent on making code fast that runs once, for this CPU alone: what is
  # compiled for a TPU stays the same. Tests of bits ask for `FUSED` or `OPTIMIZED`; `make
  # test-long` runs all tests as users compile.
  if OPTIMIZATION not in flags:
    flags += f" --{OPTIMIZATION}=0"
    if metadata.version("jaxlib").startswith("0.10."):  # Later ones have no other emitter.
      flags += " --xla_cpu_use_fusion_emitters=false"  # Half of the time to compile.
  os.environ["XLA_FLAGS"] = flags.strip()
  os.environ.update(ENVIRONMENT)

from hypothesis import settings  # noqa: E402
import pytest  # noqa: E402

from tests.helpers import sampling, share  # noqa: E402

settings.register_profile("pallas_stash", sampling.PROFILE)
settings.load_profile("pallas_stash")

# What the interpreter prints where it could raise an error: of a race not every jax does, and of a
# semaphore that is still raised when its kernel ends none.
COMPLAINTS = "RACE DETECTED", "has non-zero count"


def pytest_addoption(parser):
  parser.addoption("--share", choices=share.SHARES, help="of `.ci/run`: see tests/helpers/share.py")


@pytest.hookimpl(trylast=True)  # Behind `-m`: what it leaves is shared out.
def pytest_collection_modifyitems(config, items):
  if name := config.getoption("share"):
    kept = share.share_of(items, name)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_finish():
  """Looks for garbage less often: each time it goes through all programs that jax keeps."""
  gc.freeze()
  gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def same_examples():
  with sampling.only_its_own_constants():
    yield


@pytest.fixture(autouse=True)
def no_races(capsys):
  """Fails a test in which the interpreter complained."""
  yield
  printed = capsys.readouterr().out
  assert not any(complaint in printed for complaint in COMPLAINTS), printed


def pytest_terminal_summary(terminalreporter):
  """Says what each file took, if there are several."""
  seconds = collections.Counter()
  for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
    seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0)
  for name, of_file in seconds.most_common() if len(seconds) > 1 else ():
    terminalreporter.write_line(f"{of_file:7.1f} s {name}")
