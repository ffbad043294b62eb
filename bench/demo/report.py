"""What the demo prints."""

import time

START = time.monotonic()


def log(message):
  print(f"[{time.monotonic() - START:5.1f} s] {message}", flush=True)


def print_table(trainings, worst_case_rows: int):
  """Prints a line for each training.

  Args:
    trainings: a `Training` by its name; of "saved", which has no stash, the worst case is kept.
    worst_case_rows: of all layers on one device.
  """
  steps = len(trainings["saved"].losses)
  table = [
    ("", "loss,", "loss,", "compiled", "rows kept of worst case,", "overflowed"),
    ("residuals", "step 1", f"step {steps}", "temp bytes", "peak", "pushes"),
  ]
  for name, training in trainings.items():
    rows = worst_case_rows if name == "saved" else training.peak_rows.max()
    table.append(
      (
        name,
        f"{training.losses[0]:.6f}",
        f"{training.losses[-1]:.6f}",
        f"{training.temp_bytes:,}",
        f"{rows:,} of {worst_case_rows:,}, {rows / worst_case_rows:.1%}",
        "-" if name == "saved" else f"{training.overflowed.sum()} of {training.rows.size}",
      )
    )
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  print()
  for first, *cells in table:
    cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
    print("   ".join([first.ljust(widths[0]), *cells]))
  print()
