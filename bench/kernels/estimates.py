"""Estimates of the compiler, each in a process of its own: it aborts on some cases."""

import json
import subprocess
import sys

TIMEOUT = 300  # Seconds for a case.


def cycles_of(case, module="static"):
  """Returns the estimated cycles of a case and None; or None and why there is no estimate."""
  command = [sys.executable, "-m", f"bench.kernels.{module}", json.dumps(case)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    return json.loads(done.stdout.splitlines()[-1])["estimated_cycles"], None
  except subprocess.TimeoutExpired:
    return None, f"no estimate in {TIMEOUT} s"
  except (IndexError, ValueError, KeyError):
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "failed" in line]
    return None, f"no estimate: {lines[-1] if lines else done.returncode}"
