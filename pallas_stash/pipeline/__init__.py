"""Pipeline schedules as data: who runs what when, where it keeps what, and how much it must hold.

A model is cut into *stages*, consecutive layers. A *placement* puts each stage on a *rank* of the
pipeline, as one of its *chunks*. A *pass* takes one microbatch forward or backward through one
stage. A *schedule* gives each rank its program of passes, in an order that stays as it is however
long they take.

An executor that runs one program on all ranks goes by *ticks*: in each, a rank runs one step, at
most one forward and one backward pass, or nothing, and then sends on what it made. `tabulate` says
what each rank does at each tick, and in which *place*, an entry of a buffer of fixed size, each
value waits until it is used.

    schedule = pipeline.one_f_one_b(ranks=4, microbatches=16)
    table = pipeline.tabulate(schedule)
    layers = pipeline.layer_partition(schedule, [1] * 27)
    capacity = pipeline.capacity_rows(schedule, None, 4096, pushes=layers, page_rows=512)
"""

from pallas_stash.pipeline.capacity import capacity_rows
from pallas_stash.pipeline.partition import layer_partition
from pallas_stash.pipeline.schedules import (
  dual_pipe_v,
  interleaved,
  one_f_one_b,
  Pass,
  Schedule,
  zero_bubble,
)
from pallas_stash.pipeline.ticks import (
  idle_share,
  route_name,
  Table,
  tabulate,
  Timed,
  timeline,
)

__all__ = [
  "capacity_rows",
  "dual_pipe_v",
  "idle_share",
  "interleaved",
  "layer_partition",
  "one_f_one_b",
  "Pass",
  "route_name",
  "Schedule",
  "Table",
  "tabulate",
  "Timed",
  "timeline",
  "zero_bubble",
]
