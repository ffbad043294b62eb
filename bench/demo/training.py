"""Trains the model of the demo on the English text that every CPython ships."""

from collections.abc import Callable
import dataclasses
import functools
from pydoc_data import topics

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from bench.demo import memory
from bench.demo.report import log
from bench.demo.ring import BATCH, BY_DEVICE, CONFIG, DEVICES, MESH, SEQ
from reference import model

optimizer = optax.adam(3e-3)


@dataclasses.dataclass(frozen=True)
class Training:
  """What one training measured.

  Attributes:
    losses: float32[steps].
    rows: int[steps, layers, devices], the rows that were routed to each device.
    peak_rows: int[steps, devices], the rows that were in the stash at once.
    overflowed: int[steps, devices], the pushes that did not fit.
    temp_bytes: of the compiled gradient, on each device.
    live_bytes: `memory.LiveBytes` of it; None where the compiler does not tell.
    params: after the last step, in host memory.
  """

  losses: np.ndarray
  rows: np.ndarray
  peak_rows: np.ndarray
  overflowed: np.ndarray
  temp_bytes: int
  live_bytes: memory.LiveBytes | None
  params: dict


def batches(steps):
  """Yields int32[BATCH, SEQ + 1] for each step."""
  for tokens in excerpts(steps, (BATCH,), SEQ + 1):
    yield jax.device_put(tokens, NamedSharding(MESH, BY_DEVICE))


def excerpts(steps, shape, length):
  """Yields int32[*shape, length] for each step: random places in the text, the same every time."""
  text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
  rng = np.random.default_rng(0)
  for _ in range(steps):
    starts = rng.integers(0, len(text) - length + 1, shape)
    yield text[starts[..., None] + np.arange(length)].astype(np.int32)


@functools.cache
def initial_params():
  return jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(0))


def train(name: str, loss: Callable, steps: int) -> Training:
  """Trains with `loss`: `(params, tokens) -> (scalar, (StashStats or None, group sizes))`."""
  specs = model.param_specs(CONFIG)
  shardings = jax.tree.map(
    functools.partial(NamedSharding, MESH), specs, is_leaf=lambda spec: isinstance(spec, P)
  )
  params = jax.device_put(initial_params(), shardings)
  optimizer_state = jax.jit(optimizer.init)(params)
  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, shardings))
  log(f"{name}: compiling")
  gradient, live_bytes = memory.compile_and_follow(gradient.lower(params, next(batches(1))))
  temp_bytes = gradient.memory_analysis().temp_size_in_bytes
  log(f"{name}: compiled, {temp_bytes:,} temp bytes on each device")

  history = []
  for step, tokens in enumerate(batches(steps), 1):
    (value, aux), d_params = gradient(params, tokens)
    params, optimizer_state = update(params, optimizer_state, d_params)
    history.append(jax.device_get((value, *aux)))
    if step % 4 == 0 or step in (1, steps):
      log(f"{name}: step {step:2}, loss {value:.4f}")
  losses, stats, sizes = zip(*history, strict=True)
  nothing = np.zeros((steps, DEVICES), int)
  return Training(
    losses=np.array(losses),
    rows=np.reshape(sizes, (steps, CONFIG.layers, DEVICES, -1)).sum(-1),
    peak_rows=np.array([s.peak_rows for s in stats]) if stats[0] else nothing,
    overflowed=np.array([s.overflowed_pushes for s in stats]) if stats[0] else nothing,
    temp_bytes=temp_bytes,
    live_bytes=live_bytes,
    params=jax.device_get(params),
  )


@jax.jit
def update(params, optimizer_state, gradient):
  """The optimiser step, apart from the gradient: one and the same program for every training."""
  updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
  return optax.apply_updates(params, updates), optimizer_state
