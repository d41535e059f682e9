"""tests/support/for_each.py: all cases are checked, whatever fails."""

from __future__ import annotations

import inspect

import pytest

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
