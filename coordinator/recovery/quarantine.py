"""Which requests may have ended a replica, and how the guilty one is found without another innocent stream.

When a replica dies, every request that was open there is a suspect. A suspect is tried alone: of all suspects at a
target one at a time is opened, the others wait their turn there. One that gets on is cleared, and the next one's turn
comes; one under which the target dies too is guilty, and is never opened again. So a request that ends whatever steps
it ends two replicas, and those that were there with it wait for a few steps of each other.

Targets that were killed from outside, frozen or cut off make nobody a suspect, until one request has been there at
three of them: one that makes its host run out of memory looks like that.

Before a trial there is a pause: replicas that are killed at the same moment show it by then, and nobody is blamed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from coordinator.sessions.session import Request, Session, TargetHost

_LOSSES_OF_A_SUSPECT = 3
"""Targets that are killed from outside, frozen or cut off say nothing of their requests; this many in turn do."""
_PROOF_TOKENS = 16
"""A suspect that has got so much further is cleared: that is more than a step decides, so past what got lost."""
_PAUSE_S = 0.5
"""From a death to the first trial of those who were there: twice the time between two beats of an engine."""
_TRIAL_S = 3.0
"""For so long others wait for one that neither gets on nor ends its target: a long prompt, or no credit."""
_MOST_DEATHS = 3
"""Of those under whom several replicas died, but never while they were tried alone."""
_log = structlog.get_logger(__name__)


class Quarantine:
    """Counts deaths by request, and holds suspects back.

    Invariant: a request is found guilty by a death only if it was the only suspect that was open at that replica, or by
    more deaths than a guilty one can have caused in company.
    """

    def __init__(self, open_again: Callable[[Session], None]) -> None:
        """`open_again` opens a session that was held back; it asks `may_open` again."""
        self._open_again = open_again
        self._tried: dict[str, Request] = {}
        """By the target's address."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting: dict[str, list[Session]] = {}
        """Held back, by the target's address."""
        self._doubtful: dict[str, tuple[str, list[Request], list[Request]]] = {}
        """Of targets that were lost and need not have died: the instance, who was there, who is a suspect for it."""

    def died(self, link: TargetHost, instance_id: str, sessions: Iterable[Session], *, is_sure: bool) -> list[Request]:
        """A target died, or was lost; returns the requests that have to be ended for it."""
        open_here = [session for session in sessions if session.finish is None and session.target.is_open]
        requests = list({id(session.request): session.request for session in open_here}.values())
        if not is_sure:
            for request in requests:
                request.num_losses += 1
            lost, requests = requests, [r for r in requests if r.num_losses >= _LOSSES_OF_A_SUSPECT]
            if instance_id:
                self._doubtful[link.address] = (instance_id, lost, requests)
        suspects = [request for request in requests if request.num_deaths]
        for request in requests:
            request.num_deaths += 1
            request.last_death_s = time.monotonic()
        self._waiting.pop(link.address, None)  # they are sessions of the link, and go where those go
        self._end_trial(link.address)
        guilty = suspects if len(suspects) == 1 else [r for r in suspects if r.num_deaths >= _MOST_DEATHS]
        for request in guilty:
            _log.error("request_quarantined", request_id=request.key.request_id, tenant=request.key.tenant)
        return guilty

    def came_back(self, address: str, instance_id: str) -> None:
        """A target is there again: if it is the same process as before, nobody ended it."""
        former, lost, struck = self._doubtful.pop(address, ("", [], []))
        if not former or former != instance_id:
            return
        for request in lost:
            request.num_losses = max(0, request.num_losses - 1)
        for request in struck:
            request.num_deaths = max(0, request.num_deaths - 1)
        for waited_at in list(self._waiting):
            self.settle(waited_at)

    def may_open(self, session: Session, host: TargetHost) -> bool:
        """Whether a session may be opened at a target now; if not it waits, and is opened when its turn comes."""
        request, address = session.request, host.address
        if not request.num_deaths:
            return True
        tried = self._tried.get(address)
        pause_s = request.last_death_s + _PAUSE_S - time.monotonic()
        is_others_turn = tried is not None and tried is not request and self._is_on_trial(tried, address)
        if pause_s > 0 or is_others_turn:
            host.hold(session)
            self._waiting.setdefault(address, []).append(session)
            if pause_s > 0:
                asyncio.get_running_loop().call_later(pause_s, self.settle, address)
            return False
        if tried is not request:
            self._end_trial(address)
            self._tried[address] = request
            loop = asyncio.get_running_loop()
            self._timers[address] = loop.call_later(_TRIAL_S, self._give_way, address)
        session.target.cleared_at = session.position + _PROOF_TOKENS
        return True

    def got_on(self, session: Session) -> None:
        """A suspect has come as far as clears it."""
        session.target.cleared_at = None
        request, host = session.request, session.target.host
        if not any(other.target.cleared_at is not None for other in request.sessions if other.finish is None):
            request.num_deaths = request.num_losses = 0
        if host is not None:
            self.settle(host.address)

    def settle(self, address: str) -> None:
        """Something changed at a target: whose turn it is now is opened."""
        tried = self._tried.get(address)
        if tried is not None and self._is_on_trial(tried, address):
            return
        self._end_trial(address)
        waiting = [s for s in self._waiting.pop(address, ()) if _is_held(s, address)]
        next_one = next((session.request for session in waiting if session.request.num_deaths), None)
        kept = [s for s in waiting if s.request.num_deaths and s.request is not next_one]
        if kept:
            self._waiting[address] = kept
        for session in waiting:
            if session not in kept:
                self._open_again(session)

    def _give_way(self, address: str) -> None:
        """Who is tried takes too long: it stays a suspect, but others are tried beside it."""
        self._end_trial(address)
        self.settle(address)

    def _end_trial(self, address: str) -> None:
        self._tried.pop(address, None)
        if (timer := self._timers.pop(address, None)) is not None:
            timer.cancel()

    def _is_on_trial(self, request: Request, address: str) -> bool:
        return bool(request.num_deaths) and any(
            session.finish is None
            and session.target.cleared_at is not None
            and session.target.host is not None
            and session.target.host.address == address
            for session in request.sessions
        )


def _is_held(session: Session, address: str) -> bool:
    host = session.target.host
    return session.finish is None and session.target.is_held and host is not None and host.address == address
