"""`make test` stays quick: by the recorded durations of its tests (tests/support/durations.py)."""

from __future__ import annotations

import pytest

from tests.support import durations
from tests.support.durations import function_of, updated
from tests.support.scheduling import scope_seconds

pytestmark = pytest.mark.smoke
QUICK_AND_OTHER_FILES = ("unit/policy/test_gate.py", "unit/engine/test_zoo.py", "chart/test_chart.py")
"""A file of quick tests, one of others, and one of others with a smoke."""


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


def test_files_without_quick_tests_are_not_imported_for_quick_ones() -> None:
    gate, zoo, chart = (durations.ROOT / "tests" / name for name in QUICK_AND_OTHER_FILES)
    assert [durations.has_no_quick(file) for file in (gate, zoo, chart)] == [False, True, False]


def test_a_scope_takes_what_its_chosen_functions_take_and_an_unknown_file_begins_early() -> None:
    chaos, gate = "tests/chaos/test_metrics.py", "tests/unit/policy/test_gate.py"
    recorded = {f"{chaos}::test_a": 4.0, "tests/chaos/test_constraints.py": 2.0, gate: 1.0, f"{gate}::test_long": 90.0}
    chosen = [f"{chaos}::test_a[1]", f"{chaos}::test_a[2]", "tests/chaos/test_constraints.py::test_b"]
    found = scope_seconds([*chosen, f"{gate}::test_c", "tests/unit/test_new.py::test_d"], recorded)
    assert found == {"tests/chaos": 6.0, gate: 1.0, "tests/unit/test_new.py": 20.0}
