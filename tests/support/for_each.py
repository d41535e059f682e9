"""One test over many cases, which fails once, with the errors of all failed cases.

@for_each("page", PAGES)                                      # as pytest.mark.parametrize, but one item
def test_links_lead_somewhere(page: Path) -> None: ...

It suits cases of some milliseconds without fixtures of their own: all cases share the item's fixtures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Decorator of a test. `names`: one argument, or several separated by commas, whose cases are tuples.

    Two such decorators on one test check all combinations.
    """
    arguments = names.replace(" ", "").split(",")
    all_cases = list(cases)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def check_all(**values: Any) -> None:
            failures: list[BaseException] = []
            for case in all_cases:
                own = dict(zip(arguments, case if len(arguments) > 1 else (case,), strict=True))
                try:
                    test(**own, **values)
                except (Exception, pytest.fail.Exception, BaseExceptionGroup) as error:
                    error.add_note(f"case: {own}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(all_cases)} cases failed", failures)

        check_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return check_all

    return decorate
