"""`make maxtext`: trains a tiny MaxText model with each place for its residuals; compares bits."""

import os

from bench.tpu.environment import use_cpu_devices

# Before jax is imported. Without the flag XLA keeps what it fuses in more bits than saving does.
use_cpu_devices(4)
os.environ["XLA_FLAGS"] += " --xla_allow_excess_precision=false"
os.environ.update(DECOUPLE_GCLOUD="TRUE", TF_CPP_MIN_LOG_LEVEL="2")

from absl import app, flags  # noqa: E402

from bench.maxtext import main  # noqa: E402

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
