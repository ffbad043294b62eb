"""Makes docs/api.md of the docstrings: `python -m tests.helpers.api_page`."""

import ast
import inspect
import pathlib
import textwrap

import pallas_stash as ps

PATH = pathlib.Path(__file__).parent.parent.parent / "docs" / "api.md"
COLUMNS = 100
HEAD = """\
# API

What `import pallas_stash as ps` gives, `ps.permute`, `ps.pipeline` and `ps.sizing` too, by their
docstrings. This page is made by `python -m tests.helpers.api_page`; a test fails when it is not
what that makes.
"""


def make():
  """Returns the page."""
  sections = [HEAD]
  for name in sorted(ps.__all__, key=str.lower):
    value = getattr(ps, name)
    if inspect.ismodule(value):
      sections += [f"## {name}\n", _fence(inspect.getdoc(value))]
      sections += [_section(f"{name}.{inner}", getattr(value, inner)) for inner in value.__all__]
    elif callable(value):
      sections.append(_section(name, value))
    else:
      sections += [f"## {name}\n", _fence(f"{name} = {value!r}")]
  return "\n".join(sections)


def _section(name, value):
  parts = [f"## {name}\n", _described(name, value)]
  if inspect.isclass(value):
    for key, member in vars(value).items():
      member = getattr(member, "__func__", member)
      if not key.startswith("_") and inspect.isfunction(member) and member.__doc__:
        parts.append(_described(f"{name}.{key}", member))
  return "\n".join(parts)


def _described(name, value):
  docstring = inspect.getdoc(value)
  return _fence(f"{_signature(name, value)}\n\n{textwrap.indent(docstring, '  ')}")


def _signature(name, value):
  """Returns how it is called, as the source has it: annotations print alike on every Python."""
  if inspect.isclass(value):
    if "Args:\n" not in value.__doc__:  # Not for users to make.
      return name
    value = value.__init__
  (function,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
  arguments = function.args
  for of_kind in arguments.posonlyargs, arguments.args:
    if of_kind and of_kind[0].arg in ("self", "cls"):
      del of_kind[0]
      break
  result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
  result = result.replace("'", "")  # Of names that are defined further down.
  line = f"{name}({ast.unparse(arguments)}){result}"
  if len(line) <= COLUMNS:
    return line
  return f"{name}(\n{textwrap.indent(_one_a_line(arguments), '  ')}\n){result}"


def _one_a_line(arguments):
  """Returns the arguments, one on each line."""
  marks, depth, lines = ast.unparse(arguments), 0, [""]
  for i, mark in enumerate(marks):
    depth += (mark in "([{") - (mark in ")]}")
    if mark == " " and not depth and marks[i - 1] == ",":
      lines.append("")
    else:
      lines[-1] += mark
  return "\n".join(lines)


def _fence(text):
  return f"```\n{text}\n```\n"


if __name__ == "__main__":
  PATH.write_text(make())
