"""Nothing private of jax is used: what is private changes without notice."""

import ast
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent.parent
FOLDERS = "pallas_stash", "reference", "bench", "tests"
SOURCES = sorted(path for folder in FOLDERS for path in (FOLDER / folder).rglob("*.py"))


def is_private(name):
  return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_names(source):
  """Returns the private names of jax and its packages that a source imports or reads."""
  tree = ast.parse(source)
  found, of_jax = [], set()  # Local names that stand for something of jax.
  is_jax = lambda module: module.split(".")[0] in ("jax", "jaxlib")
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        if is_jax(alias.name):
          of_jax.add(alias.asname or alias.name.split(".")[0])
          found += [alias.name] if any(map(is_private, alias.name.split("."))) else []
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and is_jax(node.module):
      for alias in node.names:
        of_jax.add(alias.asname or alias.name)
        name = f"{node.module}.{alias.name}"
        found += [name] if any(map(is_private, name.split("."))) else []
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and is_private(node.attr):
      root = node.value
      while isinstance(root, ast.Attribute):
        root = root.value
      if isinstance(root, ast.Name) and root.id in of_jax:
        found.append(ast.unparse(node))
    is_getattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
    if is_getattr and isinstance(node.args[0], ast.Name) and node.args[0].id in of_jax:
      name = node.args[1]
      if isinstance(name, ast.Constant) and is_private(name.value):
        found.append(ast.unparse(node))
  return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_only_public_names_are_used(path):
  assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
  "source, found",
  [
    ("import jax._src.core", ["jax._src.core"]),
    ("from jax._src import core", ["jax._src.core"]),
    ("from jax import _src", ["jax._src"]),
    ("import jaxlib._jax", ["jaxlib._jax"]),
    ("import jax\njax._src.core.thing", ["jax._src"]),
    ("from jax import lax\nlax._convert(1)", ["lax._convert"]),
    ("import jax.numpy as jnp\njnp.linalg._x.y", ["jnp.linalg._x"]),
    ("import jax\ngetattr(jax, '_src')", ["getattr(jax, '_src')"]),
    ("import jax\njax.__version__", []),
    ("import numpy as np\nself._x = np._y", []),
  ],
)
def test_what_is_private_is_found(source, found):
  assert private_names(source) == found
