"""What a function can push, how much and where: found in its jaxpr, which is not evaluated."""

from typing import Any, NamedTuple

import jax

from pallas_stash.jaxprs import Call, call_of, line_of, names_in, opened
from pallas_stash.kernels.tiling import round_up, row_alignment
from pallas_stash.policies import read_mark, save_in_stash
from pallas_stash.sites import find_site, has_stashed, policy_in, Site
from pallas_stash.storage import as_kind
from pallas_stash.varying import varying_axes


class Mesh(NamedTuple):
  """A `shard_map` around a site: its mesh, and the axes that it makes manual."""

  mesh: Any
  axes: tuple[str, ...]


class Kind(NamedTuple):
  """What a stash is for.

  Attributes:
    residuals: shape and dtype of a row of each.
    meshes: the `shard_map`s in which they are pushed.
    is_on_host: whether their names are those for host memory.
  """

  residuals: tuple[tuple[tuple[int, ...], Any], ...]
  meshes: tuple[Mesh, ...]
  is_on_host: bool

  def specs(self) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.residuals]

  def axes(self) -> tuple[str, ...]:
    """Returns the mesh axes that a stash of this kind is sharded over."""
    return tuple(axis for mesh in self.meshes for axis in mesh.axes)


class Pushes:
  """What a function, and all that it calls, can push.

  Attributes:
    worst_cases: the most rows of each kind that are pushed on a shard, alignment included, in the
      order of the first push.
    varying: for each kind, the axes around the function over which what is pushed varies.
  """

  def __init__(self, jaxpr: Any):
    """Finds them.

    Raises:
      ValueError: as `threaded` says.
    """
    self.varying = {}
    self._sites = {}  # By the identity of a jaxpr, which is kept beside.
    self._kinds = {}  # By the site that pushes them and the meshes around it.
    self._policies, self._seen, self._stashed = [], set(), set()
    self.worst_cases = self._count_rows(jaxpr, None, ())
    self._check_names()

  def site_of(self, jaxpr: Any, policy: save_in_stash | None) -> Site | None:
    """Returns the site that a function under a policy is, the same one each time, or None."""
    key = id(jaxpr), policy
    if key not in self._sites:
      self._sites[key] = jaxpr, find_site(jaxpr, policy)
    return self._sites[key][1]

  def kinds_of(self, site: Site, meshes: tuple[Mesh, ...]) -> list[Kind]:
    """Returns the kinds that a site pushes inside of `shard_map`s, those on the host last."""
    return self._kinds[id(site), meshes]

  def _count_rows(self, jaxpr, policy, meshes):
    """Returns the most rows of each kind that a function can push on a shard."""
    if site := self.site_of(jaxpr, policy):
      return self._count_site(site, meshes)
    found = {}
    for equation in jaxpr.eqns:
      call = call_of(equation)
      inner = policy_in(call, policy)
      if call and call.kind == "checkpoint":
        self._note(call, policy, inner, equation)
      if call is None:
        if has_stashed(equation, policy):
          raise ValueError(
            f"A stash cannot be threaded through {equation.primitive} ({line_of(equation)}), in"
            " which values for it are named. It can through scan, cond, jit, shard_map and"
            " jax.checkpoint."
          )
        continue
      if call.kind == "shard_map":
        counts = [self._count_in_shard_map(call, equation, policy, meshes)]
      else:
        counts = [self._count_rows(opened(body)[0], inner, meshes) for body in call.jaxprs]
      times = call.params["length"] if call.kind == "scan" else 1
      for kind in dict.fromkeys(kind for count in counts for kind in count):
        # Of the branches of a cond one is taken.
        rows = times * max(count.get(kind, 0) for count in counts)
        found[kind] = found.get(kind, 0) + rows
    return found

  def _count_in_shard_map(self, call, equation, policy, meshes):
    jaxpr, _ = opened(call.jaxprs[0])
    mesh, found = mesh_of(call), {}

    def count():
      found.update(self._count_rows(jaxpr, policy, (*meshes, mesh)))
      return ()

    if not has_stashed(equation, policy):
      count()
      return found
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
      kind = Kind(as_kind(specs), meshes, site.is_on_host(mark))
      alignment = max(row_alignment(spec.dtype.itemsize) for spec in specs)
      found[kind] = found.get(kind, 0) + round_up(residuals.total_rows[mark], alignment)
      self.varying[kind] = self.varying.get(kind, frozenset()) | axes
    self._kinds[id(site), meshes] = sorted(found, key=lambda kind: kind.is_on_host)
    self._stashed |= site.names
    return found

  def _note(self, call, outer, policy, equation):
    names = names_in(opened(call.jaxprs[0])[0])
    hidden = names & (outer.names if outer else set()) - (policy.names if policy else set())
    if hidden:
      raise ValueError(
        f"{', '.join(map(repr, sorted(hidden)))}, for the stash, is named under a jax.checkpoint of"
        f" another policy ({line_of(equation)}), which decides about it: give that one"
        " save_in_stash, too."
      )
    if policy is None:
      return
    self._policies.append(policy)
    self._seen |= names
    if call.params.get("differentiated") and has_stashed(equation, None):
      raise ValueError(
        f"The function that `threaded` is given differentiates ({line_of(equation)}), and must be"
        " what is differentiated: jax.grad(threaded(loss, capacity_rows))."
      )

  def _check_names(self):
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
    if wanted and not self.worst_cases:
      raise ValueError(
        f"The backward pass needs no value named {' or '.join(map(repr, sorted(wanted)))}, or is"
        " given it as an argument: there is nothing to stash."
      )


def mesh_of(call: Call) -> Mesh:
  """Returns what a `shard_map` is over."""
  mesh, axes = call.params["mesh"], call.params["newly_manual_axes"]
  return Mesh(mesh, tuple(axis for axis in mesh.axis_names if axis in axes))
