"""Arguments of another kind than documented: a `ValueError` names each, and what it must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_stash as ps
from pallas_stash import sizing
from tests.helpers.checks import assert_trees_equal

SPEC = jax.ShapeDtypeStruct((4,), jnp.float32)
ROWS = np.ones((8, 4), np.float32)
RAGGED = ps.RaggedRows([3], 8)
SIZES = {"group_sizes": [3]}


def stash():
  return ps.Stash.empty(16, [SPEC])


def slot():
  return stash().push([ROWS], RAGGED)[1]


def traced(fun):
  return lambda: jax.jit(fun)(8)


def update(*args, **change):
  return lambda: ps.dynamic_update_slice(*args, **(SIZES | change))


def slice_rows(*args, **change):
  return lambda: ps.dynamic_slice(*args, **(SIZES | change))


def gmm(**change):
  args = {"stash": stash(), "lhs": ROWS, "rhs": np.ones((1, 4, 4), np.float32), **SIZES} | change
  return ps.gmm(**args)


START, SHAPE = (0, 0), (8, 4)
STRUCTS = r"residuals=.* must be a list of jax\.ShapeDtypeStruct\(row_shape, dtype\)"

CASES = {
  # RaggedRows.
  "sizes: int": (lambda: ps.RaggedRows(3, 8), r"group_sizes of shape \(\) must have rank 1"),
  "sizes: None": (lambda: ps.RaggedRows(None, 8), r"group_sizes=None must be int\[groups\]"),
  "sizes: uneven": (
    lambda: ps.RaggedRows([[1], [2, 3]], 8),
    r"group_sizes=\[\[1\], \[2, 3\]\] must",
  ),
  "sizes: str": (lambda: ps.RaggedRows("3", 8), "group_sizes='3' must"),
  "sizes: dict": (lambda: ps.RaggedRows({0: 3}, 8), "group_sizes=<dict> must"),
  "sizes: too large": (lambda: ps.RaggedRows([2**40], 8), r"group_sizes=\[1099511627776\] must"),
  "sizes: ragged": (lambda: ps.RaggedRows(RAGGED, 8), "group_sizes=<RaggedRows> must"),
  "starts: int": (lambda: ps.RaggedRows([3], 8, 3), r"group_starts of shape \(\) must have rank 1"),
  "starts: str": (lambda: ps.RaggedRows([3], 8, "0"), "group_starts='0' must"),
  "rows: array": (
    lambda: ps.RaggedRows([3], np.array([8])),
    r"total_rows=int64\[1\] must be a static",
  ),
  "rows: traced": (traced(lambda n: ps.RaggedRows([3], n).num_rows()), "total_rows=int32.* static"),
  "swapped": (
    lambda: ps.RaggedRows(8, jnp.array([3, 4])),
    r"total_rows=int32\[2\] must be a static",
  ),
  # The drop-in pair.
  "start: int": (update(ROWS, ROWS, 0), "start_indices=0 must have one entry for each axis"),
  "start: int, slice": (slice_rows(ROWS, 0, SHAPE), "start_indices=0 must have one entry"),
  "start: None": (slice_rows(ROWS, None, SHAPE), "start_indices=None must have one entry"),
  "start: scalar": (
    slice_rows(ROWS, jnp.int32(0), SHAPE),
    r"start_indices=int32\[\] must have one",
  ),
  "start: str": (slice_rows(ROWS, "00", SHAPE), "start_indices='00' must have one entry"),
  "start: text": (slice_rows(ROWS, ("x", 0), SHAPE), "start index='x' must be an integer scalar"),
  "start: column": (slice_rows(ROWS, (0, None), SHAPE), "start index=None must be an integer"),
  "start: bool": (slice_rows(ROWS, (True, 0), SHAPE), "start index True .* integer scalar"),
  "slice: int": (slice_rows(ROWS, START, 3), r"slice_sizes=3 must be \(total_rows, width\)"),
  "slice: None": (slice_rows(ROWS, START, None), r"slice_sizes=None must be \(total_rows, width\)"),
  "slice: float": (slice_rows(ROWS, START, (8.0, 4)), r"slice_sizes\[0\]=8.0 must be a static int"),
  "slice: traced": (
    traced(lambda n: slice_rows(ROWS, START, (n, 4))()),
    r"slice_sizes\[0\]=int32\[\]",
  ),
  "pair: sizes": (slice_rows(ROWS, START, SHAPE, group_sizes=3), "group_sizes of shape"),
  "pair: ragged": (update(ROWS, ROWS, START, group_sizes=RAGGED), "group_sizes=<RaggedRows> must"),
  "pair: starts": (update(ROWS, ROWS, START, group_starts=0), "group_starts of shape"),
  "operand": (update(None, ROWS, START), "operand=None must be an array"),
  "update": (update(ROWS, [[1], [2, 3]], START), r"update=\[\[1\], \[2, 3\]\] must be an array"),
  "slice: stash": (lambda: slice_rows(stash(), START, SHAPE)(), "operand=<Stash> must be an array"),
  # Stash.
  "residuals: struct": (lambda: ps.Stash.empty(8, SPEC), STRUCTS),
  "residuals: rows": (lambda: ps.Stash.empty(8, ROWS), STRUCTS),
  "residuals: None": (lambda: ps.Stash.empty(8, None), STRUCTS),
  "residuals: dict": (lambda: ps.Stash.empty(8, {"a": SPEC}), STRUCTS),
  "residuals: shapes": (lambda: ps.Stash.empty(8, [(4,)]), r"residuals\[0\]=\(4,\) must be a jax"),
  "empty: swapped": (
    lambda: ps.Stash.empty([SPEC], 8),
    r"capacity_rows=\[float32\[4\]\] must be a",
  ),
  "capacity: traced": (
    traced(lambda n: ps.Stash.empty(n, [SPEC]).top),
    "capacity_rows=int32.* static",
  ),
  "shards": (lambda: ps.Stash.empty(8, [SPEC], "2"), "num_shards='2' must be a static int"),
  "push: array": (lambda: stash().push(ROWS, RAGGED), r"values=float32\[8, 4\] must be a list of"),
  "push: None": (lambda: stash().push(None, RAGGED), "values=None must be a list of arrays"),
  "push: objects": (
    lambda: stash().push([object()], RAGGED),
    r"values\[0\]=<object> must be an array",
  ),
  "push: struct": (
    lambda: stash().push([SPEC], RAGGED),
    r"values\[0\]=float32\[4\] must be an array",
  ),
  "push: sizes": (
    lambda: stash().push([ROWS], jnp.array([3])),
    r"ragged=int32\[1\] must be RaggedRows",
  ),
  "push: swapped": (lambda: stash().push(RAGGED, [ROWS]), "ragged=.* must be RaggedRows"),
  "restore: int": (
    lambda: stash().restore(3, RAGGED),
    "slot=3 must be a Slot, as `push` returned it",
  ),
  "restore: tuple": (
    lambda: stash().restore((*slot(),), RAGGED),
    r"slot=\(int32\[1\], .* be a Slot",
  ),
  "restore: sizes": (lambda: stash().restore(slot(), [3]), r"ragged=\[3\] must be RaggedRows"),
  "pop: int": (lambda: stash().pop(3), "slot=3 must be a Slot, as `push` returned it"),
  "seal: swapped": (
    lambda: ps.seal(stash(), ROWS),
    r"stash=float32\[8, 4\] must be a Stash: seal\(y",
  ),
  "seal: None": (lambda: ps.seal(ROWS, None), "stash=None must be a Stash"),
  "seal: slot": (lambda: ps.seal(ROWS, slot()), "stash=<Slot> must be a Stash"),
  # The rest.
  "debug: str": (lambda: ps.debug("yes"), "enabled='yes' must be True or False"),
  "debug: int": (lambda: ps.debug(1), "enabled=1 must be True or False"),
  "debug: function": (lambda: ps.debug(jnp.sin), "enabled=<.*> must be True or False"),
  "gmm: stash": (lambda: gmm(stash=ROWS), r"The first argument, float32\[8, 4\], must be a Stash"),
  "gmm: lhs": (lambda: gmm(lhs=None), "lhs=None must be an array"),
  "gmm: sizes": (lambda: gmm(group_sizes=3), r"group_sizes of shape \(\) must have rank 1"),
  "gmm: offset": (lambda: gmm(group_offset=0.5), "group_offset 0.5 .* must be an integer scalar"),
  "gmm: matmul": (
    lambda: gmm(grouped_matmul="ragged_dot"),
    "grouped_matmul='ragged_dot' must be a f",
  ),
  "check: fun": (
    lambda: ps.check_padding(ROWS, RAGGED, ROWS),
    r"fun=float32\[8, 4\] must be a func",
  ),
  "check: policy": (
    lambda: ps.check_padding(jnp.sin, RAGGED, ROWS, policy="hidden"),
    "policy='hidden' must be a function",
  ),
  "check: text": (
    lambda: ps.check_padding(jnp.sin, RAGGED, "x"),
    r"argument\[0\]='x' must be an array",
  ),
  "sizing: bool": (
    lambda: sizing.expected_rows(True, 1, 1, 1),
    "batch=True must be a positive int",
  ),
  "sizing: array": (
    lambda: sizing.capacity_rows(1, 1, 1, 1, layers=1, margin=ROWS),
    r"margin=float32\[8, 4\] must be a finite number",
  ),
  "bytes: struct": (lambda: sizing.residual_bytes(8, SPEC), STRUCTS),
  "bytes: shapes": (
    lambda: sizing.residual_bytes(8, [(4,)]),
    r"residuals\[0\]=\(4,\) must be a jax",
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case):
  call, message = CASES[case]
  with pytest.raises(ValueError, match=f"^{message}"):
    call()


def test_what_is_taken():
  """Lists, tuples, NumPy's scalars and arrays, and Python's numbers."""
  expected = ps.dynamic_slice(ROWS, START, SHAPE, **SIZES)
  for groups in ((3,), np.array([3], np.uint8), [np.int64(3)], [jnp.int32(3)]):
    start, shape = np.array(START), np.array(SHAPE)
    assert_trees_equal(ps.dynamic_slice(ROWS.tolist(), start, shape, group_sizes=groups), expected)
  assert (
    ps.RaggedRows([], np.array(8)).total_rows == ps.RaggedRows((), jnp.int32(8)).total_rows == 8
  )
  assert len(stash().push((ROWS,), RAGGED)) == 2
  multiply = jax.lax.ragged_dot
  out, _ = gmm(group_sizes=[np.int32(3)], lhs=ROWS, grouped_matmul=multiply)
  assert out.shape == (8, 4)
  with ps.debug(np.bool_(True)):
    pass


def test_a_stash_prints_without_its_values():
  text = "Stash(float32[4]; buffers=(float32[16, 128],), top=int32[1])"
  full, printed = stash(), []
  assert repr(full) == text
  assert repr(jax.eval_shape(lambda: full)) == text
  jax.jit(lambda stash: printed.append(repr(stash)))(full)
  jax.vmap(lambda stash: printed.append(repr(stash)))(jax.tree.map(lambda x: x[None], full))
  assert printed == [text, text]
  assert "buffers=(<object>,)" in repr(jax.tree.map(lambda leaf: object(), full))
  assert "buffers=(None,)" in repr(jax.tree.map(lambda leaf: None, full))
  jax.tree.map(lambda leaf: leaf.delete(), full)
  assert repr(full) == text


def test_ragged_rows_print_what_is_small_and_here():
  assert repr(RAGGED) == "RaggedRows(group_sizes=[3], total_rows=8, group_starts=None)"
  starts = ps.RaggedRows(np.array([3, 4]), 8, jnp.array([4, 0]))
  assert "group_sizes=[3, 4], " in repr(starts) and "group_starts=[4, 0]" in repr(starts)
  many = ps.RaggedRows(np.zeros(100, int), 8, jnp.zeros(100, int))
  assert "group_sizes=int64[100], " in repr(many) and "group_starts=int32[100]" in repr(many)
  printed = []
  jax.jit(lambda ragged: printed.append(repr(ragged)))(starts)
  traced = "RaggedRows(group_sizes=int32[2], total_rows=8, group_starts=int32[2])"
  assert printed == [traced]
  starts.group_starts.delete()
  assert "group_starts=int32[2]" in repr(starts)
