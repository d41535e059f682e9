"""Every order of what can happen to few nodes with few sessions, up to the bounds in `exhaustive/bounds.py`."""

from __future__ import annotations

import pytest

from tests.protocol.exhaustive.bounds import LONG, SHORT, Exploration
from tests.protocol.exhaustive.explorer import explore, replay
from tests.protocol.exhaustive.pair_system import PairSystem

_MOST_STATES = 1_000_000


def _explore(exploration: Exploration) -> None:
    bounds = exploration.bounds
    report = explore(lambda: PairSystem(bounds), most_states=_MOST_STATES, must_end=bounds.must_end)
    assert not report.finding, report
    assert report.is_complete
    assert report.num_states >= exploration.num_states, report


@pytest.mark.parametrize("name", SHORT)
def test_all_orders_are_safe_and_lead_to_an_end(name: str) -> None:
    _explore(SHORT[name])


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LONG)
def test_all_orders_of_more_faults_are_safe_and_lead_to_an_end(name: str) -> None:
    _explore(LONG[name])


def test_equal_events_lead_to_equal_states() -> None:
    bounds = SHORT["cut"].bounds
    fingerprints, schedule = [], []
    for _ in range(2):
        system = PairSystem(bounds)
        for number in range(12):
            events = system.events()
            schedule.append(events[number % len(events)])
            system.apply(schedule[-1])
        fingerprints.append(system.fingerprint())
        system.close()
    assert schedule[:12] == schedule[12:]
    assert fingerprints[0] == fingerprints[1]
    assert replay(lambda: PairSystem(bounds), schedule[:12]) == []
