"""What is sampled is the same every time, and what fails is printed as a test."""

import sys
import types

from hypothesis import core, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests.helpers.kernel_check import check, UNEVEN
from tests.helpers.sampling import as_test, run_sampled

pytestmark = pytest.mark.once


def draw(strategy, max_examples):
  drawn = []
  run_sampled(lambda example: drawn.append(example), max_examples=max_examples, example=strategy)
  return drawn


def test_the_same_examples_whatever_is_imported(tmp_path, monkeypatch):
  """Integers are not taken from the source of other modules."""
  numbers = st.lists(st.integers(), min_size=20, max_size=20)
  before = draw(numbers, 20)
  source = tmp_path / "constants.py"
  source.write_text("".join(f"A{i} = {1_000_003 + i}\n" for i in range(1000)))
  module = types.ModuleType("constants")
  module.__file__ = str(source)
  monkeypatch.setitem(sys.modules, "constants", module)
  assert draw(numbers, 20) == before


def test_nothing_is_remembered_and_no_clock_is_read():
  assert settings().database is None and settings().deadline is None


def test_the_seed_decides(monkeypatch):
  drawn = []
  for seed in 1, 1, 2:
    monkeypatch.setattr(core, "global_force_seed", seed)
    drawn.append(draw(st.integers(), 20))
  assert drawn[0] == drawn[1] != drawn[2]


def test_what_fails_is_printed_as_a_test():
  def check_sum(limit, numbers):
    assert sum(numbers) < limit

  with pytest.raises(AssertionError) as failure:
    run_sampled(check_sum, 10, max_examples=200, numbers=st.lists(st.integers(0, 99)))
  expected = "def test_check_sum_of_one():\n  check_sum(10, numbers=[10])\n"
  assert expected in failure.value.__notes__


def test_arguments_are_printed_as_source():
  args = "xla", UNEVEN, "int8"
  example = {"layout": ([1, 2], None), "start": np.array([3], np.int8), "seed": (np.int32(4),)}
  source = as_test(check, args, example)
  called = []
  names = {"np": np, "Case": type(UNEVEN), "check": lambda *args, **kw: called.append((args, kw))}
  exec(source + "test_check_of_one()", names)
  ((found, keywords),) = called
  assert found == args and keywords == example
  assert keywords["start"].dtype == np.int8
