"""Which draft a session has, when drafts fail, leave or come back. Without one it goes on, more slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from coordinator.decode_loop import DraftFault
from coordinator.finishing import Finisher
from coordinator.links.draft_link import DraftLink
from coordinator.links.link_events import LinkState
from coordinator.links.stream_end import Ending
from coordinator.observer import Observer
from coordinator.recovery.session_errors import note_failure
from coordinator.replicas.acceptance import AcceptanceRecord, Judgement
from coordinator.replicas.fleet import Fleet
from coordinator.sessions.session import Session
from coordinator.sessions.table import SessionTable
from specdec.backoff import Backoff
from specdec.rpc.errors import internal_error
from specdec.v1 import common_pb2 as pb

_MOST_DRAFT_FAILURES = 6
"""In a session; after so many no draft is tried until one comes up. The last wait is 32 times the first."""
_log = structlog.get_logger(__name__)


class DraftRecovery:
    """Takes drafts from sessions and gives them others. The events of all draft links arrive here: see `LinkEvents`."""

    def __init__(
        self, *, sessions: SessionTable, fleet: Fleet, finisher: Finisher, observer: Observer, reopen_s: float
    ) -> None:
        """`reopen_s` is the wait after a session's first failure of a draft; it doubles with each further one."""
        self._sessions = sessions
        self._fleet = fleet
        self._finisher = finisher
        self._observer = observer
        self._acceptance = AcceptanceRecord()
        self._backoff = Backoff(reopen_s, reopen_s * 2**_MOST_DRAFT_FAILURES)

    # What links tell.

    def set_links(self, links: Sequence[DraftLink]) -> None:
        """Other drafts are known now."""
        self._fleet.drafts = links
        self._observer.replicas(self._fleet.links)

    def on_removed(self, link: DraftLink) -> None:
        """A link, which has no sessions, is gone for good."""
        self._fleet.on_removed(link)
        self._acceptance.forget(link.address)

    def check_instance(self, link: DraftLink, instance_id: str) -> None:
        """See `LinkEvents.check_instance`."""
        self._fleet.check_instance(link, instance_id)

    async def check_identity(self, link: DraftLink, identity: pb.ModelIdentity) -> None:
        """See `LinkEvents.check_identity`."""
        await self._fleet.check_draft(identity)

    def on_state(self, link: DraftLink) -> None:
        """See `LinkEvents.on_state`."""
        self._fleet.on_state()
        self._observer.replicas(self._fleet.links)
        if link.state is LinkState.DRAINING:
            self._leave(link)

    def on_load(self, link: DraftLink) -> None:
        """See `LinkEvents.on_load`."""
        if link.is_draining:
            self._leave(link)

    def on_up(self, link: DraftLink, lost: Sequence[Session]) -> None:
        """See `LinkEvents.on_up`."""
        if link.num_streams > 1:
            self._observer.stream_reconnected(link.role)
        for session in self._sessions:
            session.draft.num_failures = 0
            self._open(session)

    def on_down(self, link: DraftLink, ending: Ending) -> None:
        """See `LinkEvents.on_down`."""
        if ending is not Ending.ANNOUNCED:
            self._fleet.failed(link)
        for session in list(link.sessions.values()):
            self._drop(session, "stream_broken")
            self._open(session)

    def on_session_error(self, link: DraftLink, session: Session, error: pb.SessionError) -> None:
        """See `LinkEvents.on_session_error`."""
        failure = note_failure(link.role, session, error)
        if failure.is_fault:
            self._fleet.failed(link)
        if failure.is_models:
            self._forgo(session, failure.reason.lower())
        else:
            self._lost(session, failure.reason.lower())

    def on_closed(self, link: DraftLink, session: Session, reason: str) -> None:
        """See `LinkEvents.on_closed`."""
        is_useful = session.draft.has_accepted or not session.draft.num_barren
        if reason == "finished" and session.finish is not None and is_useful:
            self._fleet.succeeded(link)

    def on_fault(self, session: Session, error: Exception) -> None:
        """See `LinkEvents.on_fault`."""
        self._finisher.fail(session.request, internal_error(error))

    # What the decode loop and targets tell.

    def on_bad_draft(self, session: Session, cause: str) -> None:
        """The target refused a proposal: the draft starts anew after a while."""
        _log.warning("proposal_rejected", **session.log_fields, cause=cause)
        if session.draft.host is not None:
            self.blame(session)

    def on_draft(self, session: Session, fault: DraftFault) -> None:
        """A draft proposes nothing, or floods."""
        if fault is DraftFault.STALL:
            self.on_stall(session)
        elif session.draft.host is not None:
            _log.warning("draft_floods", **session.log_fields, draft=session.draft.host.address)
            self._fleet.failed(session.draft.host)
            self._lost(session, "flood")

    def on_verified(self, session: Session, num_accepted: int) -> None:
        """A target verified what the session's draft proposed."""
        host = session.draft.host
        if host is None:
            return
        judgement = self._acceptance.verified(host.address, session, num_accepted)
        if judgement is Judgement.NONE:
            return
        self._fleet.failed(host, is_proven=judgement is Judgement.EJECT)
        self._lost(session, "never_accepted")

    def on_stall(self, session: Session) -> None:
        """A draft is told of commits and proposes nothing: another one gets the session, if there is one.

        None is expected while the target's load leaves no room for speculation, nor at the end of a choice.
        """
        side, host = session.draft, session.draft.host
        side.unanswered_s = None
        num_left = session.sampling.max_tokens - session.num_output_tokens
        if host is None or num_left <= 1 or self._fleet.draft_credit(session.target.host) == 0:
            return
        side.num_stalls += 1
        _log.warning("draft_stalled", **session.log_fields, draft=host.address)
        other = self._fleet.pick_draft(session.position, besides=host)
        self._fleet.failed(host)
        if other is not None and other.is_ready:
            self._drop(session, "stalled")
            self._observer.session_reopened("draft")
            other.open(session)

    def blame(self, session: Session) -> None:
        """What a session's draft proposed is no proposal: the session goes on without it for a while."""
        if session.draft.host is not None:
            self._fleet.failed(session.draft.host)
        self._lost(session, "bad_proposal")

    def _leave(self, link: DraftLink) -> None:
        """A draft drains: its sessions go to another one. Without another it drafts on until its stream ends."""
        for session in list(link.sessions.values()):
            if self._fleet.pick_draft(session.position) is not None:
                self._drop(session, "draining")
                self._open(session)

    def _lost(self, session: Session, cause: str) -> None:
        """The session goes on without a draft, and gets one again after a while."""
        self._drop(session, cause)
        side = session.draft
        if side.num_failures >= _MOST_DRAFT_FAILURES:
            return
        side.num_failures += 1
        side.cancel_retry()
        wait_s = self._backoff.wait_s(side.num_failures)
        side.retry = asyncio.get_running_loop().call_later(wait_s, self._open, session)

    def _forgo(self, session: Session, cause: str) -> None:
        """No draft can go on with a session: it decodes without one to its end, whatever drafts come or return."""
        session.speculate = False
        self._drop(session, cause)

    def _drop(self, session: Session, cause: str) -> None:
        """Take a session's draft away."""
        self._observer.draft_dropped(session, cause)
        session.request.trace.draft_fallback(session.choice, cause)
        if session.draft.host is not None:
            session.draft.host.close(session, cause)

    def _open(self, session: Session) -> None:
        """Give a session that has none a draft, if there is one and the session may have it."""
        side = session.draft
        if session.finish is not None or not session.speculate or side.host is not None:
            return
        if side.num_failures >= _MOST_DRAFT_FAILURES:
            return
        draft = self._fleet.pick_draft(session.position)
        if draft is not None:
            if side.epoch:
                self._observer.session_reopened("draft")
            draft.open(session)
