"""How long a gradient takes to trace and to lower: with a stash, beside `jax.checkpoint`; and of
layers in a scan by `threaded`, beside the stash threaded by hand.

    python -m bench.tracing

For layers with a number of residuals of one row shape, and of as many different row shapes. What is
aimed at: at most 1.5 times the seconds of `jax.checkpoint`, and 0.3 s for each different row shape;
and at most 1.15 times the seconds of threading by hand, tracing and lowering together.
Seconds on a machine that does something else as well say little: compare within a line.
"""

import time

from absl import flags
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import pallas_stash as ps

ROWS = 32
FLAGS = flags.FLAGS
flags.DEFINE_multi_integer("residuals", [2, 8, 32], "How many residuals a layer has.")
flags.DEFINE_integer("runs", 3, "Times that each is traced; the fastest counts.")
flags.DEFINE_enum("platform", "cpu", ["cpu", "tpu"], "What the program is lowered for.")


def experts_of(residuals, different):
  """Returns a function of rows and of its weights, a list; and the weights."""
  widths = [16 + (128 * i if different else 0) for i in range(residuals + 1)]
  weights = [jnp.ones(shape) for shape in zip(widths[:-1], widths[1:], strict=True)]

  def experts(x, weights):
    for w in weights:
      x = checkpoint_name(jnp.sin(x @ w), "hidden")
    return jnp.sum(x)

  return experts, weights


def seconds(make_loss, *args):
  """Returns the fewest seconds to trace and to lower the gradient of a loss that is made anew."""
  best = float("inf"), float("inf")
  for _ in range(FLAGS.runs):
    jax.clear_caches()
    gradient = jax.jit(jax.grad(make_loss(), argnums=1))
    start = time.perf_counter()
    traced = gradient.trace(*args)
    middle = time.perf_counter()
    traced.lower(lowering_platforms=(FLAGS.platform,))
    best = tuple(map(min, best, (middle - start, time.perf_counter() - middle)))
  return best


def in_layers(experts, ragged, save, weights):
  """Returns what makes the loss of layers in a scan, by hand and by `threaded`."""
  room = 16 * len(weights)

  def residual(x, weights):
    return x + experts(x, weights), None

  def by_hand():
    f = ps.checkpoint(residual, policy=save("hidden"))

    def layer(carry, weights):
      (x, _), stash = f(carry[1], ragged, carry[0], weights)
      return (x, stash), None

    def loss(x, stacked):
      layer_weights = jax.tree.map(lambda w: w[0], stacked)
      stash = ps.Stash.empty(room, f.residuals(ragged, x, layer_weights))
      step = jax.checkpoint(layer, policy=save(ps.SLOT_NAME))
      return jnp.sum(ps.seal(*jax.lax.scan(step, (x, stash), stacked)[0]))

    return loss

  def threaded():
    def layer(x, weights):
      ps.mark_rows(ragged)
      return residual(x, weights)

    step = jax.checkpoint(layer, policy=ps.save_in_stash("hidden"))
    model = ps.threaded(lambda x, stacked: jax.lax.scan(step, x, stacked)[0], room)
    return lambda x, stacked: jnp.sum(model(x, stacked))

  return by_hand, threaded


def main(argv):
  del argv
  save = jax.checkpoint_policies.save_only_these_names
  policy = save("hidden")
  ragged = ps.RaggedRows(jnp.array([13], jnp.int32), ROWS)
  x = jnp.ones((ROWS, 16))
  print(f"{'':24}{'jax.checkpoint':>20}{'stash':>20}{'aim':>10}")
  print(f"{'residuals':>9}{'row shapes':>15}{'trace':>10}{'lower':>10}{'trace':>10}{'lower':>10}")
  for different in False, True:
    for residuals in FLAGS.residuals:
      experts, weights = experts_of(residuals, different)

      def saving(experts=experts):
        return jax.checkpoint(lambda *args: experts(*args), policy=policy)

      def stashing(experts=experts):
        f = ps.checkpoint(lambda *args: experts(*args), policy=policy)
        empty = lambda *args: ps.Stash.empty(16, f.residuals(ragged, *args))
        return lambda *args: ps.seal(*f(empty(*args), ragged, *args))

      saved, stashed = seconds(saving, x, weights), seconds(stashing, x, weights)
      shapes = residuals if different else 1
      times = "".join(f"{s:10.2f}" for s in (*saved, *stashed, 1.5 * saved[0] + 0.3 * shapes))
      print(f"{residuals:9}{shapes:15}{times}", flush=True)

  print(f"\n{'layers, residuals':>24}{'by hand':>20}{'threaded':>20}{'ratio':>10}")
  for residuals in FLAGS.residuals:
    experts, weights = experts_of(residuals, False)
    stacked = [jnp.stack([w, w]) for w in weights]
    hand, threaded = (
      sum(seconds(make, x, stacked)) for make in in_layers(experts, ragged, save, weights)
    )
    print(f"{residuals:24}{hand:20.2f}{threaded:20.2f}{threaded / hand:10.2f}", flush=True)
