"""What lets libtpu compile on a host without TPUs. To be set before jax is imported."""

import glob

ENVIRONMENT = dict(
  JAX_PLATFORMS="cpu",
  TPU_SKIP_MDS_QUERY="1",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  TPU_WORKER_HOSTNAMES="localhost",
  TPU_ACCELERATOR_TYPE="v5p-8",
)


def has_accelerator():
  """Returns whether this host has a TPU or a GPU."""
  return any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")))
