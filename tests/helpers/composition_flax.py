"""A layer as a function, and as a flax module that owns its weights for the call."""

from collections.abc import Callable
from typing import Any

from flax import linen, nnx
import jax

Layer = Callable[[Any, Any], Any]  # (carry, (weights, has_experts)) -> carry, None


class LinenLayer(linen.Module):
  """Takes `weights_like` from its parameters, whatever their shapes on this device."""

  layer: Layer
  weights_like: Any

  @linen.compact
  def __call__(self, carry, has_experts):
    weights = {name: self.param(name, lambda key, x=x: x) for name, x in self.weights_like.items()}
    return self.layer(carry, (weights, has_experts))


class NnxLayer(nnx.Module):
  """Holds the weights of a layer, or of a stack of layers."""

  def __init__(self, weights, layer: Layer):
    self.layer = layer
    for name, value in weights.items():
      setattr(self, name, nnx.Param(value))

  def __call__(self, carry, has_experts):
    params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
    return self.layer(carry, (params, has_experts))


def as_linen(layer: Layer) -> Layer:
  def call(carry, xs):
    weights, has_experts = xs
    like = jax.tree.map(jax.numpy.zeros_like, weights)
    return LinenLayer(layer, like).apply({"params": weights}, carry, has_experts)

  return call


def as_nnx(layer: Layer) -> Layer:
  def call(carry, xs):
    weights, has_experts = xs
    return NnxLayer(weights, layer)(carry, has_experts)

  return call


LAYERS_AS_MODULES = {"function": lambda layer: layer, "linen": as_linen, "nnx": as_nnx}
