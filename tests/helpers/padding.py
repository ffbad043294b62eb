"""What tests of `check_padding` have in common: ragged rows, and what its report must be."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import pallas_stash as ps

ROWS, WIDTH, HIDDEN, GROUPS, TOKENS = 64, 8, 16, 4, 24
SAVE = jax.checkpoint_policies.save_only_these_names
SIZES = jnp.array([9, 0, 20, 3], jnp.int32)
RAGGED = ps.RaggedRows(SIZES, ROWS)
LIVE = (jnp.arange(ROWS) < 32)[:, None]


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


X, W, WO = (
  normal(0, ROWS, WIDTH),
  normal(1, GROUPS, WIDTH, HIDDEN),
  normal(2, GROUPS, HIDDEN, WIDTH),
)
TOKEN_ROWS, ROW_TOKENS = normal(3, TOKENS, WIDTH), jnp.arange(ROWS) % TOKENS


def mask(rows):
  return jnp.where(LIVE, rows, 0)


def project(rows, w, name="mlpwi_0"):
  return checkpoint_name(lax.ragged_dot(rows, w, SIZES), name)


def depends(fun, *args, ragged=RAGGED, **options):
  report = ps.check_padding(fun, ragged, *args, **options)
  assert report.depends, str(report)
  return report


def assert_independent(fun, *args, ragged=RAGGED, **options):
  report = ps.check_padding(fun, ragged, *args, **options)
  assert report == ps.PaddingReport(False), str(report)
