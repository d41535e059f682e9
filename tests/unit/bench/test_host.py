"""Work of a target's engine for a step, counted."""

from __future__ import annotations

import pytest

from bench.host import Played
from tests.support.cost import counting_calls

_SESSIONS, _STEPS = 8, 10


@pytest.mark.parametrize(("is_speculating", "most"), [(False, 255), (True, 670)])
def test_a_step_makes_few_calls_for_each_session(is_speculating: bool, most: int) -> None:
    """`most` calls of Python's and C's functions in a turn, a twentieth more than there are."""
    played, num_calls = Played(_SESSIONS, is_speculating), 0
    played.turns(10)
    for _ in range(_STEPS):
        with counting_calls() as calls:
            played._worker._turn()
        num_calls += calls.total()
        played._answer()
    assert num_calls / _STEPS / _SESSIONS < most
