"""Give sessions other drafts when theirs fail, leave or come back. Without one a session is slower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

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
from specdec.coordinator.tasks import in_parts
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.errors import internal_error

_MOST_DRAFT_FAILURES = 6
"""Failures of drafts in a session, after which it gets none until a draft comes up."""
_MOST_DEATHS = 2
"""Deaths of drafts during a session's steps, after which it gets no draft."""
_log = structlog.get_logger(__name__)


class DraftRecovery:
    """Replaces the drafts of sessions. Receives the events of all draft links: see `LinkEvents`."""

    def __init__(
        self, *, sessions: SessionTable, fleet: Fleet, observer: Observer, hedging: Hedging, reopen_s: float
    ) -> None:
        """`reopen_s`: wait after a session's first failure of a draft; doubles with each further failure."""
        self._sessions = sessions
        self._fleet = fleet
        self._observer = observer
        self._hedging = hedging
        self._acceptance = AcceptanceRecord()
        self._backoff = Backoff(reopen_s, reopen_s * 2**_MOST_DRAFT_FAILURES)

    # Events of links.

    def set_links(self, links: Sequence[DraftLink]) -> None:
        """The list of drafts changed."""
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
        self._open_all(self._sessions)

    def on_down(self, link: DraftLink, end: EndOfStream) -> None:
        """See `LinkEvents.on_down`. A session that two drafts died under goes on without one."""
        if end.ending is not Ending.ANNOUNCED:
            self._fleet.failed(link)
        left = list(link.sessions.values())
        for session in left:
            side = session.drafting.at(link)
            if side is not None and end.ending is Ending.DIED and end.may_be(session.session_id):
                session.drafting.died(side)
            if session.drafting.num_deaths >= _MOST_DEATHS:
                self._forgo(session, link, "stream_broken")
            else:
                self._drop(session, link, "stream_broken")
        self._open_all(left)

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

    # Events of the decode loop and of targets.

    def on_bad_draft(self, session: Session, cause: str, host: DraftHost | None) -> None:
        """A proposal was refused: its draft gets the session again after a wait. `host` None: a target refused it."""
        _log.warning("proposal_rejected", **session.log_fields, cause=cause)
        if host is None:
            self.blame(session)
        else:
            self._fleet.failed(host)
            self._lost(session, host, "bad_proposal")

    def on_draft(self, session: Session, side: DraftSide, fault: DraftFault) -> None:
        """A draft stalls, is slow, or proposes far too much."""
        if fault is DraftFault.STALL:
            self._stalled(session, side)
        elif fault is DraftFault.SLOW:
            self._slow(session, side)
        else:
            _log.warning("draft_floods", **session.log_fields, draft=side.host.address)
            self._fleet.failed(side.host)
            self._lost(session, side.host, "flood")

    def on_hedged(self, session: Session) -> None:
        """A session with two drafts made a step."""
        self._hedging.stepped(session)

    def on_verified(self, session: Session, num_accepted: int) -> None:
        """A target verified a proposal. With two drafts in the session its origin is unknown."""
        if len(session.drafting.sides) != 1:
            return
        (side,) = session.drafting.sides
        judgement = self._acceptance.verified(session, side, num_accepted)
        if judgement is Judgement.NONE:
            return
        is_ejected = self._fleet.failed(side.host, is_proven=judgement is Judgement.EJECT)
        if judgement is Judgement.EJECT and is_ejected:
            left = [one for one in self._sessions if one.drafting.at(side.host) is not None]
            for one in left:  # no session gains from the draft, and there is another
                self._drop(one, side.host, "never_accepted")
            self._open_all(left)
        else:
            self._lost(session, side.host, "never_accepted")

    def blame(self, session: Session) -> None:
        """A target refused a malformed proposal: the session goes on without a draft for a while.

        With two drafts the culprit is unknown: both leave the session, and neither is marked as failed.
        """
        hosts = [side.host for side in session.drafting.sides]
        if len(hosts) == 1:
            self._fleet.failed(hosts[0])
        for host in hosts:
            self._lost(session, host, "bad_proposal")

    def _stalled(self, session: Session, side: DraftSide) -> None:
        """A draft gets commits and proposes nothing: another one gets the session, if there is one.

        No proposal is due while the target's load leaves no room for speculation, nor at the end of a choice.
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
        """A draft is late for most steps, which is no fault: the session tries another one, and neither is marked.

        In rejection mode a race of two drafts would decide what each step verifies, so the session moves only to a
        draft that is known to be faster.
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
        left = [s for s in link.sessions.values() if self._fleet.pick_draft(s.position) is not None]
        for session in left:
            self._drop(session, link, "draining")
        self._open_all(left)

    def _lost(self, session: Session, host: DraftHost, cause: str) -> None:
        """Take a draft from the session; without another one, it gets a draft again after a wait."""
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
        """No draft can go on with a session: it decodes without one to its end.

        If another draft has it too, that one goes on until it fails likewise.
        """
        self._drop(session, host, cause)
        session.may_have_draft = bool(session.drafting.sides)

    def _move(self, session: Session, host: DraftHost, other: DraftLink, cause: str) -> None:
        """Another draft gets the session."""
        self._drop(session, host, cause)
        self._observer.session_reopened("draft")
        other.open_session(session)

    def _drop(self, session: Session, host: DraftHost, cause: str) -> None:
        """Take a draft from a session that has it."""
        if session.drafting.at(host) is None:
            return
        if len(session.drafting.sides) == 1:
            self._observer.draft_dropped(cause)
            session.request.trace.draft_fallback(session.choice, cause)
        host.close_session(session, cause)

    def _open_all(self, sessions: Iterable[Session]) -> None:
        """Give drafts to those of the sessions that have none and may have one."""
        lacking = (session for session in sessions if not session.drafting.sides)
        in_parts((session.position, partial(self._open, session)) for session in lacking)

    def _open(self, session: Session) -> None:
        """Give a draft to a session without one, if there is one and the session may have it."""
        drafting = session.drafting
        if session.finish is not None or not (session.speculate and session.may_have_draft) or drafting.sides:
            return
        if drafting.num_failures >= _MOST_DRAFT_FAILURES:
            return
        draft = self._fleet.pick_draft(session.position)
        if draft is not None:
            if drafting.num_openings:
                self._observer.session_reopened("draft")
            draft.open_session(session)
