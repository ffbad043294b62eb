"""`make demo`: the memory that it plots over time is the compiler's."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.demo import memory
from tests.helpers.support import ON_TPU

pytestmark = [pytest.mark.once, pytest.mark.skipif(ON_TPU, reason="a TPU's compiler does not tell")]

LAYERS, ROWS, WIDTH = 8, 256, 64


def test_live_bytes_are_those_of_a_gradient():
  """What all layers save is live in the loops of both passes, and not behind them."""

  def loss(weights, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.sum(x)

  shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
  args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
  compiled, live = memory.compile_and_follow(jax.jit(jax.grad(loss)).lower(*args))
  temp_bytes = compiled.memory_analysis().temp_size_in_bytes
  saved = 4 * LAYERS * ROWS * WIDTH
  assert saved < max(live.forward.max(), live.backward.max()) <= temp_bytes
  assert max(live.forward.max(), live.backward.max()) > 0.95 * temp_bytes
  assert live.forward[0] < saved < live.forward[-1]
  assert live.backward[0] > saved > live.backward[-1]


def test_values_in_the_same_bytes_count_once():
  live_ranges = """HloLiveRange (max 4):
  InstructionSequence:
    0:x
    1:add
    2:while.1
    3:copy
  BufferLiveRange:
    x{}:0-4
    add{}:1-2
    while.1{0}:2-2
    while.1{1}:2-3
    copy{}:3-4
"""
  assignment = """BufferAssignment:
allocation 0: size 99, page 0, parameter 0, shape |f32[4]| at ShapeIndex {}:
 value: <1 x @0> (size=99,offset=0): f32[4]{0}
allocation 1: size 60, page 0, preallocated-temp:
 value: <2 add @0> (size=20,offset=0): f32[5]{0}
 value: <3 while.1{0} (phi) @0> (size=30,offset=10): f32[5]{0}
 value: <4 while.1{1} (phi) @0> (size=10,offset=50): f32[5]{0}
 value: <5 copy @0> (size=5,offset=0): f32[5]{0}
"""
  program = '  %while.1 = (f32[5]{0}) while(%add), metadata={op_name="jit(f)/jvp()/while"}\n'
  live = memory.live_bytes(live_ranges, assignment, program)
  np.testing.assert_array_equal(live.forward, [0, 20, 50])
  np.testing.assert_array_equal(live.backward, [15])
