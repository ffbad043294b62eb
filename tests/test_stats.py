"""The line that statistics make in a log."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps


def stats(*fields):
  return ps.StashStats(*(np.array(field, np.int32) for field in fields))


ONE = stats([0], [5496], [0], [0], [5496])


@pytest.mark.parametrize(
  "of, capacity, line",
  [
    (
      ONE,
      6144,
      "stash: peak 5,496 of 6,144 rows (89.5%), 0 pushes overflowed, 0 invalid,"
      " 5,496 rows would do",
    ),
    (
      ONE,
      None,
      "stash: peak 5,496 rows, 0 pushes overflowed, 0 invalid, 5,496 rows would do",
    ),
    (
      stats([0], [0], [1], [0], [8]),
      0,
      "stash: peak 0 of 0 rows, 1 push overflowed, 0 invalid, 8 rows would do",
    ),
    # What overflowed on one shard and what was invalid on another are both seen.
    (
      stats([0, 8, 0], [16, 32, 8], [0, 3, 1], [2, 0, 0], [16, 64, 24]),
      32,
      "stash: peak 32 of 32 rows (100.0%) on the busiest of 3 shards, 4 pushes overflowed,"
      " 2 invalid, 64 rows would do",
    ),
  ],
)
def test_log_line(of, capacity, line):
  assert of.log_line(capacity) == line
  assert jax.tree.map(jnp.asarray, of).log_line(capacity) == line


def test_log_line_of_a_stash():
  stash = ps.Stash.empty(20, [jax.ShapeDtypeStruct((4,), jnp.float32)])
  stash, _ = stash.push([jnp.ones((8, 4))], ps.RaggedRows([5], 8))
  line = "stash: peak 8 of 24 rows (33.3%), 0 pushes overflowed, 0 invalid, 8 rows would do"
  assert stash.stats().log_line(stash.rows_per_shard) == line


def test_log_line_refuses_what_has_no_value():
  with pytest.raises(ValueError, match=r"rows_in_use=int32\[1\] is traced and must have a value"):
    jax.jit(lambda stats: stats.log_line())(ONE)
  with pytest.raises(ValueError, match="capacity_rows='many' must be a static int"):
    ONE.log_line("many")
