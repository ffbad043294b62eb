"""What a device holds when it holds most, by formula: where each byte comes from.

The step is that of `bench.fit`: a ring of experts, FSDP over the other devices, `lax.scan` over
layers under `jax.checkpoint`. It holds most in the backward pass of the last layer, when all that
layers keep is there, at one of the moments of `moments_of`. Those are read off the schedule and the
buffers of the compiled step, as XLA makes it for v5p; it might hold less.
"""

import dataclasses

from bench.plan.choices import Choice, STASHES
from bench.plan.setup import BEFORE, Setup
from bench.traffic.account import ITEMSIZE


@dataclasses.dataclass(frozen=True)
class Moment:
  """What is there of the layer that runs, at one moment of its backward pass.

  Attributes:
    wide: residuals and gradients of worst-case rows of width D.
    narrow: those of width F.
    matrices: D x F of each expert of a device: gathered weights, or a gradient of them.
    tokens: of width D, of all devices of a ring; one in float32 counts twice.
  """

  wide: int
  narrow: int
  matrices: int
  tokens: int = 0


def moments_of(setup: Setup, choice: Choice) -> dict[str, Moment]:
  """Returns the moments of a layer's backward pass at which most is there."""
  moments = {
    # Sorted rows, and their gradients from gate and from up; gradients of gate and up; a weight.
    "gradients of the sorted rows": Moment(wide=3, narrow=2, matrices=1),
    # Sorted rows, gradient of the experts' results; hidden rows, gradients of gate and up, which
    # take the place of gate and up; weights of gate and up, gradient of that of the projection.
    "gradient of wo": Moment(wide=2, narrow=3, matrices=3),
  }
  if setup.routing_weights != BEFORE:
    # The results themselves, and their part in the gradient of the routing weights, a sum over the
    # gradient of the tokens.
    moments["gradient of wo"] = Moment(wide=4, narrow=3, matrices=3, tokens=1 + 2)
  elif {"mlpwi_0", "mlpwi_1"} & {*choice.names_in(*STASHES)}:
    # They come out of a conditional, so that nothing takes their place: they are there themselves,
    # as is the gradient of the hidden rows; and the tokens that it would recompute them of.
    moments["gradient of wo"] = Moment(wide=2, narrow=6, matrices=3, tokens=1)
  return moments


def moment_bytes(setup: Setup, moment: Moment) -> int:
  """Returns the bytes of a moment."""
  size = setup.size
  experts = size.num_experts // size.expert_axis
  of_width = lambda width: setup.layer.worst_case_rows * width * ITEMSIZE
  return (
    moment.wide * of_width(size.width)
    + moment.narrow * of_width(size.hidden)
    + moment.matrices * experts * size.width * size.hidden * ITEMSIZE
    + moment.tokens * size.expert_axis * setup.token_bytes
  )


def hbm_parts(setup: Setup, choice: Choice) -> dict[str, int]:
  """Returns the bytes of HBM at the peak, by what they are."""
  size = setup.size
  experts = size.layers * size.num_experts * 3 * size.width * size.hidden // setup.devices
  parameters = experts + size.layers * size.width * size.num_experts  # Each has all the routers.
  row_bytes = setup.stash_row_bytes(choice.names_in(*STASHES))
  staged_bytes = choice.staging_rows * setup.stash_row_bytes(choice.names_in("stash_host"))
  rows = setup.tier_rows(choice.margin, choice.staging_rows).capacity_rows if row_bytes else 0
  moments = moments_of(setup, choice).values()
  return {
    "parameters": parameters * setup.parameter_bytes,
    "gradients": parameters * setup.gradient_bytes,
    "optimizer": parameters * setup.optimizer_bytes,
    "other": setup.other_bytes,
    # And of the layer that runs, its input once more, and the gradient of its output.
    "inputs of layers": (size.layers + 2) * setup.token_bytes,
    "kept": size.layers * setup.worst_case_bytes(choice.names_in("device")),
    "stash": rows * row_bytes,
    # What one layer sends to the host, or gets from there, while another one runs.
    "in flight": setup.worst_case_bytes(choice.names_in("offload")) + staged_bytes,
    "one layer": max(moment_bytes(setup, moment) for moment in moments),
  }


def host_arrays(setup: Setup, choice: Choice) -> list[int]:
  """Returns the bytes of each array in host memory: a name, of all layers."""
  offloaded = [
    setup.size.layers * setup.worst_case_bytes([name]) for name in choice.names_in("offload")
  ]
  names = choice.names_in("stash_host")
  rows = setup.tier_rows(choice.margin, choice.staging_rows).host_capacity_rows if names else 0
  # What moves is whole stages: behind the last row there is room for one.
  rows += choice.staging_rows
  return [*offloaded, *(rows * setup.stash_row_bytes([name]) for name in names)]
