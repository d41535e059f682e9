"""`make test` stays quick: by the recorded durations of its tests (tests/support/durations.py)."""

from __future__ import annotations

import pytest

from tests.support import durations
from tests.support.durations import function_of, updated

pytestmark = pytest.mark.smoke


def test_the_quick_tests_of_this_run_take_no_longer_than_they_may(request: pytest.FixtureRequest) -> None:
    """All of them in `make test`; fewer where fewer are run."""
    recorded = durations.read()
    functions = {function_of(item.nodeid) for item in request.session.items if item.get_closest_marker("quick")}
    names = functions | {function.partition("::")[0] for function in functions}
    seconds = {name: recorded[name] for name in names & recorded.keys()}
    longest = sorted(seconds.items(), key=lambda entry: -entry[1])[:10]
    assert sum(seconds.values()) <= durations.QUICK_SUM_S, f"most of it: {longest}"


def test_what_is_recorded_exists() -> None:
    files = {name.partition("::")[0] for name in durations.read()}
    assert sorted(file for file in files if not (durations.ROOT / file).is_file()) == []


def test_functions_that_take_long_are_recorded_by_name_and_others_in_the_sum_of_their_file() -> None:
    file = "tests/unit/repository/test_durations.py"
    other = "tests/unit/repository/test_docs.py"
    recorded = {file: 9.0, f"{file}::test_gone": 5.0, other: 2.0, "tests/gone.py": 1.0}
    measured = {f"{file}::test_a[1]": 0.2, f"{file}::test_a[2]": 0.2, f"{file}::test_b": 0.1, f"{file}::test_c": 0.15}
    assert updated(recorded, measured) == {file: 0.25, f"{file}::test_a": 0.4, other: 2.0}
