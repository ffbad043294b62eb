"""How much room a stash needs where routing is imbalanced: simulated routing, a real allocator.

The model: an expert's popularity is drawn from a symmetric Dirichlet distribution, and the choices
of a ring's tokens from a multinomial one (Dirichlet-multinomial). Of both, sums over the experts of
a device have the same form, so devices are drawn directly. The Dirichlet parameter is the one for
which the busiest device of a layer receives, in the mean over layers, the asked-for multiple of the
mean. Popularity is drawn anew for each layer (`independent`), or once for all (`persistent`, the
worst case for a stash: the same device is the busiest in every layer). That a token's experts
differ is not modelled.
"""

from matplotlib.figure import Figure
import numpy as np

from bench.fit.model_sizes import ModelSize
import pallas_stash as ps

RATIOS = (1.1, 1.25, 1.5, 2.0)  # the busiest device of a layer to the mean
MARGINS = np.round(np.arange(0.5, 2.525, 0.025), 3)  # capacity, a multiple of the expected rows
PRINTED = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of MARGINS
RINGS = 64  # how often all layers are routed


def device_rows(rng, size: ModelSize, concentration: float, is_persistent: bool) -> np.ndarray:
  """Routes tokens.

  Args:
    rng: a NumPy random generator.
    size: of the model.
    concentration: the Dirichlet parameter of a device; higher is more balanced.
    is_persistent: whether all layers of a ring draw the same popularity.

  Returns:
    int[RINGS, layers, devices], the rows that each device of a ring receives.
  """
  popularity = rng.dirichlet(
    np.full(size.expert_axis, concentration), (RINGS, 1 if is_persistent else size.layers)
  )
  popularity = np.broadcast_to(popularity, (RINGS, size.layers, size.expert_axis))
  choices = size.expert_axis * size.batch * size.seq * size.top_k
  worst_case = ps.sizing.worst_case_rows(*routing(size))
  return np.minimum(rng.multinomial(choices, popularity), worst_case)


def routing(size):
  return size.batch, size.seq, size.top_k, size.expert_axis, size.num_experts


def concentration_of(size: ModelSize, ratio: float) -> float:
  """The Dirichlet parameter at which the busiest device receives `ratio` times the mean."""
  low, high = 1e-2, 1e6
  while high > 1.001 * low:
    middle = np.sqrt(low * high)
    rows = device_rows(np.random.default_rng(0), size, middle, is_persistent=False)
    is_too_uneven = np.mean(rows.max(-1) / rows.mean(-1)) > ratio
    low, high = (middle, high) if is_too_uneven else (low, middle)
  return high


def recomputed_share(rows: np.ndarray, capacity_rows: int) -> float:
  """The share of layers, over all devices, whose rows a stash of `capacity_rows` does not take.

  Args:
    rows: int[rings, layers, devices], pushed in the order of layers.
    capacity_rows: rows of the stash of each device.
  """
  top = np.zeros(rows.shape[::2], int)
  overflows = 0
  for layer in range(rows.shape[1]):
    fits = top + rows[:, layer] <= capacity_rows
    overflows += np.sum(~fits)
    top += np.where(fits, -(-rows[:, layer] // 8) * 8, 0)  # a push starts on a tile boundary
  return overflows / rows.size


def simulate(size: ModelSize) -> dict[tuple[float, str], list[float]]:
  """Returns the share of layers recomputed at each of `MARGINS`, by ratio and kind of routing."""
  capacities = [
    ps.sizing.capacity_rows(*routing(size), layers=size.layers, margin=margin) for margin in MARGINS
  ]
  curves = {}
  for ratio in RATIOS:
    concentration = concentration_of(size, ratio)
    for kind in ("independent", "persistent"):
      rng = np.random.default_rng(1)
      rows = device_rows(rng, size, concentration, kind == "persistent")
      curves[ratio, kind] = [recomputed_share(rows, capacity) for capacity in capacities]
  return curves


def table(curves: dict[tuple[float, str], list[float]]) -> list[tuple[str, ...]]:
  """The share of layers recomputed at a few capacities."""
  lines = [("busiest : mean", "popularity", *(f"{margin:.2f}" for margin in PRINTED))]
  for (ratio, kind), shares in curves.items():
    found = dict(zip(MARGINS.tolist(), shares, strict=True))
    lines.append((f"{ratio:.2f}", kind, *(f"{found[margin]:.1%}" for margin in PRINTED)))
  return lines


def plot(curves: dict[tuple[float, str], list[float]], title: str) -> Figure:
  """Draws the curves."""
  figure = Figure(figsize=(9, 5), layout="constrained")
  axes = figure.subplots()
  for i, ratio in enumerate(dict.fromkeys(ratio for ratio, _ in curves)):
    for kind, style in ("independent", "-"), ("persistent", "--"):
      label = f"busiest device {ratio:g} times the mean" if kind == "independent" else None
      axes.plot(MARGINS, np.multiply(curves[ratio, kind], 100), style, color=f"C{i}", label=label)
  axes.plot([], [], "--", color="0.4", label="the same experts popular in all layers")
  axes.set_xlabel("capacity of the stash, as a multiple of the rows of perfect balance")
  axes.set_ylabel("layers recomputed, %")
  axes.set_title(title)
  axes.set_ylim(0)
  axes.margins(x=0)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False)
  return figure
