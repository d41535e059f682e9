"""Find the request that crashes replicas, without breaking further innocent streams.

An engine that ends reports the sessions of its last step. These are suspects: wherever they go on, each is stepped
alone, in turn with all others, until it has committed enough tokens to be cleared. If an engine ends again, its report
names one suspect, which is never opened again: a request that crashes every step ends two engines. Suspects of
targets that report nothing, or cannot step sessions alone, are tried one at a time (`trials.py`).

A session whose target stalled is stepped alone at the next one, too: that target may report it later, and the session
may stall the next one for the same reason.

Targets that were killed from outside, frozen or cut off make nobody a suspect, until one request has been on three of
them: a request that exhausts its host's memory looks like that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.recovery.trials import Trials
from specdec.coordinator.sessions.session import Request, Session, TargetHost

_LOSSES_OF_A_SUSPECT = 3
"""Targets lost from outside in a row (killed, frozen or cut off) after which their common request is a suspect."""
_PROOF_TOKENS = 16
"""Tokens after which a suspect is cleared: more than one step commits, so past the lost step."""
_MOST_DEATHS = 3
"""Deaths that prove a request guilty if replicas reported no sessions and it was never tried alone."""
_log = structlog.get_logger(__name__)


class Quarantine:
    """Counts deaths by request, and decides how suspects are opened.

    Invariant: a death proves a request guilty only if the replica stepped it alone and it was a suspect before; if the
    replica reports no sessions, only if it was the only suspect there, or has more deaths than coincidence explains.
    """

    def __init__(self, sessions: Iterable[Session], open_again: Callable[[Session], None]) -> None:
        """`sessions`: all open sessions. `open_again` opens a session that was held back, and asks `may_open` again."""
        self._sessions = sessions
        self._trials = Trials(open_again)
        self._doubtful: dict[str, tuple[str, list[Request], list[Request]]] = {}
        """Lost targets, which may still live, by address: instance, its requests, and the suspects among them."""

    def died(self, link: TargetHost, instance_id: str, end: EndOfStream) -> list[Request]:
        """A target died or was lost; returns the requests that are guilty and must fail."""
        struck = self._worked_for(link, end)
        requests = list({id(session.request): session.request for session in struck}.values())
        if end.ending is not Ending.DIED:
            for request in requests:
                request.num_losses += 1
            lost, requests = requests, [r for r in requests if r.num_losses >= _LOSSES_OF_A_SUSPECT]
            if instance_id:
                self._doubtful[link.address] = (instance_id, lost, requests)
        suspects = [request for request in requests if request.num_deaths]
        for request in requests:
            request.num_deaths += 1
            request.last_death_s = time.monotonic()
        self._trials.forget(link.address)
        if end.session_keys is not None:
            guilty = suspects if len(end.session_keys) == 1 else []
        else:
            guilty = suspects if len(suspects) == 1 else [r for r in suspects if r.num_deaths >= _MOST_DEATHS]
        for request in guilty:
            _log.error("request_quarantined", request_id=request.key.request_id, tenant=request.key.tenant)
        return guilty

    def came_back(self, address: str, instance_id: str) -> None:
        """A target is up again: if it is the same process, no request crashed it."""
        former, lost, struck = self._doubtful.pop(address, ("", [], []))
        if not former or former != instance_id:
            return
        for request in lost:
            request.num_losses = max(0, request.num_losses - 1)
        for request in struck:
            request.num_deaths = max(0, request.num_deaths - 1)
        for waited_at in self._trials.addresses:
            self.settle(waited_at)

    def forget(self, address: str) -> None:
        """A target was removed: its sessions no longer wait for it."""
        self._doubtful.pop(address, None)
        self._trials.forget(address)

    def may_open(self, session: Session, host: TargetHost) -> bool:
        """Whether a session may be opened at a target now; a suspect is stepped alone. False: it is opened later."""
        side = session.target
        if not session.request.num_deaths and not side.is_doubtful:
            return True
        if not self._trials.may_open(session, host):
            return False
        side.cleared_at = session.position + _PROOF_TOKENS
        return True

    def got_on(self, session: Session) -> None:
        """A suspect has committed enough tokens to be cleared."""
        session.target.cleared_at, session.target.is_doubtful = None, False
        request, host = session.request, session.target.host
        if not any(other.target.cleared_at is not None for other in request.sessions if other.finish is None):
            request.num_deaths = request.num_losses = 0
        if host is not None:
            self.settle(host.address)

    def settle(self, address: str) -> None:
        """The state of a target changed: open the sessions that need not wait any more."""
        self._trials.settle(address)

    def _worked_for(self, link: TargetHost, end: EndOfStream) -> list[Session]:
        """Sessions in the target's last step, or all that were open there if it does not report them.

        Sessions that moved away when the target stalled count until they have made progress elsewhere.
        """
        living = [session for session in self._sessions if session.finish is None]
        if end.session_keys is None:
            return [s for s in living if s.target.host is link and s.target.is_open]
        return [
            session
            for session in living
            if end.may_be(session.session_id) and (session.target.host is link or session.target.is_doubtful)
        ]
