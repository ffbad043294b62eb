"""`threaded`: a function whose layers keep named residuals in a stash that it need not mention."""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_stash.arguments import check_arguments, describe, static_int
from pallas_stash.handover import check_flags, seal
from pallas_stash.jaxprs import call_of, evaluate, is_variable, opened, scan_counts
from pallas_stash.pushes import mesh_of, Pushes
from pallas_stash.sites import has_stashed, policy_in
from pallas_stash.stash import Stash
from pallas_stash.varying import vary_over, varying_axes


def threaded(
  fun: Callable[..., Any],
  capacity_rows: int | Callable[[int], int],
  *,
  host_capacity_rows: int | Callable[[int], int] = 0,
  staging_rows: int | Callable[[int], int] = 0,
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
    host_capacity_rows: in host memory, likewise. If policies name values for it (`on_host`), their
      stashes have it, and nothing in HBM but the stage; if none does, every stash has it beside
      `capacity_rows`.
    staging_rows: of a stash that has host memory, as of `Stash.empty`, likewise.
    has_stats: whether to return statistics as well.

  Returns:
    A function like `fun`. With `has_stats` it returns a pair: the result, and a tuple of
    `StashStats`, or `TierStats` with host memory, one for each stash in the order of their first
    push.

  Raises:
    ValueError: when it is called: if nothing is stashed, because no policy is a `save_in_stash`, or
      a name that one has is nowhere under it; if it names values for host memory, and
      `host_capacity_rows` is 0; and where it cannot be, with the line that says so: values that no
      mark is for, values named inside of what a stash cannot be threaded through (`while_loop`,
      functions with derivatives of their own), and `fun` that differentiates.
  """
  if not callable(fun):
    raise ValueError(f"fun={describe(fun)} must be a function.")
  given = {
    "capacity_rows": capacity_rows,
    "host_capacity_rows": host_capacity_rows,
    "staging_rows": staging_rows,
  }
  for name, rows in given.items():
    if not callable(rows) and static_int(name, rows) < 0:
      raise ValueError(f"{name}={rows} must be at least 0, or a function of the worst case.")

  @functools.wraps(fun)
  def call(*args, **kwargs):
    check_arguments(args, kwargs)
    check_flags()
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    jaxpr, consts = opened(closed)
    pushes = Pushes(jaxpr)
    sizes = _sizes_of(pushes, given)
    stashes = {
      number: _empty(kind, sizes[kind], pushes.varying[kind])
      for number, kind in enumerate(pushes.worst_cases)
    }
    leaves = jax.tree.leaves((args, kwargs))
    outs, stashes = _Threading(pushes).run(jaxpr, consts, leaves, stashes, None, ())
    out = jax.tree.unflatten(jax.tree.structure(shape), outs)
    stats = tuple(stash.stats() for stash in stashes.values())
    for stash in stashes.values():
      out = seal(out, stash)
    return (out, stats) if has_stats else out

  return call


def _sizes_of(pushes, given):
  """Returns for each kind, by their names, the sizes of its stash that are given for all."""
  is_any_on_host = any(kind.is_on_host for kind in pushes.worst_cases)
  sizes = {}
  for kind, worst_case in pushes.worst_cases.items():
    rows = {name: _evaluated(name, value, worst_case) for name, value in given.items()}
    if kind.is_on_host:
      if not rows["host_capacity_rows"]:
        raise ValueError(
          "host_capacity_rows=0 must be above 0: a policy names values for host memory, rows of"
          f" {', '.join(map(describe, kind.specs()))}."
        )
      rows["capacity_rows"] = 0
    elif is_any_on_host:
      rows["host_capacity_rows"] = rows["staging_rows"] = 0
    sizes[kind] = rows
  return sizes


def _evaluated(name, value, worst_case):
  if not callable(value):
    return value
  rows = static_int(f"{name}(worst_case_rows)", value(worst_case))
  if rows < 0:
    raise ValueError(f"{name}({worst_case})={rows} must be at least 0.")
  return rows


def _empty(kind, sizes, axes):
  """Returns the stash of a kind, of all its shards, that varies over `axes`."""
  num_shards = math.prod(mesh.mesh.shape[axis] for mesh in kind.meshes for axis in mesh.axes)
  stash = Stash.empty(residuals=kind.specs(), num_shards=num_shards, **sizes)
  sharded, mesh = kind.axes(), jax.sharding.get_abstract_mesh()
  if sharded and AxisType.Explicit in mesh.axis_types:
    stash = jax.reshard(stash, NamedSharding(mesh, PartitionSpec(sharded)))
  return vary_over(stash, axes)


class _Threading:
  """One function that stashes are threaded through.

  Each stash goes by the number of its kind.
  """

  def __init__(self, pushes: Pushes):
    self._pushes, self._kinds = pushes, list(pushes.worst_cases)
    self._jits = {}  # By the identity of a jaxpr, which is kept beside.

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

    if site := self._pushes.site_of(jaxpr, policy):
      evaluate(jaxpr, site.before, values, lambda equation: None)
      outs, stashes = self._push(site, [values[x] for x in site.invars], stashes, meshes)
      values.update(zip(site.outvars, outs, strict=True))
      evaluate(jaxpr, site.after, values, lambda equation: None)
    else:
      evaluate(jaxpr, jaxpr.eqns, values, rule_of)
    return [values[x] if is_variable(x) else x.val for x in jaxpr.outvars], stashes

  def _push(self, site, operands, stashes, meshes):
    numbers = [self._kinds.index(kind) for kind in self._pushes.kinds_of(site, meshes)]
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
    mesh, params = mesh_of(call), call.params
    meshes = *meshes, mesh
    inside = {n: s for n, s in stashes.items() if self._kinds[n].meshes[: len(meshes)] == meshes}
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


def _constrain(values, shardings):
  is_given = lambda sharding: isinstance(sharding, jax.sharding.Sharding)
  return [
    lax.with_sharding_constraint(value, sharding) if is_given(sharding) else value
    for value, sharding in zip(values, shardings, strict=True)
  ]
