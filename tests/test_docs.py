"""The documents run, link to what exists, fit on a screen, and say what the code says.

Each page is one program: its Python blocks run in order, in one namespace, and a page that goes on
from the README's example begins with what that defined. What a block prints stands behind it where
the fence there is marked as text. A block that begins with `NEEDS_TPU` is only parsed.
"""

import ast
import contextlib
import io
import pathlib
import re

import pytest

from tests.helpers import api_page
from tests.helpers.checks import assert_trees_equal, needs_devices, once

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_TPU = "# Needs a TPU."
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def run(page, names):
  """Runs the blocks of a page; returns what they define."""
  for block, expected in BLOCK.findall(page.read_text()):
    if block.startswith(NEEDS_TPU):
      ast.parse(block)
      continue
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(compile(block, page.name, "exec"), names)
    assert not expected or expected == printed.getvalue()
  return names


@pytest.fixture(scope="module")
def example():
  return run(README, {})


def test_the_example_saves_memory_and_has_the_gradients_of_saved_residuals(example):
  gradient, arguments = example["gradient"], (example["weights"], example["x"])
  memory_of = lambda *args: gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes
  capacity = example["capacity"]
  assert memory_of(*arguments, capacity) < 0.7 * memory_of(*arguments, None)
  assert_trees_equal(gradient(*arguments, capacity), gradient(*arguments, None))


def test_three_lines_of_the_example_are_for_the_stash():
  block, _ = BLOCK.search(README.read_text()).groups()
  lines = [line for line in block.splitlines() if "ps." in line]
  assert [f"# {number}." in line for number, line in enumerate(lines, 1)] == [True] * 3


@pytest.mark.parametrize(
  "name",
  [
    "capacity.md",
    "choosing-residuals.md",
    once("debugging.md"),
    once("host.md"),
    once("kernels.md"),
    once("pipelines.md"),
    "quickstart.md",
    pytest.param("shard_map.md", marks=(needs_devices(4), pytest.mark.once)),
  ],
)
def test_a_page_runs(example, name):
  page = ROOT / "docs" / name
  run(page, dict(example) if "README's example" in page.read_text() else {})


def test_every_page_with_blocks_runs():
  """The pages above are all that have any."""
  with_blocks = {page.name for page in PAGES if BLOCK.search(page.read_text())}
  (names,) = (mark.args[1] for mark in test_a_page_runs.pytestmark)
  named = {getattr(name, "values", (name,))[0] for name in names}
  assert with_blocks == named | {README.name}
  fences = sum(page.read_text().count("```python") for page in PAGES)
  assert fences == sum(len(BLOCK.findall(page.read_text())) for page in PAGES)


@each_page
def test_lines_fit_in_100_columns(page):
  assert not [line for line in page.read_text().splitlines() if len(line) > 100]


def anchors(page):
  """The anchors of the headings of a page, as GitHub names them."""
  headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
  for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", page.read_text()):
    target, _, anchor = link.partition("#")
    found = (page.parent / target).resolve() if target else page
    assert found.is_file(), link
    assert not anchor or anchor in anchors(found), link


@each_page
def test_the_files_and_targets_that_are_named_exist(page):
  text = page.read_text()
  named = re.findall(r"`((?:bench|docs|pallas_stash|reference|tests)/[\w/.-]+)`", text)
  assert not [name for name in named if not (ROOT / name).exists()]
  targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
  assert not set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - set(targets)


def test_the_api_is_that_of_the_docstrings():
  assert api_page.PATH.read_text() == api_page.make(), "run python -m tests.helpers.api_page"


def test_the_figures_of_the_readme_are_those_of_the_page():
  """The table is short of docs/deepseek-v3.md's, whose figures `make fit` prints."""
  page = (ROOT / "docs" / "deepseek-v3.md").read_text()
  table = README.read_text().partition("\n## Numbers\n")[2].partition("\n## ")[0]
  figures = re.findall(r"\d+\.\d+", "".join(re.findall(r"^\|.*", table, re.MULTILINE)))
  assert len(figures) > 8 and not set(figures) - set(re.findall(r"\d+\.\d+", page))
