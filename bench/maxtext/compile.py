"""Compiles DeepSeek-V3 for 256 v5p chips, by MaxText's own `train_compile`; prints its peak of HBM.

    python -m bench.maxtext.compile remat_policy=full
    python -m bench.maxtext.compile remat_policy=custom moe_mlpwo=stash stash_capacity=1.0

Arguments are keys of MaxText's, beside or instead of those here. No TPU is needed.
"""

import os
import sys

from bench.tpu.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT, DECOUPLE_GCLOUD="TRUE", TF_CPP_MIN_LOG_LEVEL="2")

KEYS = """
  model_name=deepseek3-671b run_name=compile base_output_directory=build
  compile_topology=v5p-512 compile_topology_num_slices=1
  per_device_batch_size=1 max_target_length=4096
  ici_fsdp_parallelism=64 ici_expert_parallelism=4 use_ring_of_experts=true
  sparse_matmul=true megablox=true scan_layers=true attention=flash
  dtype=bfloat16 weight_dtype=bfloat16 opt_type=adamw dataset_type=synthetic
  enable_checkpointing=false enable_tensorboard=false enable_goodput_recording=false
  log_config=false
"""


def main():
  from maxtext.trainers.pre_train import train_compile
  from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

  from pallas_stash.integrations import maxtext

  compile_step = train_compile.jit_and_compile

  def noting(*args, **kwargs):
    compiled = compile_step(*args, **kwargs)
    memory = compiled.memory_analysis()
    print(f"peak of HBM: {memory.peak_memory_in_bytes / 1e9:.2f} GB a device", flush=True)
    if dump := os.environ.get("DUMP"):  # To read what the peak is of.
      with open(dump, "w") as file:
        file.write(compiled.as_text())
    return compiled

  train_compile.jit_and_compile = noting
  keys = dict(key.split("=", 1) for key in [*KEYS.split(), *sys.argv[1:]])
  base = os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml")
  sys.argv[1:] = ["train_compile", base, *map("=".join, keys.items())]
  maxtext.main()


if __name__ == "__main__":
  main()
