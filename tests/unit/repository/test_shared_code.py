"""Code that tests share: cases in one item, and counted lines."""

from __future__ import annotations

import gc
import inspect

import pytest

from tests.support.cost import lines_run
from tests.support.for_each import for_each


def test_one_failure_names_all_cases_that_failed_and_fixtures_are_passed_on() -> None:
    checked = []

    @for_each("number", [1, 2, 3])
    @for_each("word, length", [("a", 1), ("bb", 2)])
    def check(number: int, fixture: str, word: str, length: int) -> None:
        checked.append((number, word))
        assert fixture == "given" and len(word) == length
        if number == 2:
            pytest.fail("no")
        assert number < 3

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(BaseExceptionGroup) as caught:
        check(fixture="given")
    assert checked == [(number, word) for number in (1, 2, 3) for word in ("a", "bb")]
    assert [error.__notes__ for error in caught.value.exceptions] == [["case: {'number': 2}"], ["case: {'number': 3}"]]


def test_lines_are_those_of_the_call_whatever_is_collected_meanwhile() -> None:
    def run() -> None:
        kept.extend([number] for number in range(20_000))  # a collection every few hundred lists

    def others(phase: str, _: object) -> None:
        noted.append(phase)
        noted.append(phase)

    kept, noted = list[object](), list[str]()
    expected = lines_run(run)
    gc.callbacks.append(others)
    try:
        assert lines_run(run) == expected
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(others)
