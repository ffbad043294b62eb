"""Compiles a push, a restore or a free for a TPU; prints the cycles of what is beside the kernels.

Run as `python -m bench.kernels.pages_static JSON`, as `bench.kernels.static` is. That is the
arithmetic of the allocator and of the copy runs; with pages their table is looked up.
"""

from bench.kernels import static  # First: it sets the environment, before jax is imported.

# isort: split
import functools
import json
import sys

import jax
import jax.numpy as jnp

from bench.kernels.cases import CAPACITY, TOTAL_ROWS
from bench.tpu import aot
import pallas_stash as ps

WIDTH = 1024  # Of a row: it has no part in this.

struct = jax.ShapeDtypeStruct


def push(stash, rows, sizes):
  return stash.push([rows], ps.RaggedRows(sizes, TOTAL_ROWS))


def restore(stash, slot, sizes):
  return stash.restore(slot, ps.RaggedRows(sizes, TOTAL_ROWS))


def free(stash, slot):
  return stash.free(slot)


def estimate(case: dict) -> int:
  """Returns the cycles of a case of `cases.page_cases`."""
  spec = [struct((WIDTH,), jnp.bfloat16)]
  empty = functools.partial(ps.Stash.empty, CAPACITY, spec, page_rows=case["page_rows"])
  stash, one = jax.eval_shape(empty), struct((1,), jnp.int32)
  slot, sizes = ps.Slot(one, one, None, one), struct((64,), jnp.int32)
  function, args, donated = {
    "push": (push, (stash, struct((TOTAL_ROWS, WIDTH), jnp.bfloat16), sizes), 0),
    "restore": (restore, (stash, slot, sizes), ()),
    "free": (free, (stash, slot), 0),
  }[case["kernel"]]
  aot.compile(function, *aot.place(args, aot.mesh(case["chip"])), donate_argnums=donated)
  try:
    return static.estimated_cycles(without="stash_")
  except RuntimeError:  # There is nothing but scalars, of which it makes no estimate.
    return 0


if __name__ == "__main__":
  print(json.dumps({"estimated_cycles": estimate(json.loads(sys.argv[1]))}))
