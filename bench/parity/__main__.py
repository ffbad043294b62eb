"""`make parity`: one MoE layer spread over devices in five ways, with and without the stash."""
# ruff: noqa: E402  The environment must be set before jax is imported.

from bench.tpu.environment import use_cpu_devices

# On any host: what a device rounds differently is no subject here.
use_cpu_devices(8)

from absl import app, flags

from bench.parity import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
