"""One test over many cases: it fails once, with what each of the cases that failed said.

@for_each("page", PAGES)                                      # as pytest.mark.parametrize, in one item
def test_links_lead_somewhere(page: Path) -> None: ...

For cases of some milliseconds that need nothing of their own: fixtures are those of the one item.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Decorator of a test. `names`: one argument, or several with commas between them, a case is then a tuple.

    Two of them on one test check all combinations.
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
