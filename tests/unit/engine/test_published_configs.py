"""Tiny models with the configurations that real checkpoints have: exact, or refused for a known reason."""

from __future__ import annotations

import pytest

from tests.support.for_each import for_each
from tests.support.zoo.cases import Case, published_cases
from tests.support.zoo.page import outcomes
from tests.support.zoo.play import TOLERANCE, Played
from tests.support.zoo.published import PUBLISHED


@for_each("case", published_cases())
def test_a_published_configuration_is_exact_or_refused(case: Case) -> None:
    found, refused = outcomes([case])[case], PUBLISHED[case.variant].refused
    if refused:
        with pytest.raises(Exception, match=refused):
            raise found if isinstance(found, Exception) else AssertionError(f"{case} is served")
        return
    if isinstance(found, Exception):
        raise found
    assert found.difference <= TOLERANCE
    assert isinstance(found, Played)
    assert found.num_rows >= 20
