"""What lets libtpu compile on a host without TPUs. To be set before jax is imported."""

import glob

ENVIRONMENT = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  TPU_WORKER_HOSTNAMES="localhost",
  TPU_ACCELERATOR_TYPE="v5p-8",
)


def has_tpu() -> bool:
  """Returns whether this host has a TPU: asked of its devices, as jax is not to be imported yet."""
  return any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*")))


def has_accelerator() -> bool:
  """Returns whether this host has a TPU or an NVIDIA GPU."""
  return has_tpu() or bool(glob.glob("/dev/nvidia[0-9]*"))
