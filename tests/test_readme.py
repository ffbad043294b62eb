"""The example of the README runs, and computes what the same program without a stash computes."""

import pathlib
import re

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import pallas_stash as ps
from tests.helpers.checks import assert_trees_equal

README = pathlib.Path(__file__).parent.parent / "README.md"
LAYERS, TOKENS, WIDTH, HIDDEN, EXPERTS = 3, 32, 8, 16, 4


def expert_ffn(rows, weights, group_sizes):
  live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
  rows = jnp.where(live, rows, 0)

  def project(rows, name):
    out = jax.lax.ragged_dot(rows, weights[name], group_sizes)
    return jnp.where(live, checkpoint_name(out, f"mlp{name}"), 0)

  return project(jax.nn.silu(project(rows, "wi_0")) * project(rows, "wi_1"), "wo")


def route(x):
  """Half of the buffer is padding that holds real tokens."""
  return jnp.concatenate([x, x]), jnp.array([9, 0, 20, 3], jnp.int32)


def combine(x, out):
  return x + out[:TOKENS]


def plain_loss(weights, x):
  def layer(x, weights):
    rows, group_sizes = route(x)
    return combine(x, expert_ffn(rows, weights, group_sizes)), None

  policy = jax.checkpoint_policies.save_only_these_names("mlpwi_0", "mlpwi_1")
  return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0] ** 2)


def examples():
  return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def names_of_the_example():
  struct = lambda width: jax.ShapeDtypeStruct((width,), jnp.float32)
  names = {
    "expert_ffn": expert_ffn,
    "route": route,
    "combine": combine,
    "capacity_rows": LAYERS * TOKENS,
    "residuals": [struct(HIDDEN), struct(HIDDEN)],
  }
  exec(examples()[0], names)
  return names


def weights_and_x():
  keys = iter(jax.random.split(jax.random.key(0), 4))
  shapes = {"wi_0": (WIDTH, HIDDEN), "wi_1": (WIDTH, HIDDEN), "wo": (HIDDEN, WIDTH)}
  weights = {
    name: jax.random.normal(next(keys), (LAYERS, EXPERTS, *shape)) / 3
    for name, shape in shapes.items()
  }
  x = jax.random.normal(next(keys), (TOKENS, WIDTH))
  return weights, x


def test_the_example_runs():
  gradient = jax.jit(jax.value_and_grad(names_of_the_example()["loss"]))(*weights_and_x())
  assert_trees_equal(gradient, jax.jit(jax.value_and_grad(plain_loss))(*weights_and_x()))


def test_the_capacity_grows_without_a_wrong_step():
  weights, x = weights_and_x()
  lines, batches = [], [x / 4, x / 8, -x / 4]
  names = names_of_the_example() | {"batches": batches, "log": lines.append, "capacity_rows": 8}
  names["weights"] = jax.tree.map(jnp.copy, weights)  # They are donated.
  exec(examples()[1], names)
  # 32 rows a layer: none fits, then all do.
  assert lines == ["step 0: 3 pushes recomputed; 96 rows would do, 8 are there"]
  assert names["capacity_rows"] == 105 and int(names["stats"].peak_rows[0]) == 96

  for x in batches:
    gradients = jax.jit(jax.grad(plain_loss))(weights, x)
    weights = jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)
  # What is recomputed may be fused, and so rounded, differently.
  jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, 1e-5), names["weights"], weights)


def test_the_checks_run():
  checks = examples()[2]
  weights, x = weights_and_x()
  rows, group_sizes = route(x)
  names = names_of_the_example() | {
    "rows": rows,
    "weights": jax.tree.map(lambda leaf: leaf[0], weights),
    "group_sizes": group_sizes,
    "policy": jax.checkpoint_policies.save_only_these_names("mlpwi_0", "mlpwi_1"),
    "all_weights": weights,
    "x": x,
  }
  exec(checks, names)
  assert names["report"] == ps.PaddingReport(False)
  plain = jax.jit(jax.grad(plain_loss))(weights, x)
  assert_trees_equal(names["gradient"], plain)
