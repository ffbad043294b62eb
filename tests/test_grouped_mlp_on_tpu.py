"""`grouped_mlp` for TPUs: what their compiler makes of a scan of layers. Nothing runs here."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash.kernels import gate_up, gate_up_backward, megablox
from pallas_stash.kernels.activation import Beside
from pallas_stash.kernels.visits import Place
from tests.helpers.checks import long, once

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

CHIPS = list(aot.TOPOLOGIES)
LAYERS, GROUPS, ROWS, WIDTH, HIDDEN, TILE = 3, 8, 8192, 512, 1024, 128
CAPACITY = 32_768  # 64 MiB a residual, more than the compiler takes to VMEM.
struct = jax.ShapeDtypeStruct
SAVE_SLOTS = jax.checkpoint_policies.save_only_these_names(ps.SLOT_NAME)


def loss(
  weights, x, keep_x=False, is_weighted=False, behind=lambda x: x, page_rows=None, **options
):
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
  stash = ps.Stash.empty(CAPACITY, specs, page_rows=page_rows)
  (x, stash), _ = lax.scan(layer, (x, stash), weights)
  return jnp.sum(ps.seal(x, stash), dtype=jnp.float32)


def arguments(dtype="bfloat16"):
  up, down = (LAYERS, GROUPS, WIDTH, HIDDEN), (LAYERS, GROUPS, HIDDEN, WIDTH)
  beside = struct((LAYERS, ROWS), jnp.float32), struct((LAYERS, GROUPS), jnp.int32)
  return (*(struct(s, dtype) for s in (up, up, down)), *beside), struct((ROWS, WIDTH), dtype)


@pytest.mark.parametrize(
  "chip, options",
  [
    once("v5p", {"is_weighted": True}),
    long("v6e", {"tiling": (512, 1024, 1024)}),
    long("tpu7x", {"dtype": "float32"}),
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


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["mosaic", None])
def test_a_replay_makes_hidden_rows_again_without_the_stash(implementation):
  """Of a layer whose backward pass needs what the experts return."""
  args = arguments()
  gradients = jax.grad(
    functools.partial(loss, behind=jnp.sin, implementation=implementation), allow_int=True
  )
  compiled = aot.compile(gradients, *aot.place(args, aot.mesh("v5p")))
  assert compiled.kernels(is_conditional=False) == {"stash_gate_up": 2}
  assert is_in_place(compiled, struct((CAPACITY, HIDDEN), args[1].dtype))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [once("float32"), long("bfloat16")])
def test_the_kernels_compile(chip, dtype):
  """Alone, with all that they take, and widths that are no multiples of a tile."""
  k, n = WIDTH - 64, HIDDEN - 64
  options = megablox.Megablox(jnp.dtype(dtype), (TILE // 2, 2 * TILE, 2 * TILE), False, False)
  static = {"activation": lambda gate, up, bias: jax.nn.silu(gate) * up + bias, "options": options}

  def both(x, w_gate, w_up, w_down, stashes, beside, sizes, place):
    hidden, *kept = gate_up.forward(x, w_gate, w_up, sizes, beside, stashes, place, **static)
    back = gate_up_backward.backward(x, w_down, sizes, beside, kept[:2], place, **static)
    return hidden, back, kept

  array = lambda *shape: struct(shape, dtype)
  stashes = [array(CAPACITY, HIDDEN), array(CAPACITY, HIDDEN), array(CAPACITY, WIDTH)]
  matrices = array(GROUPS, k, n), array(GROUPS, k, n), array(GROUPS, n, k)
  beside = Beside(struct((ROWS,), jnp.float32), (struct((GROUPS, n), jnp.float32),))
  scalars = struct((GROUPS,), jnp.int32), Place(*[struct((), jnp.int32)] * 3)
  args = aot.place((array(ROWS, k), *matrices, stashes, beside, *scalars), aot.mesh(chip))
  compiled = aot.compile(both, *args, donate_argnums=4)
  assert compiled.kernels() == {"stash_gate_up": 1, "stash_gate_up_backward": 1}
  assert is_in_place(compiled, stashes[0])


RING = 4


@pytest.mark.long
@pytest.mark.parametrize("is_inside", [True, False])
def test_where_types_say_what_varies(is_inside):
  """With `check_vma`, on four devices: the scan inside of `shard_map`, or around it."""
  mesh, ((*matrices, row_weights, sizes), x) = aot.mesh("v5p", RING), arguments()
  weights, specs = (*matrices, row_weights, sizes), [struct((HIDDEN,), x.dtype)] * 2
  of_rows, of_weights = P("expert"), (P(), P(), P(), P(None, "expert"), P(None, "expert"))
  on_devices = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)

  def layer(carry, weights):
    x, stash = carry
    *matrices, row_weights, sizes = weights
    options = {"row_weights": row_weights, "tiling": (TILE, TILE, TILE), "axis_name": "expert"}
    out, stash = ps.grouped_mlp(stash, x, *matrices, sizes, **options)
    is_in_group = jnp.arange(ROWS, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return (x + jnp.where(is_in_group[:, None], out, 0), stash), None

  def ring_loss(weights, x):
    if is_inside:

      def device_loss(weights, x):
        stash = lax.pcast(ps.Stash.empty(CAPACITY, specs), "expert", to="varying")
        return ps.seal(*lax.scan(jax.checkpoint(layer, policy=SAVE_SLOTS), (x, stash), weights)[0])

      out = on_devices(device_loss, in_specs=(of_weights, of_rows), out_specs=of_rows)(weights, x)
    else:
      stash = ps.Stash.empty(CAPACITY, specs, RING)
      place = lambda leaf: lax.with_sharding_constraint(leaf, NamedSharding(mesh, of_rows))
      carry, of_layer = (of_rows, of_rows), (P(), P(), P(), of_rows, of_rows)
      run = on_devices(lambda *args: layer(*args)[0], in_specs=(carry, of_layer), out_specs=carry)
      step = jax.checkpoint(lambda *args: (run(*args), None), policy=SAVE_SLOTS)
      out = ps.seal(*lax.scan(step, (x, jax.tree.map(place, stash)), weights)[0])
    return jnp.sum(out, dtype=jnp.float32)

  of_all = lambda leaf, axis: struct(
    tuple(size * RING if i == axis else size for i, size in enumerate(leaf.shape)), leaf.dtype
  )
  weights = *matrices, of_all(row_weights, 1), of_all(sizes, 1)
  args = aot.place((weights, of_all(x, 0)), mesh, (of_weights, of_rows))
  compiled = aot.compile(jax.grad(ring_loss, allow_int=True), *args)
  # Megablox does not say along which axes its results vary.
  megablox = {"stash_gmm": 3, "stash_tgmm": 3}
  assert compiled.kernels(is_conditional=False) == {"stash_gate_up": 1} | megablox
  assert compiled.kernels(is_conditional=True)["stash_gate_up_backward"] == 2
  assert is_in_place(compiled, struct((CAPACITY, HIDDEN), x.dtype))


def lowered(dtype="bfloat16", **options):
  gradients = jax.grad(functools.partial(loss, **options), allow_int=True)
  return jax.jit(gradients).trace(*arguments(dtype)).lower(lowering_platforms=("tpu",)).as_text()


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
    ({"dtype": "float16"}, COPIED),
    ({"page_rows": 32}, COPIED),
    ({"tiling": (3 * TILE, TILE, TILE)}, COPIED),  # Nor does megablox take these two.
    ({"tiling": (16, TILE, TILE), "is_weighted": True}, IN_PLACE),
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
