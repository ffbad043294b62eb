"""`grouped_mlp` for TPUs: what their compiler makes of a scan of layers. Nothing runs here."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from bench.tpu import aot
import pallas_stash as ps
from tests.helpers.checks import long, once

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

CHIPS = list(aot.TOPOLOGIES)
LAYERS, GROUPS, ROWS, WIDTH, HIDDEN, TILE = 3, 8, 8192, 512, 1024, 128
CAPACITY = 32_768  # 64 MiB a residual, more than the compiler takes to VMEM.
struct = jax.ShapeDtypeStruct
SAVE_SLOTS = jax.checkpoint_policies.save_only_these_names(ps.SLOT_NAME)


def loss(weights, x, keep_x=False, is_weighted=False, behind=lambda x: x, **options):
  def layer(carry, weights):
    x, stash = carry
    *matrices, row_weights, sizes = weights
    options["row_weights"] = row_weights if is_weighted else None
    out, stash = ps.grouped_mlp(stash, x, *matrices, sizes, keep_x=keep_x, **options)
    is_in_group = jnp.arange(ROWS, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return (x + jnp.where(is_in_group[:, None], behind(out), 0), stash), None

  options = {"tiling": (TILE, TILE, TILE)} | options
  specs = [struct((HIDDEN,), x.dtype)] * 2 + [struct((WIDTH,), x.dtype)] * keep_x
  layer = jax.checkpoint(layer, policy=SAVE_SLOTS)
  (x, stash), _ = lax.scan(layer, (x, ps.Stash.empty(CAPACITY, specs)), weights)
  return jnp.sum(ps.seal(x, stash), dtype=jnp.float32)


def arguments(dtype="bfloat16"):
  up, down = (LAYERS, GROUPS, WIDTH, HIDDEN), (LAYERS, GROUPS, HIDDEN, WIDTH)
  beside = struct((LAYERS, ROWS), jnp.float32), struct((LAYERS, GROUPS), jnp.int32)
  return (*(struct(s, dtype) for s in (up, up, down)), *beside), struct((ROWS, WIDTH), dtype)


@pytest.mark.parametrize(
  "chip, options",
  [
    pytest.param("v5p", {"is_weighted": True}, marks=pytest.mark.both),
    once("v5e", {"dtype": "float32", "keep_x": True}),
    once("v6e", {"tiling": (512, 1024, 1024)}),
    once("tpu7x", {"dtype": "float32"}),
    *(long(chip, {"is_weighted": True, "keep_x": True}) for chip in CHIPS),
  ],
)
def test_products_are_written_and_read_in_place(chip, options):
  options = dict(options)
  args = arguments(options.pop("dtype", "bfloat16"))
  gradients = jax.grad(functools.partial(loss, **options), allow_int=True)
  compiled = aot.compile(gradients, *aot.place(args, aot.mesh(chip)))
  buffer, keep_x = struct((CAPACITY, HIDDEN), args[1].dtype), options.get("keep_x", False)
  made_again = {} if keep_x else {"stash_gate_up": 1, "stash_gate_up_backward": 2}
  of_x = {"stash_gate_up_backward": 1, "stash_tgmm": 2} if keep_x else {}
  assert compiled.kernels(is_conditional=True) == made_again
  assert compiled.kernels(is_conditional=False) == {"stash_gate_up": 1} | of_x
  # The down projection; and backward d_x twice and d_w three times, of x from the stash or not.
  assert compiled.matmuls(is_conditional=False)["kernel"] == 6 - 2 * keep_x
  assert is_in_place(compiled, buffer)
  # The stash, the inputs of all layers, the gradients of the weights, and what a layer needs: its
  # weights and their gradients among it.
  elements = buffer.size * 2 + CAPACITY * WIDTH * keep_x + ROWS * LAYERS * WIDTH
  elements += (LAYERS + 4) * 3 * GROUPS * WIDTH * HIDDEN + ROWS * (6 * HIDDEN + 4 * WIDTH)
  assert compiled.memory.temp_size_in_bytes < elements * jnp.dtype(buffer.dtype).itemsize


def is_in_place(compiled, buffer):
  """Returns whether kernels have the stash in HBM, and nothing makes another one.

  What a conditional is given and is small XLA may put into VMEM; a kernel that reads it by blocks
  reads it there.
  """
  shape = f"[{','.join(map(str, buffer.shape))}]"
  return not compiled.copies(buffer) and not any(shape in x for x in compiled.outside_hbm())


@pytest.mark.both
def test_a_replay_makes_hidden_rows_again_without_the_stash():
  """Of a layer whose backward pass needs what the experts return."""
  args = arguments()
  gradients = jax.grad(functools.partial(loss, behind=jnp.sin), allow_int=True)
  compiled = aot.compile(gradients, *aot.place(args, aot.mesh("v5p")))
  assert compiled.kernels(is_conditional=False) == {"stash_gate_up": 2}
  assert is_in_place(compiled, struct((CAPACITY, HIDDEN), args[1].dtype))


def lowered(**options):
  gradients = jax.grad(functools.partial(loss, **options), allow_int=True)
  return jax.jit(gradients).trace(*arguments()).lower(lowering_platforms=("tpu",)).as_text()


IN_PLACE, COPIED = ["stash_gate_up"], ["stash_compact", "stash_expand"]


@pytest.mark.once
@pytest.mark.parametrize(
  "options, kernels",
  [
    ({}, IN_PLACE),
    ({"implementation": "mosaic"}, IN_PLACE),
    ({"implementation": "xla"}, []),
    ({"tiling": lambda m, k, n: (TILE, TILE, TILE)}, IN_PLACE),
    ({"tiling": (TILE, TILE, 384)}, COPIED),
    ({"tiling": (8, TILE, TILE)}, COPIED),
  ],
)
def test_which_kernels_run(options, kernels):
  text = lowered(**options)
  names = "stash_compact", "stash_expand", "stash_gate_up"
  assert [name for name in names if f'kernel_name = "{name}"' in text] == kernels


@pytest.mark.once
@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_lowers_with_64_bits_and_strict_promotion(mode):
  with jax.enable_x64(True), jax.numpy_dtype_promotion(mode):
    text = lowered(is_weighted=True, keep_x=True)
  assert "stash_gate_up_backward" in text and "stash_tgmm" in text
