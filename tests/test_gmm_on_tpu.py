"""`gmm` for TPUs: what the real TPU compiler makes of a scan of layers. Nothing runs here."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from bench.tpu import aot
import pallas_stash as ps
from pallas_stash.kernels import grouped, megablox
from pallas_stash.kernels.visits import Place
from tests.helpers.checks import long, once

pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")

CHIPS = list(aot.TOPOLOGIES)
LAYERS, GROUPS, ROWS, WIDTH, HIDDEN, TILE = 3, 8, 8192, 1024, 512, 128
CAPACITY = 32_768  # 64 MiB, more than the compiler takes to VMEM.
struct = jax.ShapeDtypeStruct
SAVE_SLOTS = jax.checkpoint_policies.save_only_these_names(ps.SLOT_NAME)


def loss(weights, x, groups_here, page_rows=None, **options):
  options = {"preferred_element_type": x.dtype, "tiling": (TILE, TILE, TILE)} | options

  def layer(carry, weights):
    x, stash = carry
    up, down, sizes = weights
    if groups_here < GROUPS:
      options["group_offset"] = jnp.int32(1)
    hidden, stash = ps.gmm(stash, x, up, sizes, **options)
    is_in_group = jnp.arange(ROWS, dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return (x + jnp.where(is_in_group[:, None], jax.nn.silu(hidden), 0) @ down, stash), None

  stash = ps.Stash.empty(CAPACITY, [struct((WIDTH,), x.dtype)], page_rows=page_rows)
  layer = jax.checkpoint(layer, policy=SAVE_SLOTS)
  (x, stash), _ = lax.scan(layer, (x, stash), weights)
  return jnp.sum(ps.seal(x, stash), dtype=jnp.float32)


def arguments(dtype="bfloat16", groups_here=GROUPS):
  up, down = (groups_here, WIDTH, HIDDEN), (HIDDEN, WIDTH)
  weights = [struct((LAYERS, *shape), dtype) for shape in (up, down)]
  return (*weights, struct((LAYERS, GROUPS), jnp.int32)), struct((ROWS, WIDTH), dtype)


def program(chip, dtype="bfloat16", groups_here=GROUPS, **options):
  gradients = jax.grad(functools.partial(loss, groups_here=groups_here, **options), allow_int=True)
  args = aot.place(arguments(dtype, groups_here), aot.mesh(chip))
  return aot.compile(gradients, *args), struct((CAPACITY, WIDTH), dtype)


# Of two bytes, libtpu 0.0.42 tiles a stash for Ironwood in another way than it does for kernels,
# unless it is very large: it copies it for each of them, those of compact and expand as well.
TILES_ALIKE = not jax.__version__.startswith("0.10.")


@pytest.mark.parametrize(
  "chip, options",
  [
    once("v5e", {}),
    *(long(chip, {}) for chip in CHIPS[1:]),
    long("v6e", {"groups_here": 4}),
    *(long(chip, {"groups_here": 4, "dtype": "float32"}) for chip in CHIPS),
  ],
)
def test_the_stash_is_written_and_read_in_place(chip, options):
  """By matmuls; of the first, the replay of the layer keeps none of its operands."""
  compiled, buffer = program(chip, **options)
  assert compiled.kernels() == {"stash_gmm": 1, "stash_tgmm": 1}
  assert compiled.matmuls(is_conditional=False)["kernel"] == 2  # The replay, and d_lhs.
  assert compiled.outside_hbm() == []
  if chip == "tpu7x" and buffer.dtype == "bfloat16" and not TILES_ALIKE:
    return
  assert compiled.copies(buffer) == []
  # One stash, the inputs of all layers, the gradients of the weights, and what a layer needs.
  elements = buffer.size + ROWS * LAYERS * WIDTH + (LAYERS + 1) * GROUPS * WIDTH * HIDDEN
  elements += ROWS * 5 * (WIDTH + HIDDEN)
  assert compiled.memory.temp_size_in_bytes < elements * jnp.dtype(buffer.dtype).itemsize


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [once("float32"), long("bfloat16")])
def test_the_kernels_compile(chip, dtype):
  """Alone, with groups elsewhere, rows that are transposed and k that is no multiple of a tile."""
  groups_here, k, n = GROUPS // 2, WIDTH - 64, HIDDEN
  options = megablox.Megablox(jnp.dtype(dtype), (TILE, TILE, TILE), True, False)

  def both(lhs, rhs, stash, d_out, sizes, offset, place):
    _, kept = grouped.gmm_and_keep(lhs, rhs, stash, sizes, offset, place, options=options)
    of_rhs = {"k": k, "dtype": rhs.dtype, "groups_here": groups_here, "options": options}
    return kept, grouped.tgmm(kept, d_out, sizes, offset, place, **of_rhs)

  shapes = (ROWS, k), (groups_here, n, k), (CAPACITY, WIDTH), (ROWS, n)
  scalars = Place(*[struct((), jnp.int32)] * 3)
  args = (
    *(struct(shape, dtype) for shape in shapes),
    struct((GROUPS,), jnp.int32),
    scalars[0],
    scalars,
  )
  compiled = aot.compile(both, *aot.place(args, aot.mesh(chip)), donate_argnums=2)
  assert compiled.kernels() == {"stash_gmm": 1, "stash_tgmm": 1}
  assert compiled.copies(struct((CAPACITY, WIDTH), dtype)) == []


RING = 4


def ring_layer(carry, weights):
  """Each device multiplies the rows of its own groups, wherever they start."""
  (x, stash), (up, down, sizes) = carry, weights
  first = GROUPS // RING * lax.axis_index("expert")
  options = {"preferred_element_type": x.dtype, "tiling": (TILE, TILE, TILE)}
  hidden, stash = ps.gmm(stash, x, up, sizes, group_offset=first, **options)
  return (x + lax.psum(jax.nn.silu(hidden) @ down, "expert"), stash), None


def scan_in_shard_map(mesh, weights, x, spec, of_weights):
  def device_loss(weights, x):
    stash = ps.Stash.empty(CAPACITY, [spec])
    layer = jax.checkpoint(ring_layer, policy=SAVE_SLOTS)
    return ps.seal(*lax.scan(layer, (x, stash), weights)[0])

  options = {"in_specs": (of_weights, P()), "out_specs": P(), "check_vma": False}
  return jax.shard_map(device_loss, mesh=mesh, **options)(weights, x)


def shard_map_in_scan(mesh, weights, x, spec, of_weights):
  stash = ps.Stash.empty(CAPACITY, [spec], RING)
  place = lambda leaf: lax.with_sharding_constraint(leaf, NamedSharding(mesh, P("expert")))
  carry = P(), P("expert")
  of_layer = P(*of_weights[0][1:]), *of_weights[1:]
  options = {"in_specs": (carry, of_layer), "out_specs": carry, "check_vma": False}
  on_devices = jax.shard_map(lambda *args: ring_layer(*args)[0], mesh=mesh, **options)
  layer = jax.checkpoint(lambda *args: (on_devices(*args), None), policy=SAVE_SLOTS)
  return ps.seal(*lax.scan(layer, (x, jax.tree.map(place, stash)), weights)[0])


@pytest.mark.parametrize("structure", [long(scan_in_shard_map), long(shard_map_in_scan)])
def test_in_a_ring_of_experts(structure):
  mesh, (weights, x) = aot.mesh("v5p", RING), arguments()
  buffer, of_weights = struct((CAPACITY, WIDTH), x.dtype), (P(None, "expert"), P(), P())

  def ring_loss(weights, x):
    out = structure(mesh, weights, x, struct((WIDTH,), x.dtype), of_weights)
    return jnp.sum(out, dtype=jnp.float32)

  args = aot.place((weights, x), mesh, (of_weights, P()))
  compiled = aot.compile(jax.grad(ring_loss, allow_int=True), *args)
  assert compiled.kernels() == {"stash_gmm": 1, "stash_tgmm": 1}
  assert compiled.copies(buffer) == []


def lowered(**options):
  gradients = jax.grad(functools.partial(loss, groups_here=GROUPS, **options), allow_int=True)
  return jax.jit(gradients).trace(*arguments()).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.once
@pytest.mark.parametrize(
  "options, kernels",
  [
    ({}, ["stash_gmm", "stash_tgmm"]),
    ({"implementation": "mosaic"}, ["stash_gmm", "stash_tgmm"]),
    ({"implementation": "xla"}, []),
    ({"tiling": lambda m, k, n: (TILE, TILE, TILE)}, ["stash_gmm", "stash_tgmm"]),
    ({"tiling": (TILE, 384, TILE)}, ["stash_compact", "stash_expand"]),
    ({"tiling": (8, TILE, TILE)}, ["stash_compact", "stash_expand"]),
    ({"page_rows": 32}, ["stash_compact", "stash_expand"]),
    ({"interpret": True}, ["stash_compact", "stash_expand"]),
    ({"grouped_matmul": lax.ragged_dot}, ["stash_compact", "stash_expand"]),
  ],
)
def test_which_kernels_run(options, kernels):
  text = lowered(**options)
  names = "stash_compact", "stash_expand", "stash_gmm", "stash_tgmm"
  assert [name for name in names if f'kernel_name = "{name}"' in text] == kernels


@pytest.mark.once
def test_debug_sums_up_the_rows_in_the_stash():
  gradients = jax.grad(functools.partial(loss, groups_here=GROUPS), allow_int=True)
  with ps.debug():
    text = str(jax.make_jaxpr(gradients)(*arguments()))
  assert "stash_gmm" in text and "stash_compact" not in text


@pytest.mark.once
@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_lowers_with_64_bits_and_strict_promotion(mode):
  with jax.enable_x64(True), jax.numpy_dtype_promotion(mode):
    text = lowered()
  assert "stash_gmm" in text and "stash_tgmm" in text
