"""The normalisation of the reference model."""

from jax import lax
import jax.numpy as jnp


def rms_norm(x, scale):
  """Scales each token of x, [..., width], to unit mean square, then by `scale`, [width]."""
  x32 = x.astype(jnp.float32)
  x32 *= lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
  return x32.astype(x.dtype) * scale
