"""Which draft a session has, when drafts fail, leave or come back. Without one it goes on, more slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.observer import Observer
from specdec.coordinator.recovery.hedging import Hedging
from specdec.coordinator.recovery.session_errors import note_failure
from specdec.coordinator.replicas.acceptance import AcceptanceRecord, Judgement
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.drafting import DraftFault, DraftSide
from specdec.coordinator.sessions.session import DraftHost, Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.errors import internal_error

_MOST_DRAFT_FAILURES = 6
"""In a session; after so many no draft is tried until one comes up. The last wait is 16 times the first."""
_MOST_DEATHS = 2
"""Of drafts, while they worked for a session."""
_log = structlog.get_logger(__name__)


class DraftRecovery:
    """Takes drafts from sessions and gives them others. The events of all draft links arrive here: see `LinkEvents`."""

    def __init__(
        self, *, sessions: SessionTable, fleet: Fleet, observer: Observer, hedging: Hedging, reopen_s: float
    ) -> None:
        """`reopen_s` is the wait after a session's first failure of a draft; it doubles with each further one."""
        self._sessions = sessions
        self._fleet = fleet
        self._observer = observer
        self._hedging = hedging
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
        self._hedging.on_load(link)
        if link.is_draining:
            self._leave(link)

    def on_up(self, link: DraftLink, lost: Sequence[Session]) -> None:
        """See `LinkEvents.on_up`."""
        if link.num_streams > 1:
            self._observer.stream_reconnected(link.role)
        for session in self._sessions:
            session.drafting.num_failures = 0
            self._open(session)

    def on_down(self, link: DraftLink, end: EndOfStream) -> None:
        """See `LinkEvents.on_down`. A session under which two drafts died goes on without one."""
        if end.ending is not Ending.ANNOUNCED:
            self._fleet.failed(link)
        for session in list(link.sessions.values()):
            side = session.drafting.at(link)
            if side is not None and end.ending is Ending.DIED and end.may_be(session.session_id):
                session.drafting.died(side)
            if session.drafting.num_deaths >= _MOST_DEATHS:
                self._forgo(session, link, "stream_broken")
            else:
                self._replace(session, link, "stream_broken")

    def on_session_error(self, link: DraftLink, session: Session, error: pb.SessionError) -> None:
        """See `LinkEvents.on_session_error`."""
        failure = note_failure(link, session, error)
        if failure.is_fault:
            self._fleet.failed(link)
        if failure.is_models or failure.is_too_large:
            self._forgo(session, link, failure.reason.lower())
        else:
            self._lost(session, link, failure.reason.lower())

    def on_too_large(self, link: DraftLink, session: Session, cause: str) -> None:
        """See `LinkEvents.on_too_large`."""
        _log.warning("session_too_large", **session.log_fields, draft=link.address, cause=cause)
        self._forgo(session, link, "message_too_large")

    def on_closed(self, link: DraftLink, session: Session, reason: str) -> None:
        """See `LinkEvents.on_closed`."""
        self._hedging.closed(link, session)
        side = session.drafting.at(link)
        is_useful = side is not None and (side.has_accepted or not side.num_barren)
        if reason == "finished" and session.finish is not None and is_useful:
            self._fleet.succeeded(link)

    def on_fault(self, link: DraftLink, session: Session, error: Exception) -> None:
        """See `LinkEvents.on_fault`. The session goes on without its draft: no request needs one."""
        internal_error(error)
        self._fleet.failed(link)
        self._lost(session, link, "fault")

    # What the decode loop and targets tell.

    def on_bad_draft(self, session: Session, cause: str, host: DraftHost | None) -> None:
        """What a draft proposed is refused: it starts anew after a while. None: the target's word, of any draft."""
        _log.warning("proposal_rejected", **session.log_fields, cause=cause)
        if host is None:
            self.blame(session)
        else:
            self._fleet.failed(host)
            self._lost(session, host, "bad_proposal")

    def on_draft(self, session: Session, side: DraftSide, fault: DraftFault) -> None:
        """A draft proposes nothing, or late, or floods."""
        if fault is DraftFault.STALL:
            self._stalled(session, side)
        elif fault is DraftFault.SLOW:
            self._slow(session, side)
        else:
            _log.warning("draft_floods", **session.log_fields, draft=side.host.address)
            self._fleet.failed(side.host)
            self._lost(session, side.host, "flood")

    def on_hedged(self, session: Session) -> None:
        """A session with two drafts got on by a step."""
        self._hedging.stepped(session)

    def on_verified(self, session: Session, num_accepted: int) -> None:
        """A target verified what the session's draft proposed. Of two drafts nobody knows whose it was."""
        if len(session.drafting.sides) != 1:
            return
        (side,) = session.drafting.sides
        judgement = self._acceptance.verified(session, side, num_accepted)
        if judgement is Judgement.NONE:
            return
        is_ejected = self._fleet.failed(side.host, is_proven=judgement is Judgement.EJECT)
        if judgement is Judgement.EJECT and is_ejected:
            for one in self._sessions:  # the draft is of no use to anybody, and there is another
                if one.drafting.at(side.host) is not None:
                    self._replace(one, side.host, "never_accepted")
        else:
            self._lost(session, side.host, "never_accepted")

    def blame(self, session: Session) -> None:
        """What was proposed for a session is no proposal: it goes on without a draft for a while.

        Of two drafts nobody knows which one it was: both go, and neither is marked.
        """
        hosts = [side.host for side in session.drafting.sides]
        if len(hosts) == 1:
            self._fleet.failed(hosts[0])
        for host in hosts:
            self._lost(session, host, "bad_proposal")

    def _stalled(self, session: Session, side: DraftSide) -> None:
        """A draft is told of commits and proposes nothing: another one gets the session, if there is one.

        None is expected while the target's load leaves no room for speculation, nor at the end of a choice.
        """
        host, side.unanswered_s = side.host, None
        num_left = session.sampling.max_tokens - session.num_output_tokens
        if num_left <= 1 or self._fleet.draft_credit(session.target.host) == 0:
            return
        session.drafting.num_stalls += 1
        _log.warning("draft_stalled", **session.log_fields, draft=host.address)
        other = self._fleet.pick_draft(session.position, besides=host)
        self._fleet.failed(host)
        if len(session.drafting.sides) > 1:
            self._drop(session, host, "stalled")
        elif other is not None and other.is_ready:
            self._move(session, host, other, "stalled")

    def _slow(self, session: Session, side: DraftSide) -> None:
        """A draft is late for most steps. It is no fault: the session tries another one, and neither is marked.

        In rejection mode which of two chains is first would decide what is verified at each step, so the session moves,
        once the other draft is known to be faster.
        """
        side.num_late = 0
        if len(session.drafting.sides) > 1:
            return
        if session.verify_mode == pb.VERIFY_MODE_COUPLED:
            self._hedging.begin(session, side)
        elif (other := self._hedging.find_rival(session, side, is_proven=True)) is not None:
            session.drafting.num_changes += 1
            _log.info("draft_slow", **session.log_fields, draft=side.host.address, other=other.address)
            self._move(session, side.host, other, "slow")

    def _leave(self, link: DraftLink) -> None:
        """A draft drains: its sessions go to another one. Without another it drafts on until its stream ends."""
        for session in list(link.sessions.values()):
            if self._fleet.pick_draft(session.position) is not None:
                self._replace(session, link, "draining")

    def _lost(self, session: Session, host: DraftHost, cause: str) -> None:
        """The session goes on without a draft, unless it has another, and gets one again after a while."""
        self._drop(session, host, cause)
        drafting = session.drafting
        if drafting.sides or drafting.num_failures >= _MOST_DRAFT_FAILURES:
            return
        drafting.num_failures += 1
        drafting.cancel_retry()
        if drafting.num_failures >= _MOST_DRAFT_FAILURES:
            return
        wait_s = self._backoff.wait_s(drafting.num_failures)
        drafting.retry = asyncio.get_running_loop().call_later(wait_s, self._open, session)

    def _forgo(self, session: Session, host: DraftHost, cause: str) -> None:
        """No draft can go on with a session: it decodes without one to its end, whatever drafts come or return.

        Where another one has it, that one goes on until it says the same.
        """
        self._drop(session, host, cause)
        session.may_have_draft = bool(session.drafting.sides)

    def _move(self, session: Session, host: DraftHost, other: DraftLink, cause: str) -> None:
        """Another draft gets the session."""
        self._drop(session, host, cause)
        self._observer.session_reopened("draft")
        other.open(session)

    def _replace(self, session: Session, host: DraftHost, cause: str) -> None:
        """The session goes on with the other one of two drafts, or gets another one at once, if there is any."""
        self._drop(session, host, cause)
        self._open(session)

    def _drop(self, session: Session, host: DraftHost, cause: str) -> None:
        """Take a draft away from a session, if it has it."""
        if session.drafting.at(host) is None:
            return
        if len(session.drafting.sides) == 1:
            self._observer.draft_dropped(cause)
            session.request.trace.draft_fallback(session.choice, cause)
        host.close(session, cause)

    def _open(self, session: Session) -> None:
        """Give a session that has none a draft, if there is one and the session may have it."""
        drafting = session.drafting
        if session.finish is not None or not (session.speculate and session.may_have_draft) or drafting.sides:
            return
        if drafting.num_failures >= _MOST_DRAFT_FAILURES:
            return
        draft = self._fleet.pick_draft(session.position)
        if draft is not None:
            if drafting.num_openings:
                self._observer.session_reopened("draft")
            draft.open(session)
