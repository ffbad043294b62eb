"""Sampled tests: the same examples every time, or fresh ones; what fails is a test to paste.

The seed is `--hypothesis-seed`: pyproject.toml has a fixed one, `make test-long` takes a fresh one.
Nothing else decides what is drawn: no clock, no file, and not which modules are imported.
"""

import dataclasses
from unittest import mock

from hypothesis import given, HealthCheck, settings
from hypothesis.internal.conjecture import providers
import numpy as np

PROFILE = settings(
  derandomize=False,  # That would be another seed, of the test's source.
  database=None,
  deadline=None,
  print_blob=True,
  suppress_health_check=[HealthCheck.too_slow],
)


def only_its_own_constants():
  """Returns a context in which no integers are drawn from the source of what is imported.

  Hypothesis would take one in twenty of its integers from there: other ones after every edit, and
  other ones where a test runs alone.
  """
  return mock.patch.object(providers, "_get_local_constants", providers.Constants)


def run_sampled(check, *args, max_examples, **strategies):
  """Calls `check(*args, **example)` for examples of the strategies, and shrinks what fails."""

  @settings(max_examples=max_examples)
  @given(**strategies)
  def run(**example):
    try:
      check(*args, **example)
    except Exception as error:
      error.add_note(as_test(check, args, example))
      raise

  run()


def as_test(check, args, example):
  """Returns the source of a test that makes one call, for the module of `check`."""
  arguments = [*map(source_of, args), *(f"{k}={source_of(v)}" for k, v in example.items())]
  return f"def test_{check.__name__}_of_one():\n  {check.__name__}({', '.join(arguments)})\n"


def source_of(value):
  if isinstance(value, np.ndarray | np.generic):
    return f"np.array({value.tolist()}, {value.dtype.name!r})"
  if isinstance(value, list):
    return f"[{', '.join(map(source_of, value))}]"
  if isinstance(value, tuple):
    return f"({''.join(source_of(item) + ', ' for item in value).rstrip(' ')})"
  if dataclasses.is_dataclass(value):
    fields = [f"{f.name}={source_of(getattr(value, f.name))}" for f in dataclasses.fields(value)]
    return f"{type(value).__name__}({', '.join(fields)})"
  return repr(value)
