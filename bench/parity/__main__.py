"""`make parity`: one MoE layer spread over devices in five ways, with and without the stash."""
# ruff: noqa: E402  The environment must be set before jax is imported.

import os

# Eight virtual CPU devices, on any host: what a device rounds differently is no subject here.
xla_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in xla_flags:
  xla_flags += " --xla_force_host_platform_device_count=8"
os.environ.update(XLA_FLAGS=xla_flags.strip(), JAX_PLATFORMS="cpu")

from absl import app, flags

from bench.parity import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
