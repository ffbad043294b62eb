"""What `.ci/run` runs on which Python: all of it, and what is not alike on both."""

import pytest

from tests.helpers.share import PERCENT_ON_DEFAULT, share_of, SHARES

pytestmark = pytest.mark.once
pytest_plugins = ["pytester"]

SOURCE = """
import pytest

def test_of_no_values():
  pass

@pytest.mark.once
@pytest.mark.parametrize("a", range(100))
def test_once(a):
  pass

@pytest.mark.both
@pytest.mark.parametrize("a", [1, 2])
def test_both(a):
  pass

@pytest.mark.parametrize("a", [1])
def test_of_one_value(a):
  pass

@pytest.mark.parametrize("a", [1, 2])
def test_of_two_values(a):
  pass

@pytest.fixture(params="xy")
def fixture(request):
  pass

@pytest.mark.parametrize("a, b", [(1, 1), (2, 2), (3, 3)])
def test_of_six_values(fixture, a, b):
  pass
"""


def test_what_runs_where(pytester):
  items = pytester.getitems(SOURCE)
  newest, default = ({item.name for item in share_of(items, share)} for share in SHARES)
  assert newest | default == {item.name for item in items}
  assert newest & default == {"test_both[1]", "test_both[2]"}
  once = {name for name in newest | default if name.startswith("test_once")}
  assert len(once & default) == pytest.approx(PERCENT_ON_DEFAULT, abs=15)
  alone = {"test_of_no_values", "test_of_one_value[1]"}
  chessboard = "of_six_values[x-1-1]", "of_six_values[y-2-2]", "of_six_values[x-3-3]"
  expected = {f"test_{name}" for name in ("of_two_values[1]", *chessboard)}
  assert newest - default - once - alone == expected


def test_order_is_kept(pytester):
  items = pytester.getitems(SOURCE)
  for share in SHARES:
    kept = share_of(items, share)
    assert kept == [item for item in items if item in kept]
