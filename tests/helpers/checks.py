"""Checks of pytrees of arrays, and of the devices that a test needs."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# For `jax.jit`: options that users have, where `tests/conftest.py` asks XLA for less. What it
# fuses, and so where it rounds, is for tests that compare the bits of two programs; and all of it.
_IS_LESS = "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
FUSED = {"xla_cpu_use_fusion_emitters": True} if _IS_LESS else {}
OPTIMIZED = {} if jax.default_backend() == "tpu" else {"xla_backend_optimization_level": 3} | FUSED


def assert_trees_equal(actual, expected):
  """Fails unless two pytrees are equal, NaNs included."""
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), jax.device_get(expected))


def is_any_nan(tree):
  return any(bool(jnp.isnan(leaf).any()) for leaf in jax.tree.leaves(tree))


def long(*values):
  """Values of parameters with which only `make test-long` runs a test."""
  return pytest.param(*values, marks=pytest.mark.long)


def once(*values):
  """Values of parameters with which `.ci/run` runs a test on one Python only."""
  return pytest.param(*values, marks=pytest.mark.once)


def needs_devices(count):
  return pytest.mark.skipif(len(jax.devices()) < count, reason=f"needs {count} devices")
