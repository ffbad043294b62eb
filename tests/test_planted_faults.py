"""The checks of the kernels fail for kernels that are wrong.

Each fault is planted in a copy of a kernel, and the suite's own check of the kernels, with its own
edge cases, must fail for that copy. What no check can see is written down in `UNDETECTED`, and must
stay unseen: a fault that is caught one day is to move up.
"""

from concurrent import futures
import dataclasses
import functools
import inspect

import jax
from jax.experimental.pallas import tpu as pltpu
import pytest

from pallas_stash import kernels
from tests.conftest import COMPLAINTS
from tests.helpers import kernel_check
from tests.helpers.kernel_check import check, edge_cases, kernels_of
from tests.helpers.planted_faults import DETECTED, UNDETECTED
from tests.helpers.planting import COMPACT, EXPAND, Fault, plant
from tests.helpers.support import ON_TPU

pytestmark = [
  pytest.mark.once,
  pytest.mark.skipif(ON_TPU, reason="plants faults in interpreted kernels"),
]

FIRST_TRIED = 8, 3, 6  # The edge cases that catch most.


@functools.cache
def quickly_compiled(fault, case, dtype, interpret):
  """Returns the kernels of the suite, with a fault or None, compiled without optimisation."""
  options = {"xla_backend_optimization_level": 0}

  def compiled(kernel):
    kernel = jax.jit(inspect.unwrap(kernel), compiler_options=options)

    def run(*args):
      with plant(fault):
        return kernel(*args)

    return run

  found = kernels_of.__wrapped__("mosaic_interpret", case, dtype, interpret)
  return dict(zip((COMPACT, EXPAND), map(compiled, found), strict=True))


def complaint_of(fault, monkeypatch, capsys):
  """Returns what the suite would say of a kernel with the fault, "" if nothing."""
  interpret = dataclasses.replace(kernels.INTERPRET, **dict(fault.interpret))
  args = fault.case, fault.dtype, interpret
  used = dict(quickly_compiled(None, *args))
  used[fault.kernel] = quickly_compiled(fault, *args)[fault.kernel]
  monkeypatch.setattr(kernel_check, "kernels_of", lambda *_: (used[COMPACT], used[EXPAND]))
  inputs = list(enumerate(edge_cases(fault.case)))
  for seed, (layout, start) in sorted(inputs, key=lambda pair: pair[0] not in FIRST_TRIED):
    try:
      in_a_thread(check, "mosaic_interpret", fault.case, fault.dtype, layout, start, seed)
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
      pltpu.reset_tpu_interpret_mode_state()  # As it asks for after an error.
      capsys.readouterr()  # For `no_races`: it was expected.
      return f"{layout} {start}: {error}"
    printed = capsys.readouterr().out
    if any(complaint in printed for complaint in COMPLAINTS):
      return f"{layout} {start}: {printed}"
  return ""


def in_a_thread(fun, *args):
  """Calls a function in a thread of its own.

  JAX keeps the order of effects by a token for each thread, and after an error in an effect that
  token fails all that comes behind it.
  """

  def call():
    fun(*args)
    jax.effects_barrier()

  with futures.ThreadPoolExecutor(1) as threads:
    threads.submit(call).result()


def parameters(faults, quick):
  """The faults, by their names; all but so many of them for long."""
  mark = lambda i: pytest.mark.long if i >= quick else ()
  return [pytest.param(fault, id=fault.name, marks=mark(i)) for i, fault in enumerate(faults)]


@pytest.mark.parametrize("fault", [fault for kind in DETECTED for fault in parameters(kind, 1)])
def test_a_fault_is_caught(fault, monkeypatch, capsys):
  assert complaint_of(fault, monkeypatch, capsys)


@pytest.mark.parametrize("fault", parameters(UNDETECTED, 0))
def test_a_fault_is_not_caught(fault, monkeypatch, capsys):
  assert not complaint_of(fault, monkeypatch, capsys), fault.reason


def test_what_a_fault_changes_must_be_there():
  with pytest.raises(ValueError, match="'gone': 'no text' is 0 times .* and must be there once"):
    plant(Fault("gone", COMPACT, "no text", ""))
