"""`make pipeline`: the demo's model through pipeline schedules, its residuals in pages."""
# ruff: noqa: E402  The environment must be set before jax is imported.

from bench.tpu.environment import use_cpu_devices

# On any host: what a device rounds differently is no subject here.
use_cpu_devices(4)

from absl import app, flags

from bench.pipeline import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
