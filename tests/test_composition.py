"""The transforms that trainers combine: each, all pairs of them, and what trainers do with them."""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.checks import assert_trees_equal, needs_devices
from tests.helpers.composition import (
  all_pairs,
  cases_of_all_options,
  cases_of_all_pairs,
  pairs_of,
  TRAINERS,
)
from tests.helpers.composition_check import check
from tests.helpers.composition_model import LAYERS, plain


def parameters(cases, quick):
  """The cases, for long all but those that are quick."""
  marks_of = lambda case: [] if case in quick else [pytest.mark.long]
  return [
    pytest.param(case, marks=[needs_devices(case.num_devices), *marks_of(case)], id=str(case))
    for case in cases
  ]


# To compile a case takes seconds: `make test` has every option, `make test-long` every pair.
@pytest.mark.once
@pytest.mark.parametrize("case", parameters(cases_of_all_pairs(), cases_of_all_options()))
def test_pairs(case):
  check(case)


ONCE = {
  "MaxText, offloading": [pytest.mark.once],
  "one shard_map": [pytest.mark.once],
  "accumulation": [pytest.mark.once],
}


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=[needs_devices(case.num_devices), *ONCE.get(name, [])], id=str(case))
    for name, case in TRAINERS.items()
  ],
)
def test_trainers(case):
  check(case)


def test_the_cases_have_all_pairs():
  assert all_pairs() <= set().union(*map(pairs_of, cases_of_all_pairs()))


@pytest.mark.once
def test_the_arithmetic_is_exact():
  """No rounding where numbers grow most: the plain program computes the same in float64."""
  moe_layers = (True,) * LAYERS
  for model in (0, 1):
    single = plain(moe_layers, model=model)
    with jax.enable_x64(True):
      double = plain(moe_layers, model=model, dtype=jnp.float64)
    assert double[0].dtype == "float64"
    assert_trees_equal(single, double)
