"""How the filled stash gets from the forward pass to the backward pass, and how that is proven.

The cotangent of a stash is its contents. `seal` hands the filled stash over as the cotangent of
the last one, each use reads its rows from the cotangent that it is given, and passes that on as the
cotangent of the stash that it took. What shows that all of them mean the same stash is a count,
handed over beside the contents: a stash counts its pushes, stored or not, and a slot keeps the
number of its own. `seal` hands over how many there were; a use requires that the next push after
its own was the last one to pass the stash on, and passes on its own number. Anything else, and
everything from there on, is NaN.

The count does not see: another stash with as many pushes in place of this one, or the mean of both
(two stashes that what is around the layers exchanges; devices whose cotangents are averaged); and
buffers that are changed while the count is not. `debug` sees each by the checksum of the rows.
"""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from pallas_stash.arguments import describe, FIRST_ORDER_ONLY
from pallas_stash.checks import debugging

# The policy of an outer `jax.checkpoint` is to save this name: what it does not save, it replays.
SLOT_NAME = "stash_slot"

# A count n is handed over as the float32 BASE + n, which is exact below 2 * BASE. Nothing that was
# not handed over looks like it, and a sum, a scaling or a clip of what was shows: 0 + n would pass
# most clips, and a scaling when n is 0.
BASE = 2.0**23
NUMBERS = 2**22  # Of pushes; the next one has number 0 again.

# Of jax: other implementations of `jax.checkpoint` and of `jax.custom_vjp`.
_FLAGS = "jax_remat3", "jax_custom_vjp3"


@functools.partial(jax.jit, inline=True)  # `jax_remat3` cannot run the rule of one call twice.
def first_order_only(tree: Any) -> Any:
  """Returns `tree`; a tangent that arrives here would be lost on its way through the stash."""
  return _without_tangents(tree)


_without_tangents = jax.custom_jvp(lambda tree: tree)


@_without_tangents.defjvp
def _refuse_tangents(primals, tangents):
  del primals, tangents
  raise NotImplementedError(FIRST_ORDER_ONLY)


def seal(y: Any, stash: Any) -> Any:
  """Hands the filled stash over to the backward pass; returns `y` unchanged.

  Call it once, behind the last layer that uses the stash, with what the loss is computed from:

      y, stash = layers(x, Stash.empty(...))
      y = seal(y, stash)

  Without it, with it twice, or with a stash that is not the last, gradients are NaN.

  Args:
    y: any pytree.
    stash: as the last layer returned it.

  Raises:
    ValueError: for a `stash` that is none.
  """
  if not hasattr(stash, "as_cotangent"):
    raise ValueError(f"stash={describe(stash)} must be a Stash: seal(y, stash).")
  return _seal(y, stash)


@jax.custom_vjp
def _seal(y, stash):
  del stash
  return y


def _seal_forward(y, stash):
  return y, stash


def _seal_backward(stash, d_y):
  stash = first_order_only(stash)
  # The canary is 0, or NaN where the stash was misused in the forward pass.
  return d_y, stash.as_cotangent(handed_over(stash.counters.pushes) + stash.canary)


_seal.defvjp(_seal_forward, _seal_backward)


def next_number(number: jax.Array) -> jax.Array:
  """Returns the number of pushes after the push of this number: int32, as the number is."""
  return (number + 1) & (NUMBERS - 1)


def receive(d_stash: Any, slot: Any, d_out: Any) -> tuple[Any, Any]:
  """Takes the stash that is handed over to the use of a slot.

  Args:
    d_stash: the cotangent of the stash that the use returned.
    slot: of the use.
    d_out: the cotangents of its other results.

  Returns:
    The cotangent of the stash that the use took, and `d_out`: all NaN unless the contents of
    `d_stash` are those of a stash that was sealed behind this use and the uses between.
  """
  found, expected = d_stash.canary, handed_over(next_number(slot.number))
  # Without the zeros of its integers. With pages, those of the slot are free from here on.
  d_stash, is_held = d_stash.as_cotangent(found).release(slot)
  is_right = (found == expected) & is_held
  if debugging.is_debugging():
    counts = found[0] - BASE, expected[0] - BASE
    debugging.report_count(slot.number[0], *counts, found[0] != 0, is_held[0])
  canary = jnp.where(is_right, handed_over(slot.number), jnp.float32(jnp.nan))
  return d_stash.as_cotangent(canary), _poison_unless(is_right[0], first_order_only(d_out))


def name_slot(slot: Any) -> Any:
  """Marks a slot to be saved by the outer `jax.checkpoint`."""
  return jax.tree.map(lambda array: checkpoint_name(array, SLOT_NAME), slot)


def with_rules(
  function: Callable[..., Any],
  forward: Callable[..., Any],
  backward: Callable[..., Any],
  nondiff_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
  """Returns `function` with its rules of differentiation, as `jax.custom_vjp` gives it them.

  Under `jax_remat3` alone, `jax.checkpoint` runs `function` in the forward pass, and `forward` only
  in the backward pass, when the stash is sealed already. Functions with `generic_batching` are not
  treated so: `forward` runs in both, and what it names is saved.

  Raises:
    ValueError: where this jax has no such functions, for each flag under which it needs them.
  """
  flags = check_flags()
  custom = jax.custom_vjp(function, nondiff_argnums)
  options = {"generic_batching": True} if "jax_remat3" in flags else {}
  custom.defvjp(forward, backward, **options)
  return custom


def check_flags() -> list[str]:
  """Returns which other implementations of jax are on, as `with_rules` says.

  Raises:
    ValueError: where this jax cannot run a stash under them.
  """
  flags = [name for name in _FLAGS if getattr(jax.config, name, False)]
  if flags and "generic_batching" not in inspect.signature(jax.custom_vjp.defvjp).parameters:
    raise ValueError(
      f"{flags[0]}=True must be off with jax {jax.__version__}: under it, jax.checkpoint cannot"
      " run the forward rule of a custom_vjp in the forward pass, which is what fills the stash."
    )
  return flags


def handed_over(count: jax.Array) -> jax.Array:
  """Returns the canary of a stash that is handed over behind so many pushes, float32."""
  return jnp.float32(BASE) + count.astype(jnp.float32)


def _poison_unless(is_good, cotangents):
  """Turns every inexact leaf to NaN unless `is_good`, bool[]."""

  def poison(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      return leaf
    return jnp.where(is_good, leaf, jnp.full_like(leaf, jnp.nan))

  return jax.tree.map(poison, cotangents)
