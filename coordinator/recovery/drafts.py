"""Which draft a session has, when drafts fail, leave or come back. Without one it goes on, more slowly."""

from __future__ import annotations

import asyncio

from coordinator.links.draft_link import DraftLink
from coordinator.observer import Observer
from coordinator.replicas.fleet import Fleet
from coordinator.sessions.session import Session
from specdec.backoff import Backoff

_MOST_DRAFT_FAILURES = 6


class DraftRecovery:
    """Takes drafts from sessions and gives them others."""

    def __init__(self, reopen_s: float, fleet: Fleet, observer: Observer) -> None:
        """`reopen_s` is the wait after a session's first failure of a draft; it doubles with each further one."""
        self._backoff = Backoff(reopen_s, reopen_s * 2**_MOST_DRAFT_FAILURES)
        self._fleet = fleet
        self._observer = observer

    def leave(self, link: DraftLink) -> None:
        """A draft drains: its sessions go to another one. Without another it drafts on until its stream ends."""
        for session in list(link.sessions.values()):
            if self._fleet.pick_draft(session.position) is not None:
                self.drop(session, "draining")
                self.open(session)

    def failed(self, session: Session, cause: str) -> None:
        """A session's draft erred: the session goes on without one, and gets one again after a while."""
        self.drop(session, cause)
        if session.num_draft_failures >= _MOST_DRAFT_FAILURES:
            return
        session.num_draft_failures += 1
        wait_s = self._backoff.wait_s(session.num_draft_failures)
        if session.draft_retry is not None:
            session.draft_retry.cancel()
        session.draft_retry = asyncio.get_running_loop().call_later(wait_s, self.open, session)

    def forgo(self, session: Session, cause: str) -> None:
        """No draft can go on with a session: it decodes without one to its end, whatever drafts come or return."""
        session.speculate = False
        self.drop(session, cause)

    def drop(self, session: Session, cause: str) -> None:
        """Take a session's draft away."""
        self._observer.metrics.draft_fallbacks.labels(cause).inc()
        session.request.trace.draft_fallback(session, cause)
        session.committed_s = None
        if session.draft is not None:
            session.draft.close(session, cause)

    def open(self, session: Session) -> None:
        """Give a session that has none a draft, if there is one and the session may have it."""
        if session.finish is not None or not session.speculate or session.draft is not None:
            return
        if session.num_draft_failures >= _MOST_DRAFT_FAILURES:
            return
        draft = self._fleet.pick_draft(session.position)
        if draft is not None:
            if session.draft_epoch:
                self._observer.metrics.session_reopens.labels("draft").inc()
            draft.open(session)
