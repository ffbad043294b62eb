"""`make demo`: trains a small ring-of-experts model, with and without the stash."""
# ruff: noqa: E402  The environment must be set before jax is imported.

import os

from bench.tpu.environment import has_tpu

# Four virtual CPU devices, unless the host has TPUs.
if not has_tpu():
  xla_flags = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" not in xla_flags:
    xla_flags += " --xla_force_host_platform_device_count=4"
  os.environ.update(XLA_FLAGS=xla_flags.strip(), JAX_PLATFORMS="cpu")

from absl import app, flags

from bench.demo import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
