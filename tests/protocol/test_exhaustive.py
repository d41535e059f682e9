"""Every order of what can happen to few nodes with few sessions, up to the bounds in `exhaustive/bounds.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.v1 import common_pb2 as pb
from tests.protocol.exhaustive.bounds import BOUNDS, LONG, SHORT, Exploration
from tests.protocol.exhaustive.explorer import explore, replay
from tests.protocol.exhaustive.pair_system import PairSystem
from tests.protocol.exhaustive.replica_life import STREAMS
from tests.protocol.simulation.pipes import Message

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


def test_the_explored_link_carries_tokens_and_proposals() -> None:
    system = PairSystem(replace(BOUNDS["link"].bounds, num_tokens=4))
    carried: set[str | None] = set()
    try:
        while not system.is_done():
            events = system.events()  # the client reads when nothing else is left to happen
            system.apply(next((event for event in events if event != "read"), "read"))
            calls = [call for call in system.network.calls if call.method == STREAMS[-1]]
            messages = [item for call in calls for pipe in call.pipes for item in pipe.sent]
            frames = [pb.LinkFrame.FromString(item.payload) for item in messages if isinstance(item, Message)]
            carried.update(entry.WhichOneof("entry") for frame in frames for entry in frame.entries)
        assert carried >= {"join", "commit", "proposal"}
        assert not system.faults()
    finally:
        system.close()


@pytest.mark.parametrize("name", ["cut", "link"])
def test_equal_events_lead_to_equal_states(name: str) -> None:
    bounds = replace(BOUNDS[name].bounds, num_tokens=6)
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
