"""Trains a tiny DeepSeek-like model by MaxText, MoE residuals in each place, and compares bits.

For a layout of the rows (`LAYOUTS`) a few steps are trained once with `moe_mlpwi_0`, `moe_mlpwi_1`
and `moe_mlpwo` on the device, and then in each other place. Losses of all steps, and
all parameters and both moments of Adam behind the last one, have to be those of the first in every
bit: nothing is clipped, so that any gradient that differs shows. Fails if one does.

Run it from the repository root, in the environment that `make maxtext` makes.
"""

import functools
import json
import pathlib
import sys
import tempfile
import time

from absl import flags
import jax
import numpy as np

from pallas_stash.integrations import maxtext

STEPS = flags.DEFINE_integer("steps", 5, "Of each training.", 1)

MODEL = """
  model_name=deepseek3-tiny override_model_config=true base_num_decoder_layers=4
  first_num_dense_layers=1 vocab_size=512 num_experts=8 num_experts_per_tok=2
  qk_nope_head_dim=16 qk_rope_head_dim=16 v_head_dim=16 max_position_embeddings=4096
  max_target_length=64 per_device_batch_size=1 attention=dot_product
  sparse_matmul=true megablox=true scan_layers=true remat_policy=custom
  wi_tile_fwd_batch_seq=128 wi_tile_dlhs_batch_seq=128 wi_tile_drhs_batch_seq=128
  wo_tile_fwd_batch_seq=128 wo_tile_dlhs_batch_seq=128 wo_tile_drhs_batch_seq=128
  gradient_clipping_threshold=0.0 dataset_type=synthetic enable_checkpointing=false
  enable_tensorboard=false enable_goodput_recording=false log_config=false run_name=tiny
"""
RING = "use_ring_of_experts=true ici_fsdp_parallelism=1 ici_expert_parallelism=4"
RAGGED = "use_ragged_sort=true ragged_gather_fallback=true ragged_gather_reduce_fallback=true"
MESH = "use_ring_of_experts=true ici_fsdp_parallelism=2 ici_expert_parallelism=2"
LAYOUTS = {
  "ring": RING,
  "ring, ragged sort": f"{RING} {RAGGED}",
  "ring, ragged sort, buffer of 2": f"{RING} {RAGGED} ragged_buffer_factor=2.0",
  "ring, chunks": f"{RING} num_moe_token_chunks=2",
  "ring, fsdp 2 x ep 2": MESH,
  "plain sort": "use_ring_of_experts=false ici_fsdp_parallelism=4 ici_expert_parallelism=1",
}
EACH = "moe_mlpwi_0={0} moe_mlpwi_1={0} moe_mlpwo={0}"
PLACES = {
  "device": EACH.format("device"),
  "remat": EACH.format("remat"),
  "stash": EACH.format("stash") + " stash_capacity=2",
  "stash, capacity 0.6": EACH.format("stash") + " stash_capacity=0.6",
}
# At 0.6 some layers are stored and others are not.
OF_EVERY_LAYOUT = "device", "stash, capacity 0.6"

LAYOUT = flags.DEFINE_multi_enum("layout", ["ring"], [*LAYOUTS, "all"], "Which of them.")


def main(args):
  del args
  maxtext.install()
  noted, failed = [], []
  maxtext.threaded = functools.partial(with_statistics, maxtext.threaded, noted)
  line = "{:<32}{:<21}{:>8}  {:<8}{:<20}{}"
  print(line.format("layout", "residuals", "seconds", "losses", "leaves that differ", "stash"))
  for layout in LAYOUTS if "all" in LAYOUT.value else LAYOUT.value:
    expected = None
    for place in PLACES if layout == "ring" else OF_EVERY_LAYOUT:
      noted.clear()
      start = time.perf_counter()
      losses, leaves = train(f"{MODEL} {LAYOUTS[layout]} {PLACES[place]} steps={STEPS.value}")
      expected = expected or (losses, leaves)
      differ = differing(leaves, expected[1])
      is_equal = losses == expected[0] and len(losses) == STEPS.value
      if differ or not is_equal:
        failed.append(f"{layout}: {place}")
      words = f"{time.perf_counter() - start:.0f}", "equal" if is_equal else "DIFFER"
      of_all = f"{len(differ)} of {len(leaves)}"
      print(line.format(layout, place, *words, of_all, "".join(noted[-1:])), flush=True)
  if failed:
    sys.exit("\n".join(["FAILED:", *failed]))
  print("maxtext: all losses and leaves are equal in every bit.")


def train(keys):
  """Trains with some keys; returns the losses of all steps, and the leaves of the last state."""
  from maxtext.configs import pyconfig
  from maxtext.trainers.pre_train import train as trainer
  from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

  with tempfile.TemporaryDirectory() as folder:
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    own = f"base_output_directory={folder}", f"metrics_file={metrics}"
    argv = ["train", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *keys.split(), *own]
    state = trainer.train_loop(pyconfig.initialize(argv), None)
    jax.effects_barrier()
    losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
  return losses, leaves_of(state)


def with_statistics(threaded, noted, fun, capacity_rows):
  """Returns `threaded(fun, capacity_rows)`, which notes a line of statistics each time it runs."""
  capacities = []

  def capacity(worst_case_rows):
    capacities.append(capacity_rows(worst_case_rows))
    return capacities[-1]

  def call(*args):
    capacities.clear()
    out, all_stats = threaded(fun, capacity, has_stats=True)(*args)
    for rows, stats in zip(capacities, all_stats, strict=True):
      note = lambda stats, rows=rows: noted.append(type(stats)(*stats).log_line(rows))
      jax.debug.callback(note, jax.lax.stop_gradient(stats))
    return out

  return call


def leaves_of(state):
  """Returns the arrays of a training state by their paths, but keys."""
  pairs = jax.tree_util.tree_leaves_with_path(state)
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in pairs if not is_key(x)}


def differing(actual, expected):
  """Returns the paths of leaves that differ in some bit."""
  assert actual.keys() == expected.keys()
  return [path for path, x in actual.items() if x.tobytes() != expected[path].tobytes()]
