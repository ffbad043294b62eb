"""Plants a fault in a copy of the kernels, and has compact and expand use that copy."""

import dataclasses
import functools
import types
from typing import Any
from unittest import mock

from pallas_stash.kernels import copy_runs, mosaic_tpu, pieces, tile_words
from tests.helpers.kernel_check import Case, MANY_TILES


@dataclasses.dataclass(frozen=True)
class Fault:
  """A change of a kernel's source.

  Attributes:
    name: what is wrong.
    kernel: whose check must fail, or must not.
    old: text that is in the source exactly once.
    new: what it becomes.
    module: whose source it is.
    dtype: of the rows. Only in words of several rows is there arithmetic on bits.
    case: sizes of the buffers.
    interpret: fields of `InterpretParams` that the check needs to see it.
    reason: why no check can fail; empty where one must.
  """

  name: str
  kernel: str
  old: str
  new: str
  module: types.ModuleType = copy_runs
  dtype: str = "float32"
  case: Case = MANY_TILES
  interpret: tuple[tuple[str, Any], ...] = ()
  reason: str = ""


@functools.cache
def copy_of_kernel(fault):
  """Returns a copy of the kernel, `copy_runs`, with the fault in it, or with none."""
  copies = {module: _copy(module) for module in (copy_runs, pieces, tile_words)}
  if fault is not None:
    copies[fault.module] = _copy(fault.module, fault)
  copies[copy_runs].pieces = copies[pieces]
  copies[copy_runs].tile_words = copies[tile_words]
  return copies[copy_runs].copy_runs


def plant(fault):
  """Returns a context in which compact and expand use a copy of the kernel with the fault."""
  return mock.patch.object(mosaic_tpu, "copy_runs", copy_of_kernel(fault))


def _copy(module, fault=None):
  with open(module.__file__) as file:
    source = file.read()
  if fault is not None:
    found = source.count(fault.old)
    if found != 1:
      raise ValueError(
        f"{fault.name!r}: {fault.old!r} is {found} times in {module.__name__} and must be there"
        " once. The kernel changed, so the fault must be planted otherwise."
      )
    source = source.replace(fault.old, fault.new)
  copy = types.ModuleType(module.__name__)
  copy.__file__ = module.__file__
  exec(compile(source, module.__file__, "exec"), copy.__dict__)
  return copy


COMPACT, EXPAND = "compact", "expand"
NOTHING = "pass"
TWO_CORES = (("num_cores_or_threads", 2),)
EAGER = (("dma_execution_mode", "eager"),)


def in_plan(*args, **options):
  return Fault(*args, module=pieces, **options)


def in_words(*args, **options):
  return Fault(*args, module=tile_words, dtype="bfloat16", **options)
