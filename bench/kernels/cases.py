"""The cases of the kernel benchmark, and the floor that memory bandwidth puts under each."""

from typing import NamedTuple

import jax.numpy as jnp

from bench.kernels.alternatives import ALTERNATIVES

# Of one JAX device: bytes a second, and bfloat16 FLOPs of matmuls, as
# https://cloud.google.com/tpu/docs states them a chip (a tpu7x chip is two devices); and cycles a
# second, commonly quoted and not published as such.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "tpu7x": 7370e9 / 2}
PEAK_FLOPS = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12 / 2}
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 1.9e9}


class HostLink(NamedTuple):
  """The link, PCIe, between one JAX device and its host.

  Attributes:
    bytes_per_second: in one direction.
    is_assumed: whether nothing that is published says it of this chip.
    source: where it is from.
  """

  bytes_per_second: float
  is_assumed: bool
  source: str


# Google publishes none of them with its chips. Those who write JAX do, rounded, in "How to Scale
# Your Model", of which this is the page. Of tpu7x it says nothing.
_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
HOST_LINKS = {
  "v5e": HostLink(15e9, False, f"{_BOOK}, question 6, of v5e: 1.5e10 each link"),
  "v5p": HostLink(15e9, True, f"{_BOOK}: typically around 1.6e10, v5p not named; that of v5e"),
  "v6e": HostLink(32e9, False, f"{_BOOK}: 3.2e10 for TPU v6e"),
}

# Worst-case rows and width: DeepSeek-V3, its narrow activations, Mixtral, Qwen3-235B.
SHAPES = {
  "DeepSeek-V3": (262_144, 7168),
  "DeepSeek-V3 ffn": (262_144, 2048),
  "Mixtral": (65_536, 4096),
  "Qwen3-235B": (262_144, 4096),
}
OURS = "pallas_stash"
KERNELS = "compact", "expand", "expand_undefined"
LAYOUTS = "prefix", "run", "buckets-8", "buckets-256", "ragged-8", "ragged-256"
DTYPES = "bfloat16", "float32", "float8_e4m3fn", "int8"
OCCUPANCIES = 0.05, 0.25, 0.5, 1.0
# What is compared with the prefix layout: groups of 64 rows and more.
LAYOUTS_COMPARED = (
  *(("prefix", 5), ("run", 5), ("buckets-8", 5), ("buckets-128", 0), ("buckets-128", 5)),
  *(("ragged-8", 5), ("ragged-128", 5), ("pages-512", 0)),
)
FEWER = 32_768, 7168
# Rows of a worst case whose copies by XLA the compiler estimates in time.
FEW_ROWS = 8192


def make_case(chip, kernel, layout="prefix", occupancy=0.25, shape=(262_144, 7168), **options):
  """Returns a case; `rows` are those that are copied."""
  total_rows, width = shape
  rows = int(total_rows * occupancy) // 256 * 256
  case = {"chip": chip, "kernel": kernel, "implementation": OURS, "layout": layout}
  case |= {"occupancy": occupancy, "width": width, "dtype": "bfloat16", "rows": rows, "offset": 0}
  return case | {"total_rows": total_rows} | options


def floor_cycles(chip, bytes_moved):
  return bytes_moved / BANDWIDTH[chip] * CLOCK[chip]


def comparison_cases(chip):
  """The kernels beside every alternative, on the same work."""
  for kernel in "compact", "expand":
    for implementation in OURS, *ALTERNATIVES:
      yield make_case(chip, kernel, implementation=implementation, shape=(FEW_ROWS, 7168))


def default_cases():
  """One thing at a time changed from 25% of DeepSeek-V3, and the comparison with alternatives."""
  others = [
    *({"shape": shape} for shape in SHAPES.values()),
    *({"occupancy": occupancy} for occupancy in OCCUPANCIES if occupancy != 0.25),
    # Where rows are shifted the estimate takes long, so there of an eighth of the rows.
    {"shape": FEWER},
    *({"shape": FEWER, "layout": name, "offset": offset} for name, offset in LAYOUTS_COMPARED),
    *({"shape": FEWER, "dtype": dtype} for dtype in DTYPES[1:]),
  ]
  for chip in BANDWIDTH:
    yield from comparison_cases(chip)
    for kernel in KERNELS:
      for other in others:
        yield make_case(chip, kernel, **other)


def full_cases():
  """The whole matrix."""
  for chip in BANDWIDTH:
    for kernel in KERNELS:
      for shape in SHAPES.values():
        for occupancy in OCCUPANCIES:
          for layout in LAYOUTS:
            for dtype in DTYPES:
              for offset in 0, 5:
                options = {"shape": shape, "dtype": dtype, "offset": offset}
                yield make_case(chip, kernel, layout, occupancy, **options)
    yield from comparison_cases(chip)


def check_cases():
  """4096 rows of 7168 bfloat16; on v5p also what costs most of its prefix, narrow bytes."""
  for chip in BANDWIDTH:
    for kernel in KERNELS:
      yield make_case(chip, kernel, shape=(16_384, 7168))
    if chip == "v5p":
      for kernel in "compact", "expand_undefined":
        for layout, offset in ("prefix", 0), ("ragged-128", 5):
          options = {"shape": (FEWER[0], 2048), "dtype": "int8", "offset": offset}
          yield make_case(chip, kernel, layout, **options)


def sweep_cases():
  """Layouts, offsets, dtypes and widths beside the prefix of the same rows; groups of 64 and up."""
  for dtype, width in ("bfloat16", 7168), *((dtype, 2048) for dtype in DTYPES):
    for chip in BANDWIDTH:
      for kernel in KERNELS:
        for layout, offset in ("prefix", 0), *LAYOUTS_COMPARED:
          options = {"shape": (FEWER[0], width), "dtype": dtype, "offset": offset}
          yield make_case(chip, kernel, layout, **options)


NO_ESTIMATE = "tpu7x", "gate_up_backward"  # On which the estimator aborts; not with row weights.
# What replaces how many of which matmul of megablox, each from width to hidden width.
MLP_KERNELS = {
  "gate_up": ("gmm", 2),
  "gate_up_x": ("gmm", 2),
  "gate_up_weights": ("gmm", 2),
  "gate_up_backward": ("gmm_transposed", 1),
  "gate_up_backward_weights": ("gmm_transposed", 1),
}


def grouped_cases():
  """Grouped matmuls of 8192 rows between the widths of DeepSeek-V3, and those of an expert MLP.

  Each follows the one of megablox that it is compared with.
  """
  for chip in BANDWIDTH:
    of_megablox = lambda case: case | {"implementation": "megablox"}
    case = {"chip": chip, "rows": FEW_ROWS, "implementation": OURS}
    for kernel in "gmm", "tgmm":
      for k, n in (7168, 2048), (2048, 7168):
        sizes = {"kernel": kernel, "k": k, "n": n}
        yield of_megablox(case | sizes)
        yield case | sizes
    sizes = {"k": 7168, "n": 2048}
    for matmul in "gmm", "gmm_transposed":
      yield of_megablox(case | sizes | {"kernel": matmul})
      for kernel, (replaced, _) in MLP_KERNELS.items():
        if replaced == matmul and (chip, kernel) != NO_ESTIMATE:
          yield case | sizes | {"kernel": kernel}


# Of DeepSeek-V3: rows of a push at worst case, and of a stash of 58 layers.
TOTAL_ROWS, CAPACITY = 262_144, 58 * 65_536
PAGE_ROWS = 512


def page_cases(chip):
  """Pairs without pages and with: what is beside the kernels of a push, a restore and a free."""
  for kernel in "push", "restore", "free":
    yield [{"chip": chip, "kernel": kernel, "page_rows": rows} for rows in (None, PAGE_ROWS)]


def itemsize(case):
  return jnp.dtype(case["dtype"]).itemsize
