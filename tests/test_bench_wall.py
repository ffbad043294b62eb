"""What is measured on a device: the candidates do the same work, and profiles are read right."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernels import wall
from tests.helpers.support import ON_TPU

pytestmark = pytest.mark.once


def make_plane(name, **lines):
  """A plane of a profile, its lines as lists of (start, duration) in ns."""
  events = lambda line: [SimpleNamespace(start_ns=s, duration_ns=d) for s, d in line]
  lines = [SimpleNamespace(name=n.replace("_", " "), events=events(e)) for n, e in lines.items()]
  return SimpleNamespace(name=name, lines=lines)


class TestDeviceSeconds:
  host = make_plane("/host:CPU", python=[(0, 99), (1, 99)])

  def test_a_tpu_has_one_event_for_a_program(self):
    tpu = make_plane("/device:TPU:0", XLA_Modules=[(7, 30), (0, 10)], XLA_Ops=[(0, 1)] * 5)
    assert wall.device_seconds([self.host, tpu], 2) == pytest.approx([10e-9, 30e-9])

  def test_a_gpu_has_kernels_in_streams(self):
    gpu = make_plane("/device:GPU:0", Stream_1=[(0, 1), (9, 4), (1, 2)], Stream_2=[(8, 3)])
    assert wall.device_seconds([self.host, gpu], 2) == pytest.approx([3e-9, 7e-9])

  def test_what_is_no_device_or_another_number_of_programs(self):
    tpu = make_plane("/device:TPU:0", XLA_Modules=[(0, 10)] * 3)
    for planes in [self.host], [self.host, tpu], []:
      with pytest.raises(RuntimeError, match="no device with 2 programs"):
        wall.device_seconds(planes, 2)


def test_reads_a_profile_of_this_host(tmp_path, monkeypatch):
  """Of the profiler itself: a CPU has no device plane, but its file is found and parsed."""
  planes = []
  monkeypatch.setattr(wall, "device_seconds", lambda found, calls: planes.extend(found) or [calls])
  double = jax.jit(lambda x: 2 * x)
  assert wall.profile(lambda: double(jnp.ones(8)).block_until_ready(), 3) == [3]
  assert any(list(line.events) for plane in planes for line in plane.lines)


@pytest.mark.parametrize("kernel", ["compact", "expand"])
def test_candidates_do_the_same_work(kernel):
  """In the rows that are there, and in all where padding is zero, whoever makes the buffer."""
  rows, total_rows, start = 32, 64, 5
  rng = np.random.default_rng(0)
  random = lambda rows: jnp.asarray(rng.normal(size=(rows, 128)), jnp.float32)
  destination, source = random(total_rows + wall.MARGIN_ROWS), random(total_rows)
  if kernel == "expand":
    destination, source = jnp.zeros((0, 128)), random(total_rows + wall.MARGIN_ROWS)
  found = wall.candidates(kernel, rows, total_rows, 128, jnp.float32, ON_TPU)
  scalars = jnp.int32(start), jnp.arange(rows, dtype=jnp.int32)
  ours = jax.jit(found[wall.OURS])(destination, source, *scalars)
  same_rows = jax.jit(found[wall.SAME_ROWS])(destination, source, *scalars)
  np.testing.assert_array_equal(ours, same_rows)
  for name in "take_scatter", "dus_worst_case":
    other = jax.jit(found[name])(destination, source, *scalars)
    there = slice(start, start + rows) if kernel == "compact" else slice(rows)
    np.testing.assert_array_equal(ours[there], other[there])


def test_measures_each_candidate(monkeypatch):
  if jax.default_backend() != "cpu":  # A test's profile would be of another test's device time.
    monkeypatch.setattr(wall, "profile", lambda call, calls: [call() for _ in range(calls)])
  names = [row["implementation"] for row in wall.measure("compact", 32, 64, 128, "float32", 5, 2)]
  assert {wall.OURS, wall.SAME_ROWS, wall.COPY, "dus_worst_case"} <= set(names)
  for row in wall.measure("expand", 32, 64, 128, "float32", 0, 2):
    assert row["seconds"] > 0 and len(wall.describe(row)) == len(wall.HEADER)
    assert row["of_copy"] > 0 and row["of_same_rows"] > 0 and row["of_worst_case"] > 0
