"""Which tests `.ci/run` runs on which of its two Pythons, `--share=default` and `--share=newest`.

- What is marked `both` runs on both: it leans on what differs from one jax to the next.
- A test of several values runs on both, with every other value on each; where it has several
  parameters, as the squares of a chessboard, so that each jax runs every value of each.
- All else, and each value of what is marked `once`, alike with every jax, runs on one of them.

Without `--share` everything runs: `make test` and `make test-long`.
"""

import collections
import zlib

SHARES = "newest", "default"
PERCENT_ON_DEFAULT = 55  # Of those that run once: then both finish together.


def share_of(items, share):
  """Returns the items of `share`, in their order.

  Args:
    items: pytest items, all that run if nothing is shared.
    share: one of `SHARES`.
  """
  tests = collections.defaultdict(list)
  for item in items:
    tests[item.nodeid.partition("[")[0]].append(item)
  pythons = {}
  for values in tests.values():
    colors = colors_of(filter(is_shared, values))
    if len(set(colors.values())) < 2:  # Otherwise one Python would not run this test at all.
      colors = {}
    for item in values:
      # By name, as one Python may have tests that the other has not.
      is_default = zlib.crc32(item.nodeid.encode()) % 100 < PERCENT_ON_DEFAULT
      pythons[item] = {SHARES[colors.get(item, is_default)]}
      if item.get_closest_marker("both"):
        pythons[item] = set(SHARES)
  return [item for item in items if share in pythons[item]]


def is_shared(item):
  return hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("once", "both")))


def colors_of(items):
  """Returns {item: 0 or 1}: the other one where one parameter of a test takes its next value."""
  colors, indices = {}, collections.defaultdict(dict)
  for item in items:
    params = dict(item.callspec.params)
    together = []  # Values of names that take theirs together count once.
    for mark in item.iter_markers("parametrize"):
      names = mark.args[0]
      names = names.split(",") if isinstance(names, str) else names
      together.append([params.pop(name.strip()) for name in names])
    together += [[value] for value in params.values()]  # Of fixtures.
    colors[item] = 0
    for parameter, values in enumerate(together):
      seen = indices[parameter]
      colors[item] ^= seen.setdefault(tuple(map(id, values)), len(seen)) % 2
  return colors
