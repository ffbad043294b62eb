"""MaxText with a stash: a fourth place, beside remat, device and offload, for its MoE residuals.

    python -m pallas_stash.integrations.maxtext train base.yml ... remat_policy=custom \
      moe_mlpwi_0=stash moe_mlpwi_1=stash stash_capacity=1.1

`train_compile` in place of `train` compiles ahead of time. In a program of one's own, `install()`
before MaxText's `pyconfig.initialize` is called. What `install` changes of MaxText, and why:

- its configuration class, which gets the value "stash" for the names in `NAMES`, and the key
  `stash_capacity`: the rows that each device has room for, as a multiple of those that balanced
  routing gives it in all layers of one scan, 1.1 unless given;
- the policy of `jax.checkpoint`, where these are names for the stash;
- `RoutedMoE.permute`, behind which the rows are marked;
- the `lax.scan` over layers, which is `threaded`.

It changes nothing where no name has that value. What a stash does not reach is refused.
"""

import functools
import importlib.metadata
import sys
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from pallas_stash.policies import mark_rows, save_in_stash
from pallas_stash.ragged import RaggedRows
from pallas_stash.threaded import threaded

VERSION = "0.2.5"
NAMES = "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"

# What a configuration needs beside a name for the stash, and why.
_NEEDED = {
  "remat_policy": ("custom", "no other policy reads the names"),
  "scan_layers": (True, "the stash is carried by that scan"),
  "sparse_matmul": (True, "dense experts have no rows"),
  "using_pipeline_parallelism": (False, "a stash is one chain of layers, stages are several"),
  "mtp_num_layers": (0, "those layers are in no scan"),
  "engram_layers": ([], "those layers are in no scan"),
  "use_batch_split_schedule": (False, "that schedule has a backward pass of its own"),
  "enable_diloco": (False, "that is a vmap of training steps"),
}


def names_in(config: Any) -> tuple[str, ...]:
  """Returns the names that a configuration puts in the stash."""
  return tuple(name for name in NAMES if getattr(config, name, None) == "stash")


def check(config: Any) -> None:
  """Raises a ValueError for a configuration that a stash does not reach."""
  for key, (needed, reason) in _NEEDED.items() if names_in(config) else ():
    if (value := getattr(config, key)) != needed:
      raise ValueError(f"{names_in(config)[0]}=stash needs {key}={needed}, not {value}: {reason}.")


class _Layers:
  """Layers with experts in a scan.

  Attributes:
    now: those that are traced now, or None.
    buffer: rows of a buffer of theirs, as a multiple of those that balanced routing puts in it.
  """

  now = None

  def __init__(self, capacity):
    self.capacity, self.buffer = capacity, 1.0

  def capacity_rows(self, worst_case_rows):
    return min(worst_case_rows, int(worst_case_rows * self.capacity / self.buffer))


def _apply_layers(experts_class, original, decoder, layers, *args, **kwargs):
  from flax.nnx import iter_modules

  has_experts = any(isinstance(module, experts_class) for _, module in iter_modules(layers))
  if has_experts and _names_of(decoder):
    _Layers.now = _Layers(decoder.config.stash_capacity)
  try:
    return original(decoder, layers, *args, **kwargs)
  finally:
    _Layers.now = None


def _names_of(decoder):
  # MaxText's own way to compute a step again whose rows it dropped.
  return () if getattr(decoder, "remat_policy_override", None) else names_in(decoder.config)


def _policy(original, decoder):
  policy, names = original(decoder), _names_of(decoder)
  if not names or _Layers.now:
    return save_in_stash(*names, policy=policy) if names else policy

  def refuse(primitive, *args, **params):
    if params.get("name") in names:
      raise ValueError(
        f"{params['name']}=stash does not reach a layer of this decoder_block: it has experts, and"
        " is in no scan of NNXDecoder's. Choose remat, device or offload."
      )
    return policy(primitive, *args, **params)

  return refuse


def _scan(original, body, *args, **options):
  scan = functools.partial(original, body, **options)
  return (threaded(scan, _Layers.now.capacity_rows) if _Layers.now else scan)(*args)


def _permute(original, layer, *args, **kwargs):
  out = original(layer, *args, **kwargs)
  if _Layers.now:
    config, devices = layer.config, layer.get_expert_parallelism_size()
    if devices > 1 and not config.use_ring_of_experts:
      raise ValueError(
        f"{names_in(config)[0]}=stash needs use_ring_of_experts=True where {devices} devices share"
        " the experts: the rows that an all-to-all brings are not marked."
      )
    rows, order, sizes, here = (out[i] for i in (0, 1, 3, 7))
    total_rows, count = rows.shape[0], config.num_experts // devices
    is_global = config.use_ring_of_experts and config.use_ragged_sort
    first = count * lax.axis_index(layer._expert_parallelism_name) if is_global else 0
    _Layers.now.buffer = total_rows * devices / order.shape[0]
    mark_rows(_rows_here(total_rows, sizes, here, first, count, is_global))
  return out


def _rows_here(total_rows, sizes, here, first, count, is_global):
  """Returns where the rows of a device are, in what `RoutedMoE.permute` gives it.

  Args:
    total_rows: of its buffer.
    sizes: int32[experts], the rows of each expert, in the order of the buffer.
    here: int32[count], those of the experts here, if rows past the end of the buffer were dropped.
    first: number of the first expert here.
    count: of the experts here.
    is_global: whether the rows lie where they would among those of all devices; otherwise those of
      the experts here come first.
  """
  if here is not None or not is_global:
    return RaggedRows(sizes[:count] if here is None else here, total_rows)
  starts = jnp.cumsum(sizes) - sizes
  sizes, starts = (lax.dynamic_slice_in_dim(x, first, count) for x in (sizes, starts))
  return RaggedRows(sizes, total_rows, starts)


class _Replaced:
  """A module, some of whose names are others."""

  def __init__(self, module, **names):
    self.__dict__.update(names, _module=module)

  def __getattr__(self, name):
    return getattr(self._module, name)


def _wrap(owner, name, wrapper):
  original = getattr(owner, name)
  setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _initialize(with_stash, original, argv, config_class, **kwargs):
  replaced = {with_stash.__base__: with_stash}
  config = original(argv, config_class=replaced.get(config_class, config_class), **kwargs)
  check(config)
  return config


@functools.cache
def install() -> None:
  """Changes MaxText in this process, once.

  Raises:
    ValueError: for another version of MaxText than that which is known here.
  """
  from maxtext.configs import pyconfig, types
  from maxtext.layers import moe, nnx_decoders
  import pydantic

  if (version := importlib.metadata.version("maxtext")) != VERSION:
    raise ValueError(f"maxtext {version} is not known here, {VERSION} is.")
  place = types.RematLocation | Literal["stash"], types.RematLocation.REMAT
  fields = dict.fromkeys(NAMES, place) | {"stash_capacity": (pydantic.NonNegativeFloat, 1.1)}
  with_stash = pydantic.create_model("Config", __base__=types.MaxTextConfig, **fields)
  _wrap(pyconfig, "_initialize_pydantic", functools.partial(_initialize, with_stash))
  _change_layers(moe, nnx_decoders)


def _change_layers(moe, nnx_decoders):
  apply_layers = functools.partial(_apply_layers, moe.RoutedMoE)
  _wrap(nnx_decoders.NNXDecoder, "_apply_layers_sequentially", apply_layers)
  _wrap(nnx_decoders.NNXDecoder, "get_remat_policy", _policy)
  _wrap(moe.RoutedMoE, "permute", _permute)
  nnx_decoders.jax = _Replaced(jax, lax=_Replaced(lax, scan=functools.partial(_scan, lax.scan)))


def main() -> None:
  """Runs a trainer of MaxText, the first argument of the program: train or train_compile."""
  from absl import app

  install()
  trainer = importlib.import_module(f"maxtext.trainers.pre_train.{sys.argv[1]}")
  app.run(trainer.main, [sys.argv[0], *sys.argv[2:]])


if __name__ == "__main__":
  main()
