"""Who is suspected of an engine's end, and who is found guilty, over whole fleets: one guilty request, every place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.recovery import trials
from specdec.coordinator.recovery.quarantine import Quarantine
from specdec.coordinator.sessions.target_side import TargetSide
from specdec.wire.error_details import session_key

NUM_TOKENS = 24
MOST_ROUNDS = 3
"""Without a token: one for each engine that ends, and the one in which it does."""


@dataclass(eq=False)
class Host:
    """A target, whose engine steps what is apart alone."""

    address: str
    steps_apart: bool = True
    num_deaths: int = 0


@dataclass(eq=False)
class One:
    """A session, which is its request's only one."""

    session_id: str
    request: Any
    target: TargetSide = field(default_factory=TargetSide)
    position: int = 4
    finish: Any = None
    last_round: int = 0
    longest_rounds: int = 0


class Fleet:
    """Targets that take the sessions of one that died, or stands still, at once."""

    def __init__(self, num_sessions: int, num_targets: int, guilty: int, *, is_told_late: bool) -> None:
        self.hosts = [Host(f"target-{number}") for number in range(num_targets)]
        self.sessions = [self._session(number) for number in range(num_sessions)]
        self.guilty = self.sessions[guilty]
        self.quarantine = Quarantine(self.sessions, lambda session: None)  # type: ignore[arg-type]
        self._is_told_late = is_told_late
        self._untold: list[tuple[Host, EndOfStream]] = []
        self.round = 0
        for number, session in enumerate(self.sessions):
            session.target.opened(self.hosts[number % num_targets])  # type: ignore[arg-type]

    def run(self) -> None:
        """Until all have ended."""
        while any(session.finish is None for session in self.sessions):
            self.round += 1
            assert self.round < 40 * (1 + len(self.sessions))
            for host in self.hosts:
                self._tell_all()
                self._step_all(host)

    def _session(self, number: int) -> One:
        key = SimpleNamespace(request_id=str(number), tenant="")
        request = SimpleNamespace(key=key, num_deaths=0, num_losses=0, last_death_s=0.0, sessions=[])
        session = One(f"coordinator/{number}/0", request)
        request.sessions.append(session)
        return session

    def _step_all(self, host: Host) -> None:
        here = [s for s in self.sessions if s.target.host is host and s.finish is None]
        apart = [s for s in here if s.target.cleared_at is not None]
        for group in [[s for s in here if s not in apart], *([session] for session in apart)]:
            if self.guilty in group:
                self._end(host, group)
                return
            for session in group:
                self._get_on(session)

    def _get_on(self, session: One) -> None:
        session.position += 1
        session.longest_rounds = max(session.longest_rounds, self.round - session.last_round)
        session.last_round = self.round
        if session.target.cleared_at is not None and session.position >= session.target.cleared_at:
            self.quarantine.got_on(session)  # type: ignore[arg-type]
        if session.position >= NUM_TOKENS:
            session.finish = "length"

    def _end(self, host: Host, group: list[One]) -> None:
        host.num_deaths += 1
        end = EndOfStream(Ending.DIED, {session_key(session.session_id) for session in group})
        if self._is_told_late:
            self._untold.append((host, end))
            for session in self.sessions:
                session.target.is_doubtful = session.target.is_doubtful or session.target.host is host
            self._move_all(host)
        else:
            self._tell(host, end)
            self._move_all(host)

    def _tell(self, host: Host, end: EndOfStream) -> None:
        for request in self.quarantine.died(host, "", end):  # type: ignore[arg-type]
            request.sessions[0].finish = "quarantined"

    def _tell_all(self) -> None:
        """Before sessions move a second time: they are twice as patient then as a servicer with its engine."""
        untold, self._untold = self._untold, []
        for host, end in untold:
            self._tell(host, end)

    def _move_all(self, host: Host) -> None:
        other = self.hosts[(self.hosts.index(host) + 1) % len(self.hosts)]
        for session in self.sessions:
            if session.target.host is host and session.finish is None:
                session.target.cleared_at = None
                session.target.host = other  # type: ignore[assignment]
                assert self.quarantine.may_open(session, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_told_late", [False, True], ids=["told at once", "told after its sessions have moved"])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("num_sessions", [1, 2, 3, 7, 16, 64])
def test_a_guilty_request_ends_two_engines_and_no_other_request(
    num_sessions: int, num_targets: int, is_told_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_PAUSE_S", 0.0)
    for guilty in range(num_sessions):
        fleet = Fleet(num_sessions, num_targets, guilty, is_told_late=is_told_late)
        fleet.run()
        assert sum(host.num_deaths for host in fleet.hosts) == 2
        assert [s for s in fleet.sessions if s.finish == "quarantined"] == [fleet.guilty]
        others = [session for session in fleet.sessions if session is not fleet.guilty]
        assert all(session.longest_rounds <= MOST_ROUNDS for session in others)
        assert not any(session.request.num_deaths for session in others)


def died(sessions: list[One], host: Host, keys: set[bytes] | None, ending: Ending = Ending.DIED) -> list[Any]:
    quarantine = Quarantine(sessions, lambda session: None)  # type: ignore[arg-type]
    return quarantine.died(host, "", EndOfStream(ending, keys))  # type: ignore[arg-type]


def open_at(host: Host, num_sessions: int, num_deaths: int = 0) -> list[One]:
    fleet = Fleet(num_sessions, 1, 0, is_told_late=False)
    for session in fleet.sessions:
        session.target.host = host  # type: ignore[assignment]
        session.request.num_deaths = num_deaths
    return fleet.sessions


def test_an_engine_that_was_at_rest_makes_nobody_a_suspect() -> None:
    host = Host("a")
    sessions = open_at(host, 3)
    assert died(sessions, host, set()) == []
    assert [session.request.num_deaths for session in sessions] == [0, 0, 0]


def test_suspects_in_one_step_are_not_guilty_of_it() -> None:
    host = Host("a")
    sessions = open_at(host, 3, num_deaths=1)
    assert died(sessions, host, {session_key(session.session_id) for session in sessions}) == []


def test_where_the_replica_does_not_tell_all_that_were_open_are_struck_and_the_only_suspect_is_guilty() -> None:
    host = Host("a", steps_apart=False)
    sessions = open_at(host, 3)
    sessions[1].request.num_deaths = 1
    assert died(sessions, host, None) == [sessions[1].request]
    assert [session.request.num_deaths for session in sessions] == [1, 2, 1]


def test_a_replica_that_was_killed_from_outside_in_a_suspects_step_finds_nobody_guilty() -> None:
    host = Host("a")
    [session] = open_at(host, 1, num_deaths=1)
    assert died([session], host, {session_key(session.session_id)}, Ending.LOST) == []


async def test_a_suspect_whose_target_comes_up_twice_meanwhile_is_opened_once() -> None:
    opened: list[Any] = []
    tried = trials.Trials(opened.append)
    session: Any = One("coordinator/0/0", SimpleNamespace(num_deaths=1, last_death_s=time.monotonic(), sessions=[]))
    host: Any = SimpleNamespace(address="target", steps_apart=True, hold=lambda held: None)
    session.target.opened(host)
    session.target.is_held = True
    assert [tried.may_open(session, host) for _ in range(2)] == [False, False]
    tried.settle("target")
    assert opened == [session]
