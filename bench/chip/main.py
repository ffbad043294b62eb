"""What to run first on a TPU: a few minutes, in the order in which a failure says most.

`make chip`, or `python -m bench.chip`. The steps, and what each would show, are those of
`bench.chip.steps`; `docs/on-a-tpu.md` says what else only a chip can settle. Each step is named
before it runs, so that where the chip halts, or hangs, the last line says in which. Fails if a step
does; where there is no TPU it says so, runs nothing, and does not fail.

With `--anywhere` the steps run small on whatever device is here, kernels as XLA has them.
"""

import sys
import time
import traceback

from absl import flags
import jax

from bench.chip import steps

ANYWHERE = flags.DEFINE_bool("anywhere", False, "Run on what is here, small, if it is no TPU.")
ONLY = flags.DEFINE_multi_enum("step", [], list(steps.STEPS), "Only these, in this order.")

NO_TPU = (
  "chip: NOTHING WAS RUN. There is no TPU here: JAX has {devices}. Run `make chip` on a TPU host;"
  " docs/on-a-tpu.md says what it would show."
)


def run(names, scale) -> list[str]:
  """Runs steps, printing what each saw; returns the names of those that failed."""
  failed = []
  for number, name in enumerate(names, 1):
    step = steps.STEPS[name]
    print(f"[{number}/{len(names)}] {name}: {step.shows} ...", flush=True)
    started = time.perf_counter()
    try:
      saw, verdict = step.run(scale), "ok"
    except Exception as error:  # A step may fail in any way: what it means is still to be said.
      traceback.print_exc()
      saw, verdict = f"{type(error).__name__}. {step.if_not}", "FAILED"
      failed.append(name)
    print(f"    {verdict} in {time.perf_counter() - started:.1f} s: {saw}", flush=True)
  return failed


def main(args):
  del args
  is_tpu = jax.default_backend() == "tpu"
  if not is_tpu and not ANYWHERE.value:
    print(NO_TPU.format(devices=", ".join(sorted({d.device_kind for d in jax.devices()}))))
    return
  scale = steps.ON_A_TPU if is_tpu else steps.SMALL
  failed = run(ONLY.value or list(steps.STEPS), scale)
  if failed:
    sys.exit(f"chip: FAILED: {', '.join(failed)}.")
  print("chip: all steps are right.")
