"""What is planned for: a model, a mesh, what else is in memory, and how much memory there is."""

import dataclasses
import functools

from bench.fit.model_sizes import ModelSize
from bench.traffic import account, table
from pallas_stash import sizing
from pallas_stash.kernels.tiling import LANES, round_up

BEFORE, BEHIND = "before", "behind"  # where the weights are multiplied in: the down projection
NAMES = "mlpwi_0", "mlpwi_1", "mlpwo", "x_sorted"
FORWARD_MATMULS = 3  # of the nine of a layer


@dataclasses.dataclass(frozen=True)
class Setup:
  """A training step, and the device that it runs on.

  Attributes:
    size: a `ModelSize`.
    devices: of the mesh; the experts of a layer are spread over `size.expert_axis` of them, and
      the weights of each over the rest.
    routing_weights: `BEFORE` or `BEHIND` the down projection.
    parameter_bytes, gradient_bytes, optimizer_bytes: of one parameter.
    other_bytes: of HBM that is taken by whatever is not an MoE layer.
    hbm_bytes, host_bytes: of memory that there is for a device.
    hbm_bandwidth, host_bandwidth: bytes a second; to the host in one direction, 0 if not known.
    peak_flops: of matmuls, in a second.
    busiest: rows of the busiest device of a layer, as a multiple of the mean.
    forward_seconds: of a layer, all of it; None: that of its three matmuls, at peak.
  """

  size: ModelSize
  devices: int
  routing_weights: str
  parameter_bytes: int
  gradient_bytes: int
  optimizer_bytes: int
  other_bytes: int
  hbm_bytes: int
  host_bytes: int
  hbm_bandwidth: float
  host_bandwidth: float
  peak_flops: float
  busiest: float
  forward_seconds: float | None = None

  def __post_init__(self):
    devices, expert_axis = self.devices, self.size.expert_axis
    if devices % expert_axis:
      raise ValueError(f"{devices=} must be a multiple of {expert_axis=}")
    sizing.worst_case_rows(*self.routing)  # Says what is wrong with the rest.

  @property
  def routing(self):
    """The arguments of the functions of `pallas_stash.sizing`."""
    size = self.size
    return size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts

  @functools.cached_property
  def layer(self) -> account.Layer:
    return table.layer_of(self.size)

  @property
  def needed(self) -> tuple[str, ...]:
    """The results of matmuls that the backward pass needs."""
    return NAMES[:2] if self.routing_weights == BEFORE else NAMES[:3]

  @property
  def matmul_seconds(self) -> float:
    """Of one grouped matmul of balanced routing, at peak."""
    return 2 * self.layer.rows * self.layer.width * self.layer.hidden / self.peak_flops

  @property
  def hiding_seconds(self) -> float:
    """Of a layer's forward pass: what is sent to the host meanwhile, nothing waits for."""
    return self.forward_seconds or FORWARD_MATMULS * self.matmul_seconds

  @property
  def token_bytes(self) -> int:
    """Bytes of the tokens of a device, between layers."""
    return self.size.batch * self.size.seq * self.size.width * account.ITEMSIZE

  def width(self, name: str) -> int:
    return self.size.hidden if name in NAMES[:2] else self.size.width

  def worst_case_bytes(self, names) -> int:
    """Bytes of residuals of one layer, at worst-case size."""
    return sum(self.layer.worst_case_rows * self.width(name) * account.ITEMSIZE for name in names)

  def stash_row_bytes(self, names) -> int:
    """Bytes of a row of residuals as a stash holds them."""
    return sum(round_up(self.width(name), LANES) for name in names) * account.ITEMSIZE

  def capacity_rows(self, margin: float) -> int:
    return sizing.capacity_rows(*self.routing, layers=self.size.layers, margin=margin)

  def tier_rows(self, margin: float, staging_rows: int) -> sizing.TierRows:
    """Returns the rows of both tiers, of which there are as many as `capacity_rows`."""
    layers = self.size.layers
    return sizing.tier_rows(self.capacity_rows(margin) // layers, staging_rows, layers)
