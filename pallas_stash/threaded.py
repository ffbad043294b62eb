"""`threaded`: a function whose layers keep named residuals in a stash that it need not mention."""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_stash.arguments import describe, static_int
from pallas_stash.checkpoint import check_arguments
from pallas_stash.handover import check_flags, seal
from pallas_stash.jaxprs import (
  call_of,
  evaluate,
  is_variable,
  line_of,
  names_in,
  opened,
  scan_counts,
)
from pallas_stash.kernels.tiling import round_up, row_alignment
from pallas_stash.policies import read_mark
from pallas_stash.sites import find_site, has_stashed, policy_in
from pallas_stash.stash import Stash
from pallas_stash.varying import vary_over, varying_axes


def threaded(
  fun: Callable[..., Any],
  capacity_rows: int | Callable[[int], int],
  *,
  has_stats: bool = False,
) -> Callable[..., Any]:
  """Makes `fun` with a stash for what the policies `save_in_stash` in it name.

      model = threaded(model, lambda worst_case_rows: worst_case_rows * 5 // 16)

  The stash is threaded through every scan, `jax.checkpoint`, `shard_map`, `cond` and `jit` of
  `fun`, and sealed behind it. A function in it that names values for the stash and calls
  `mark_rows` becomes what `checkpoint` makes of one: results and gradients are those of saving the
  values, whatever the capacity. Residuals of different row shapes have a stash each.

  Call it inside of what is differentiated: `jax.grad` of a loss that calls it. Where `fun` itself
  is a `shard_map` of all its layers, call it inside, for each device.

  Args:
    fun: any function of pytrees of arrays, to such pytrees.
    capacity_rows: of each shard of a stash, as of `Stash.empty`; or a function that gives it for
      the most rows that can be pushed, over all layers, alignment included: of that many, none
      overflows.
    has_stats: whether to return statistics as well.

  Returns:
    A function like `fun`. With `has_stats` it returns a pair: the result, and a tuple of
    `StashStats`, one for each stash in the order of their first push.

  Raises:
    ValueError: when it is called: if nothing is stashed, because no policy is a `save_in_stash`, or
      a name that one has is nowhere under it; and where it cannot be, with the line that says so:
      values that no mark is for, values named inside of what a stash cannot be threaded through
      (`while_loop`, functions with derivatives of their own), and `fun` that differentiates.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function.")
  if not callable(capacity_rows) and static_int("capacity_rows", capacity_rows) < 0:
    raise ValueError(f"{capacity_rows=} must be at least 0, or a function of the worst case.")

  @functools.wraps(fun)
  def call(*args, **kwargs):
    check_arguments(args, kwargs)
    check_flags()
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    jaxpr, consts = opened(closed)
    threading = _Threading()
    worst_cases = threading.count_rows(jaxpr, None, ())
    threading.check_names()
    threading.kinds = list(worst_cases)
    stashes = {
      number: threading.empty(kind, _capacity(capacity_rows, worst_cases[kind]))
      for number, kind in enumerate(threading.kinds)
    }
    leaves = jax.tree.leaves((args, kwargs))
    outs, stashes = threading.run(jaxpr, consts, leaves, stashes, None, ())
    out = jax.tree.unflatten(jax.tree.structure(shape), outs)
    stats = tuple(stash.stats() for stash in stashes.values())
    for stash in stashes.values():
      out = seal(out, stash)
    return (out, stats) if has_stats else out

  return call


def _capacity(capacity_rows, worst_case):
  if not callable(capacity_rows):
    return capacity_rows
  rows = static_int("capacity_rows(worst_case_rows)", capacity_rows(worst_case))
  if rows < 0:
    raise ValueError(f"capacity_rows({worst_case})={rows} must be at least 0.")
  return rows


class _Mesh(NamedTuple):
  """A `shard_map` around a site: its mesh, and the axes that it makes manual."""

  mesh: Any
  axes: tuple[str, ...]


class _Kind(NamedTuple):
  """What a stash is for: rows of residuals, and the `shard_map`s in which they are pushed."""

  residuals: tuple[tuple[tuple[int, ...], Any], ...]
  meshes: tuple[_Mesh, ...]

  def specs(self):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.residuals]


class _Threading:
  """One function that stashes are threaded through.

  Attributes:
    kinds: of the stashes, each of which goes by its number among them.
  """

  def __init__(self):
    self.kinds = []
    self._sites, self._jits = {}, {}  # By the identity of a jaxpr, which is kept beside.
    self._pushed = {}  # Kinds, by the site that pushes them and the meshes around it.
    self._varying = {}  # Axes outside, over which what is pushed varies, for each kind.
    self._policies, self._stashed = [], set()
    self._seen = set()

  def site_of(self, jaxpr, policy):
    key = id(jaxpr), policy
    if key not in self._sites:
      self._sites[key] = jaxpr, find_site(jaxpr, policy)
    return self._sites[key][1]

  # First, how much is pushed, without evaluating anything.

  def count_rows(self, jaxpr, policy, meshes) -> dict[_Kind, int]:
    """Returns the most rows of each kind that a function can push on a shard."""
    if site := self.site_of(jaxpr, policy):
      return self._count_site(site, meshes)
    found = {}
    for equation in jaxpr.eqns:
      call = call_of(equation)
      inner = policy_in(call, policy)
      if call and call.kind == "checkpoint":
        self._note(call, inner, equation)
      if call is None:
        if has_stashed(equation, policy):
          raise ValueError(
            f"A stash cannot be threaded through {equation.primitive} ({line_of(equation)}), in"
            " which values for it are named. It can through scan, cond, jit, shard_map and"
            " jax.checkpoint."
          )
        continue
      counts = [self._count_call(call, inner, body, meshes) for body in call.jaxprs]
      times = call.params["length"] if call.kind == "scan" else 1
      for kind in dict.fromkeys(kind for count in counts for kind in count):
        # Of the branches of a cond one is taken.
        rows = times * max(count.get(kind, 0) for count in counts)
        found[kind] = found.get(kind, 0) + rows
    return found

  def _count_call(self, call, policy, body, meshes):
    jaxpr, _ = opened(body)
    if call.kind != "shard_map":
      return self.count_rows(jaxpr, policy, meshes)
    mesh, found = _mesh_of(call), {}

    def count():
      found.update(self.count_rows(jaxpr, policy, (*meshes, mesh)))
      return ()

    # For the axes that collectives name. There is nothing to evaluate.
    options = {"check_vma": call.params["check_vma"], "axis_names": set(mesh.axes)}
    jax.eval_shape(jax.shard_map(count, mesh=mesh.mesh, in_specs=(), out_specs=(), **options))
    return found

  def _count_site(self, site, meshes):
    avals = [variable.aval for variable in site.invars]
    residuals = site.call.find_residuals((), *avals)
    found, axes = {}, varying_axes(avals).difference(*(mesh.axes for mesh in meshes))
    for mark, indices in residuals.pushes.items():
      specs = residuals.row_specs(indices)
      rows = sorted(((spec.shape, spec.dtype) for spec in specs), key=str)
      kind = _Kind(tuple(rows), meshes)
      alignment = max(row_alignment(spec.dtype.itemsize) for spec in specs)
      found[kind] = found.get(kind, 0) + round_up(residuals.total_rows[mark], alignment)
      self._varying[kind] = self._varying.get(kind, frozenset()) | axes
    self._pushed[id(site), meshes] = list(found)
    self._stashed |= site.names
    return found

  def _note(self, call, policy, equation):
    if policy is None:
      return
    self._policies.append(policy)
    self._seen |= names_in(opened(call.jaxprs[0])[0])
    if call.params.get("differentiated") and has_stashed(equation, None):
      raise ValueError(
        f"The function that `threaded` is given differentiates ({line_of(equation)}), and must be"
        " what is differentiated: jax.grad(threaded(loss, capacity_rows))."
      )

  def check_names(self):
    """Raises a ValueError unless each name that a policy has is of something for the stash."""
    if not self._policies:
      raise ValueError(
        "`threaded` found no jax.checkpoint whose policy is save_in_stash(*names): without, there"
        " is nothing to put in a stash."
      )
    wanted = set().union(*(policy.names for policy in self._policies))
    if missing := sorted(wanted - self._stashed):
      seen = sorted(name for name in self._seen if not read_mark(name))
      raise ValueError(
        f"No value is named {' or '.join(map(repr, missing))} directly under a jax.checkpoint whose"
        f" policy, save_in_stash, has that name. Named there is: {', '.join(map(repr, seen))}."
      )
    if wanted and not self._pushed_kinds():
      raise ValueError(
        f"The backward pass needs no value named {' or '.join(map(repr, sorted(wanted)))}, or is"
        " given it as an argument: there is nothing to stash."
      )

  def _pushed_kinds(self):
    return {kind for kinds in self._pushed.values() for kind in kinds}

  # Then, with the stash.

  def empty(self, kind: _Kind, capacity_rows: int) -> Stash:
    """Returns the stash of a kind, of all its shards."""
    num_shards = math.prod(mesh.mesh.shape[axis] for mesh in kind.meshes for axis in mesh.axes)
    stash = Stash.empty(capacity_rows, kind.specs(), num_shards)
    axes = tuple(axis for mesh in kind.meshes for axis in mesh.axes)
    mesh = jax.sharding.get_abstract_mesh()
    if axes and AxisType.Explicit in mesh.axis_types:
      stash = jax.reshard(stash, NamedSharding(mesh, PartitionSpec(axes)))
    return vary_over(stash, self._varying[kind])

  def run(self, jaxpr, consts, args, stashes, policy, meshes):
    """Evaluates a function with the stashes of what is inside `meshes`; returns both."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def rule_of(equation):
      if not has_stashed(equation, policy):
        return None
      call = call_of(equation)
      return functools.partial(apply, call, getattr(self, f"_run_{call.kind}"), equation)

    def apply(call, run, equation, *operands):
      nonlocal stashes
      inner = policy_in(call, policy)
      outs, stashes = run(call, equation, operands, stashes, inner, meshes)
      return outs

    if site := self.site_of(jaxpr, policy):
      evaluate(jaxpr, site.before, values, lambda equation: None)
      outs, stashes = self._push(site, [values[x] for x in site.invars], stashes, meshes)
      values.update(zip(site.outvars, outs, strict=True))
      evaluate(jaxpr, site.after, values, lambda equation: None)
    else:
      evaluate(jaxpr, jaxpr.eqns, values, rule_of)
    return [values[x] if is_variable(x) else x.val for x in jaxpr.outvars], stashes

  def _push(self, site, operands, stashes, meshes):
    numbers = [self.kinds.index(kind) for kind in self._pushed[id(site), meshes]]
    if not numbers:
      return site.run(*operands)[0], stashes
    used = vary_over([stashes[number] for number in numbers], varying_axes(operands))
    outs, used = site.call(used, (), *operands)
    return outs, stashes | dict(zip(numbers, used, strict=True))

  def _run_checkpoint(self, call, equation, operands, stashes, policy, meshes):
    del equation
    run = functools.partial(self._run_body, call.jaxprs[0], policy, meshes)
    prevent_cse = call.params["prevent_cse"]
    if not isinstance(prevent_cse, bool):
      prevent_cse = True, *prevent_cse
    options = {"policy": call.params["policy"], "prevent_cse": prevent_cse}
    return jax.checkpoint(run, **options)(stashes, *operands)

  def _run_scan(self, call, equation, operands, stashes, policy, meshes):
    num_consts, num_carry = scan_counts(equation)
    split = lambda values, count: (list(values[:count]), list(values[count:]))
    consts, others = split(operands, num_consts)
    carry, xs = split(others, num_carry)

    def body(carry, xs):
      stashes, carry = carry
      outs, stashes = self._run_body(call.jaxprs[0], policy, meshes, stashes, *consts, *carry, *xs)
      carry, ys = split(outs, num_carry)
      return (stashes, carry), ys

    options = {name: call.params[name] for name in ("length", "reverse", "unroll")}
    (stashes, carry), ys = lax.scan(body, (stashes, carry), xs, **options)
    return [*carry, *ys], stashes

  def _run_cond(self, call, equation, operands, stashes, policy, meshes):
    del equation
    index, *operands = operands
    branches = [functools.partial(self._run_body, branch, policy, meshes) for branch in call.jaxprs]
    return lax.switch(index, branches, stashes, *operands)

  def _run_jit(self, call, equation, operands, stashes, policy, meshes):
    del equation
    body = call.jaxprs[0]
    key = id(body), policy, meshes

    def run(stashes, *operands):
      operands = _constrain(operands, call.params["in_shardings"])
      outs, stashes = self._run_body(body, policy, meshes, stashes, *operands)
      return _constrain(outs, call.params["out_shardings"]), stashes

    if key not in self._jits:  # Traced once for all its calls, as it was.
      run.__name__ = call.params["name"]
      self._jits[key] = body, jax.jit(run)
    return self._jits[key][1](stashes, *operands)

  def _run_shard_map(self, call, equation, operands, stashes, policy, meshes):
    del equation
    mesh, params = _mesh_of(call), call.params
    meshes = *meshes, mesh
    inside = {n: s for n, s in stashes.items() if self.kinds[n].meshes[: len(meshes)] == meshes}
    spec = PartitionSpec(mesh.axes)
    run = functools.partial(self._run_body, call.jaxprs[0], policy, meshes)
    outs, inside = jax.shard_map(
      run,
      mesh=mesh.mesh,
      in_specs=(spec, *params["in_specs"]),
      out_specs=(list(params["out_specs"]), spec),
      check_vma=params["check_vma"],
      axis_names=set(mesh.axes),
    )(inside, *operands)
    return outs, stashes | inside

  def _run_body(self, body, policy, meshes, stashes, *operands):
    return self.run(*opened(body), operands, stashes, policy, meshes)


def _mesh_of(call):
  mesh, axes = call.params["mesh"], call.params["newly_manual_axes"]
  return _Mesh(mesh, tuple(axis for axis in mesh.axis_names if axis in axes))


def _constrain(values, shardings):
  is_given = lambda sharding: isinstance(sharding, jax.sharding.Sharding)
  return [
    lax.with_sharding_constraint(value, sharding) if is_given(sharding) else value
    for value, sharding in zip(values, shardings, strict=True)
  ]
