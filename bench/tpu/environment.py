"""What is set before jax is imported: virtual devices, and what libtpu needs without a TPU."""

import glob
import os

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


def use_cpu_devices(count: int) -> None:
  """Has jax see so many virtual CPU devices, or as many as `XLA_FLAGS` says, and no others."""
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" not in flags:
    flags += f" --xla_force_host_platform_device_count={count}"
  os.environ.update(XLA_FLAGS=flags.strip(), JAX_PLATFORMS="cpu")
