"""Compiles one case for a TPU that this host does not have; prints the compiler's cycle estimate.

Run as `python -m bench.kernels.static JSON`, one case to a process: the compiler aborts on some.
It needs jax 0.12.0.1 and libtpu 0.0.52, whose estimator alone follows manual DMAs (`make bench`
installs them).
"""
# ruff: noqa: E402  The environment must be set before jax is imported.

import os
import tempfile

from bench.tpu.environment import ENVIRONMENT

PROFILES = tempfile.mkdtemp()
os.environ.update(ENVIRONMENT)
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={PROFILES}"

import json
import pathlib
import re
import sys
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from bench.kernels import alternatives
from bench.kernels.traffic import Layout, make_layout
from bench.tpu.aot import TOPOLOGIES
from pallas_stash.kernels import copy_runs, pieces
from pallas_stash.ragged import CopyRuns


def assume(layout: Layout, kernel: str, total_rows: int):
  """Returns the kernel of `copy_runs` for runs that are known when it is compiled.

  The estimator reads scalar-prefetch references as 0, but follows what a kernel itself stores in
  scalar memory: so this one starts with storing its scalars.
  """
  groups = range(layout.groups)
  ends = layout.wide_rows, layout.tight_rows
  sources, destinations = ends if kernel == "compact" else ends[::-1]
  rows_of = lambda function: np.array([function(i) for i in groups], np.int32)
  runs = CopyRuns(*map(rows_of, (sources, destinations, layout.sizes)))
  last_row = runs.destinations[-1] + runs.sizes[-1]
  window = [0, total_rows, 0, 1] if kernel == "expand" else [runs.destinations[0], last_row, 0, 0]
  scalars = [np.asarray(values) for values in (*pieces.searchable(runs), window)]
  real = copy_runs.kernel

  def assumed(*refs, **static):
    def run(*stored):
      for ref, values in zip(stored, scalars, strict=True):
        for i, value in enumerate(values):
          ref[i] = jnp.int32(value)
      real(*stored, *refs[len(stored) :], **static)

    pl.run_scoped(run, *(pltpu.SMEM((len(values),), jnp.int32) for values in scalars))

  return assumed


def estimate(case: dict) -> int:
  """Returns the cycles of a case of `bench.kernels`."""
  topology = topologies.get_topology_desc(topology_name=TOPOLOGIES[case["chip"]], platform="tpu")
  mesh = Mesh(np.array(topology.devices[:1]), ("chip",))
  sharding = NamedSharding(mesh, PartitionSpec())
  struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  rows, total_rows, dtype = case["rows"], case["total_rows"], jnp.dtype(case["dtype"])
  worst_case = struct((total_rows, case["width"]), dtype)
  # Some alternatives write the worst case behind the start row.
  stash = struct((2 * total_rows + 64, case["width"]), dtype)
  layout = make_layout(case["layout"], rows, total_rows, case["offset"])
  if case["implementation"] == "pallas_stash":
    runs = CopyRuns(*3 * [struct((layout.groups + 1,), jnp.int32)])
    window = struct((len(copy_runs.Window._fields),), jnp.int32)
    if case["kernel"] == "compact":
      copy = lambda rows, stash, runs, window: copy_runs.copy_runs(rows, stash, runs, window)
      args, donated = (worst_case, stash, runs, window), 1
    else:
      new = jax.ShapeDtypeStruct(worst_case.shape, dtype)
      copy = lambda stash, runs, window: copy_runs.copy_runs(stash, new, runs, window)
      args, donated = (stash, runs, window), ()
  else:
    copy = alternatives.ALTERNATIVES[case["implementation"]].make(rows, total_rows, case["kernel"])
    row_numbers = struct((rows,), jnp.int32)
    args, donated = (worst_case, stash, struct((), jnp.int32), row_numbers), 1
    if case["kernel"] != "compact":
      donated = 0
  kernel = assume(layout, case["kernel"], total_rows)
  with (
    jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    mock.patch.object(copy_runs, "kernel", kernel),
    # The scalars are to be arguments, in HBM: of those that XLA computes, and leaves in VMEM, the
    # estimator of v5e says "Unsupported DMA direction".
    mock.patch.object(pieces, "searchable", lambda runs: runs),
  ):
    jax.jit(copy, donate_argnums=donated).trace(*args).lower().compile()
  return estimated_cycles()


def estimated_cycles(prefixes: tuple[str, ...] = ("",), without: str | None = None) -> int:
  """Returns the cycles of what was compiled, of instructions whose names start so.

  Args:
    prefixes: of names.
    without: no instruction that has this in its name.

  Raises:
    RuntimeError: if there is no estimate.
  """
  paths = [path for path in pathlib.Path(PROFILES).iterdir() if path.name.startswith(prefixes)]
  paths = [path for path in paths if without is None or without not in path.name]
  texts = [path.read_text(errors="replace") for path in paths]
  cycles = [int(c) for text in texts for c in re.findall(r"estimated_cycles: (\d+)", text)[:1]]
  if not cycles:
    raise RuntimeError("The compiler wrote no estimate.")
  return sum(cycles)


if __name__ == "__main__":
  print(json.dumps({"estimated_cycles": estimate(json.loads(sys.argv[1]))}))
