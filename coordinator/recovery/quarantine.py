"""Which requests may have ended a replica, and how the guilty one is found without another innocent stream.

An engine that ends tells whom it was working for. Those are suspects: wherever they go on, all at once, each is stepped
alone, in turn with everybody else, until it has got so much further that it is cleared. So the next engine that ends
with one of them tells which one, and that one is never opened again: a request that ends whatever steps it ends two
engines. Suspects of targets that do not tell, or do not step apart, are tried one at a time (`trials.py`).

A session whose target stood still is stepped alone at the next one, too: its target may tell later that it was at work
for it, and it may stand still for the same reason there.

Targets that were killed from outside, frozen or cut off make nobody a suspect, until one request has been there at
three of them: one that makes its host run out of memory looks like that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.recovery.trials import Trials
from specdec.coordinator.sessions.session import Request, Session, TargetHost

_LOSSES_OF_A_SUSPECT = 3
"""Targets that are killed from outside, frozen or cut off say nothing of their requests; this many in turn do."""
_PROOF_TOKENS = 16
"""A suspect that has got so much further is cleared: that is more than a step decides, so past what got lost."""
_MOST_DEATHS = 3
"""Of those under whom several replicas died that did not tell whom they stepped, but never while tried alone."""
_log = structlog.get_logger(__name__)


class Quarantine:
    """Counts deaths by request, and says how suspects are opened.

    Invariant: a request is found guilty by a death only if the replica worked for it alone and it was a suspect before;
    where the replica does not tell, if it was the only suspect there, or by more deaths than a guilty one can have
    caused in company.
    """

    def __init__(self, sessions: Iterable[Session], open_again: Callable[[Session], None]) -> None:
        """`sessions` are all that live; `open_again` opens one that was held back, and asks `may_open` again."""
        self._sessions = sessions
        self._trials = Trials(open_again)
        self._doubtful: dict[str, tuple[str, list[Request], list[Request]]] = {}
        """Of targets that were lost and need not have died: the instance, who was there, who is a suspect for it."""

    def died(self, link: TargetHost, instance_id: str, end: EndOfStream) -> list[Request]:
        """A target died, or was lost; returns the requests that have to be ended for it."""
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
        """A target is there again: if it is the same process as before, nobody ended it."""
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
        """A target is gone for good: nobody will learn what became of it, and it holds no requests here any more."""
        self._doubtful.pop(address, None)
        self._trials.forget(address)

    def may_open(self, session: Session, host: TargetHost) -> bool:
        """Whether a session may be opened at a target now, apart if it is a suspect; if not, it is opened later."""
        side = session.target
        if not session.request.num_deaths and not side.is_doubtful:
            return True
        if not self._trials.may_open(session, host):
            return False
        side.cleared_at = session.position + _PROOF_TOKENS
        return True

    def got_on(self, session: Session) -> None:
        """A suspect has come as far as clears it."""
        session.target.cleared_at, session.target.is_doubtful = None, False
        request, host = session.request, session.target.host
        if not any(other.target.cleared_at is not None for other in request.sessions if other.finish is None):
            request.num_deaths = request.num_losses = 0
        if host is not None:
            self.settle(host.address)

    def settle(self, address: str) -> None:
        """Something changed at a target: who need not wait any more is opened."""
        self._trials.settle(address)

    def _worked_for(self, link: TargetHost, end: EndOfStream) -> list[Session]:
        """Whom a target was working for, as it says, or all that were open there.

        They may have left it when it stood still, and count as long as they have not shown elsewhere that they get on.
        """
        living = [session for session in self._sessions if session.finish is None]
        if end.session_keys is None:
            return [s for s in living if s.target.host is link and s.target.is_open]
        return [
            session
            for session in living
            if end.may_be(session.session_id) and (session.target.host is link or session.target.is_doubtful)
        ]
