"""What each way of keeping the residuals of an expert MLP moves, by formula.

Counted is what a layer moves through HBM, forward and backward together, beside the operands and
results that its nine grouped matmuls have anyway. Of `n` routed rows in a worst case of `W`, of
width `D` between layers and `F` hidden features, in elements:

- What lies between the matmuls: they write the rows of gate and up (2 n F); the activation reads
  both and writes the hidden rows, over the worst case as XLA does it (3 W F); backward a matmul
  writes the gradient of the hidden rows (n F), and the gradient of the activation reads that, gate
  and up, and writes their gradients and the hidden rows again (6 W F).
- A residual saved in a scan over layers: XLA writes it to the stack of all layers and reads it out
  again, a fusion each way: 4 W of its width.
- Offloaded: read and written once each, 2 W, and as much goes over the link to the host.
- In a stash by copies: compact moves n in and n out; expand n in and W out, or n out where padding
  is undefined.
- In place: what the kernels themselves write and read. `gmm` writes n. `grouped_mlp` writes gate,
  up and the hidden rows, and backward reads gate and up and writes both gradients and the hidden
  rows: 8 n F, in place of all of the above.
"""

import dataclasses

ITEMSIZE = 2  # bfloat16
# The grouped matmuls of a layer, as cases of `bench.kernels`: kernel, from D to F, and how many.
# d_hidden is one of D to F, the gradients of x are two of F to D.
MATMULS = (("gmm", True, 3), ("gmm", False, 3), ("tgmm", True, 2), ("tgmm", False, 1))


@dataclasses.dataclass(frozen=True)
class Layer:
  """Rows that a device is given in a layer, its worst case, and their widths; see the module."""

  rows: int
  worst_case_rows: int
  width: int
  hidden: int


@dataclasses.dataclass(frozen=True)
class Line:
  """What one way costs a layer.

  Attributes:
    keeps: which residual.
    way: of keeping it.
    hbm_bytes, host_bytes: moved through HBM, and over the link to the host, both directions.
    replayed: how many matmuls of D to F are run again.
    kernels: {kernel of `bench.kernels`: (the matmul that it replaces, and how many)}: what it costs
      more in cycles is hidden by nothing.
  """

  keeps: str
  way: str
  hbm_bytes: int
  host_bytes: int = 0
  replayed: int = 0
  kernels: dict = dataclasses.field(default_factory=dict)


X, MLP = "x", "gate and up"

# Rows of its width that keeping one residual moves, by the way, of n routed ones in a worst case.
MOVED_ROWS = {
  "saved": lambda n, worst: 4 * worst,
  "offloaded": lambda n, worst: 2 * worst,
  "checkpoint": lambda n, worst: 3 * n + worst,
  "checkpoint, undefined padding": lambda n, worst: 4 * n,
}


def kept_bytes(layer: Layer, way: str, width: int) -> int:
  """Returns the bytes that keeping one residual of a layer moves, by one of `MOVED_ROWS`."""
  return MOVED_ROWS[way](layer.rows, layer.worst_case_rows) * width * ITEMSIZE


def gathered_bytes(layer: Layer, width: int) -> int:
  """Returns the bytes that making the sorted rows again moves: a gather of the worst case."""
  return 2 * layer.worst_case_rows * width * ITEMSIZE


def host_bytes(layer: Layer, way: str, width: int) -> int:
  """Returns the bytes of one residual of a layer that go over the link to the host and back."""
  return 2 * layer.worst_case_rows * width * ITEMSIZE if way == "offloaded" else 0


def lines_of(layer: Layer) -> list[Line]:
  """Returns every way: of x, the left-hand side of a grouped matmul; then of gate and up."""
  n, worst, width, hidden = layer.rows, layer.worst_case_rows, layer.width, layer.hidden
  of_mlp = lambda rows: rows * hidden * ITEMSIZE
  between = of_mlp(2 * n + 3 * worst + n + 6 * worst)
  in_mlp = {"gate_up_weights": ("gmm", 2), "gate_up_backward_weights": ("gmm", 1)}
  of_x = lambda way: (kept_bytes(layer, way, width), host_bytes(layer, way, width))
  of_both = lambda way: (
    between + 2 * kept_bytes(layer, way, hidden),
    2 * host_bytes(layer, way, hidden),
  )
  return [
    *(Line(X, way, *of_x(way)) for way in MOVED_ROWS),
    Line(X, "gmm", n * width * ITEMSIZE, kernels={"gmm": ("gmm", 1), "tgmm": ("tgmm", 1)}),
    Line(MLP, "recomputed", between + of_mlp(2 * n), replayed=2),
    *(Line(MLP, way, *of_both(way)) for way in MOVED_ROWS),
    Line(MLP, "grouped_mlp", of_mlp(8 * n), kernels=in_mlp),
  ]
