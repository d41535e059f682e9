"""Suspects that wait before they are opened: all for a pause, and some for each other's trials.

Targets of the previous release step all sessions together, so a death does not show which one caused it: there one
suspect is tried at a time, and the others wait for their turns. Requests with two deaths while no session was stepped
alone are tried one at a time at any target.

During the pause, other replicas that ended at the same moment are noticed, and then nobody is blamed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specdec.coordinator.sessions.session import Request, Session, TargetHost

_PAUSE_S = 0.5
"""Seconds from a death until its suspects are opened: twice an engine's heartbeat interval."""
_TRIAL_S = 3.0
"""Seconds that other suspects wait for one that neither progresses nor crashes: a long prompt, or no credit."""


class Trials:
    """Holds sessions back at their targets, and opens them in turn."""

    def __init__(self, open_again: Callable[[Session], None]) -> None:
        """`open_again` opens a session that was held back; it asks `may_open` again."""
        self._open_again = open_again
        self._tried: dict[str, Request] = {}
        """Request on trial, by the target's address."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting: dict[str, list[Session]] = {}
        """Sessions held back, by the target's address."""

    @property
    def addresses(self) -> list[str]:
        """Addresses of targets at which sessions are held back."""
        return list(self._waiting)

    def may_open(self, session: Session, host: TargetHost) -> bool:
        """Whether a suspect may be opened at a target now; if not it waits, and is opened when its turn comes."""
        request, address = session.request, host.address
        pause_s = request.last_death_s + _PAUSE_S - time.monotonic()
        takes_turns = _takes_turns(session, host)
        tried = self._tried.get(address)
        is_others_turn = takes_turns and tried is not None and tried is not request and _is_on_trial(tried, address)
        if pause_s > 0 or is_others_turn:
            host.hold(session)
            waiting = self._waiting.setdefault(address, [])
            if session not in waiting:  # its target may have come up again meanwhile
                waiting.append(session)
            if pause_s > 0:
                asyncio.get_running_loop().call_later(pause_s, self.settle, address)
            return False
        if takes_turns and tried is not request:
            self.end(address)
            self._tried[address] = request
            loop = asyncio.get_running_loop()
            self._timers[address] = loop.call_later(_TRIAL_S, self._give_way, address)
        return True

    def settle(self, address: str) -> None:
        """The state of a target changed: open the sessions that need not wait any more."""
        tried = self._tried.get(address)
        is_busy = tried is not None and _is_on_trial(tried, address)
        if not is_busy:
            self.end(address)
        waiting = [session for session in self._waiting.pop(address, ()) if _is_held(session, address)]
        in_turn = [s for s in waiting if s.target.host is not None and _takes_turns(s, s.target.host)]
        next_one = in_turn[0].request if in_turn and not is_busy else None
        kept = [session for session in in_turn if session.request is not next_one]
        if kept:
            self._waiting[address] = kept
        for session in waiting:
            if session not in kept:
                self._open_again(session)

    def end(self, address: str) -> None:
        """End the trial at a target."""
        self._tried.pop(address, None)
        if (timer := self._timers.pop(address, None)) is not None:
            timer.cancel()

    def forget(self, address: str) -> None:
        """A target's sessions have moved, with those held back for it."""
        self._waiting.pop(address, None)
        self.end(address)

    def _give_way(self, address: str) -> None:
        """The trial takes too long: its request stays a suspect, but others are tried beside it."""
        self.end(address)
        self.settle(address)


def _takes_turns(session: Session, host: TargetHost) -> bool:
    num_deaths = session.request.num_deaths
    return num_deaths > 1 or (num_deaths > 0 and not host.steps_apart)


def _is_on_trial(request: Request, address: str) -> bool:
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
