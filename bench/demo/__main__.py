"""`make demo`: trains a small ring-of-experts model, with and without the stash."""
# ruff: noqa: E402  The environment must be set before jax is imported.

from bench.tpu.environment import has_tpu, use_cpu_devices

# Four virtual CPU devices, unless the host has TPUs.
if not has_tpu():
  use_cpu_devices(4)

from absl import app, flags

from bench.demo import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
