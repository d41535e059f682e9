"""What happens when a replica breaks, errs, refuses, or comes back. Tokens already delivered are never in
question.

target stream ended       another target that serves the same model takes its sessions over at once, with all their
                          tokens; without one they wait, for this target or any other that comes
no target for too long    UNAVAILABLE (the client can resume)
target drains             it gets no new sessions; those it has go on there until its stream ends
session held elsewhere    CANCELLED, TAKEN_OVER: another coordinator goes on with it
target refuses a session  opened again with growing waits; at once, without its draft, when a proposal was at fault;
                          elsewhere, when the target has failed too often or drains
draft ended or wrong      the session goes on without it, and gets a draft again when there is one
draft drains              its sessions get another draft, if there is one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from google.rpc import code_pb2, error_details_pb2

from coordinator.decode_loop import DecodeLoop
from coordinator.draft_recovery import DraftRecovery
from coordinator.fleet import Fleet, same_model
from coordinator.links.draft_link import DraftLink
from coordinator.links.link_events import LinkState
from coordinator.links.replica_link import ReplicaLink
from coordinator.links.target_link import TargetLink
from coordinator.observer import Observer
from coordinator.sessions import Session, SessionTable
from specdec.rpc.errors import Cancelled, SpecdecError, Unavailable, from_status, internal_error
from specdec.v1 import common_pb2 as pb

_MOST_DOUBLINGS = 30
_FATAL = frozenset({code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.DEADLINE_EXCEEDED})
_NO_FAULT = frozenset({code_pb2.OUT_OF_RANGE, code_pb2.RESOURCE_EXHAUSTED, code_pb2.DEADLINE_EXCEEDED})
"""What a replica says that is full, whose context ends, or whose session was left open: no reason to eject it."""
_HELD_ELSEWHERE = frozenset({"STALE_LEASE", "SESSION_TAKEN_OVER"})
"""What a replica says whose session another coordinator holds now: asking again would not help."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How patient recovery is."""

    target_timeout_s: float
    draft_reopen_s: float
    backoff_min_s: float
    backoff_max_s: float


class Recovery:
    """Repairs sessions. The events of all links arrive here, in the event loop's thread."""

    def __init__(
        self,
        settings: RecoverySettings,
        sessions: SessionTable,
        fleet: Fleet,
        decode_loop: DecodeLoop,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._fleet = fleet
        self._decode_loop = decode_loop
        self._observer = observer
        self._drafts = DraftRecovery(settings.draft_reopen_s, fleet, observer)
        self._give_ups: dict[str, asyncio.TimerHandle] = {}
        decode_loop.on_desync = self.on_desync
        decode_loop.on_bad_draft = self.on_bad_draft

    def set_targets(self, links: Sequence[TargetLink]) -> None:
        """Other targets are known now."""
        self._fleet.set_targets(links)
        self._observer.replicas(self._fleet.links)

    def set_drafts(self, links: Sequence[DraftLink]) -> None:
        """Other drafts are known now."""
        self._fleet.set_drafts(links)
        self._observer.replicas(self._fleet.links)

    def on_removed(self, link: ReplicaLink) -> None:
        """A link, which has no sessions, is gone for good."""
        self._fleet.on_removed(link)
        if (timer := self._give_ups.pop(link.address, None)) is not None:
            timer.cancel()

    def check_instance(self, link: ReplicaLink, instance_id: str) -> None:
        """See `LinkEvents.check_instance`."""
        self._fleet.check_instance(link, instance_id)

    async def check_identity(self, link: ReplicaLink, identity: pb.ModelIdentity) -> None:
        """See `LinkEvents.check_identity`."""
        await self._fleet.check_identity(link, identity)

    def on_state(self, link: ReplicaLink) -> None:
        """See `LinkEvents.on_state`."""
        self._fleet.on_state(link)
        self._observer.replicas(self._fleet.links)
        if link.state is LinkState.INCOMPATIBLE and isinstance(link, TargetLink):
            self._give_up(link)
        if isinstance(link, DraftLink) and link.state is LinkState.DRAINING:
            self._drafts.leave(link)

    def on_load(self, link: ReplicaLink) -> None:
        """See `LinkEvents.on_load`."""
        if isinstance(link, TargetLink) and link.load is not None:
            for draft in self._fleet.drafts:
                draft.tell_target_load(link.address, link.load)
        if isinstance(link, DraftLink) and link.is_draining:
            self._drafts.leave(link)

    def on_up(self, link: ReplicaLink, lost: Sequence[Session]) -> None:
        """See `LinkEvents.on_up`."""
        if link.num_streams > 1:
            self._observer.metrics.stream_reconnects.labels(link.role).inc()
        if isinstance(link, TargetLink):
            self._on_target_up(link, lost)
        else:
            for session in self._sessions:
                session.num_draft_failures = 0
                self._drafts.open(session)

    def on_closed(self, link: ReplicaLink, session: Session, reason: str) -> None:
        """See `LinkEvents.on_closed`."""
        if reason != "finished" or session.finish is None:
            return
        self._fleet.succeeded(link)
        if isinstance(link, TargetLink) and link.is_up:
            self._fleet.remember(link, session)

    def on_down(self, link: ReplicaLink, is_fault: bool) -> None:
        """See `LinkEvents.on_down`."""
        if is_fault:
            self._fleet.failed(link)
        if isinstance(link, TargetLink):
            for session in list(link.sessions.values()):
                if (other := self._fleet.find_target(session.request.model, besides=link)) is not None:
                    self._move_to(session, link, other)
            if link.sessions and link.address not in self._give_ups:
                loop = asyncio.get_running_loop()
                self._give_ups[link.address] = loop.call_later(self._settings.target_timeout_s, self._give_up, link)
        else:
            for session in list(link.sessions.values()):
                self._drafts.drop(session, "stream_broken")
                self._drafts.open(session)

    def on_session_error(self, link: ReplicaLink, session: Session, error: pb.SessionError) -> None:
        """See `LinkEvents.on_session_error`."""
        reason, field = _reason_and_field(error)
        session.request.trace.session_failed(link.role, session, reason)
        _log.warning(
            "session_error",
            role=link.role,
            **session.log_fields,
            reason=reason,
            error=error.status.message,
        )
        if isinstance(link, DraftLink):
            if _is_fault(error.status.code, reason):
                self._fleet.failed(link)
            self._drafts.failed(session, reason.lower())
        elif error.status.code == code_pb2.INVALID_ARGUMENT and session.was_relayed and not field.startswith("open"):
            if session.draft is not None:
                self._fleet.failed(session.draft)
            self._drafts.failed(session, "bad_proposal")
            self._reopen_target(session)
        elif reason in _HELD_ELSEWHERE:
            failure = Cancelled("another coordinator holds the session", reason="TAKEN_OVER")
            self._decode_loop.fail(session.request, failure)
        elif error.status.code in _FATAL:
            self._decode_loop.fail(session.request, from_status(error.status))
        else:
            if _is_fault(error.status.code, reason):
                self._fleet.failed(link)
            self._retry_target(session, from_status(error.status))

    def on_fault(self, session: Session, error: Exception) -> None:
        """See `LinkEvents.on_fault`."""
        self._decode_loop.fail(session.request, internal_error(error))

    def on_desync(self, session: Session, cause: str) -> None:
        """A target is not where the client is: open the session again with what the client has."""
        _log.warning("session_desync", **session.log_fields, cause=cause)
        session.request.trace.session_failed("target", session, "TARGET_DESYNC")
        if session.target is not None:
            self._fleet.failed(session.target)
        self._retry_target(session, Unavailable(cause, reason="TARGET_DESYNC"))

    def on_bad_draft(self, session: Session, cause: str) -> None:
        """The target refused a proposal: the draft starts anew after a while."""
        _log.warning("proposal_rejected", **session.log_fields, cause=cause)
        if session.draft is not None:
            self._fleet.failed(session.draft)
            self._drafts.failed(session, "bad_proposal")

    def _on_target_up(self, link: TargetLink, lost: Sequence[Session]) -> None:
        timer = self._give_ups.pop(link.address, None)
        if timer is not None:
            timer.cancel()
        opened_again = {session.session_id for session in lost}
        for session in list(link.sessions.values()):
            if link.identity is not None and not same_model(session.request.model, link.identity):
                self._move(session, link)
            elif session.session_id in opened_again:
                self._reopen_target(session)
            else:
                link.give_credit(session)
        if link.is_draining or link.identity is None:
            return
        for other in self._fleet.targets:
            if other is not link and not other.is_up:
                for session in [s for s in other.sessions.values() if same_model(s.request.model, link.identity)]:
                    self._move_to(session, other, link)

    def _give_up(self, link: TargetLink) -> None:
        """A target is gone for too long, or serves something else now."""
        timer = self._give_ups.pop(link.address, None)
        if timer is not None:
            timer.cancel()
        for session in list(link.sessions.values()):
            self._move(session, link)

    def _move(self, session: Session, link: TargetLink) -> None:
        if session.finish is not None:
            return
        link.sessions.pop(session.session_id, None)
        other = self._fleet.find_target(session.request.model, besides=link)
        if other is None:
            error = Unavailable(
                f"target {link.address} is gone and no other serves the model",
                retry_after_s=self._settings.backoff_max_s,
                reason="TARGET_LOST",
            )
            self._decode_loop.fail(session.request, error)
            return
        self._move_to(session, link, other)

    def _move_to(self, session: Session, link: TargetLink, other: TargetLink) -> None:
        if session.finish is not None:
            return
        link.release(session)
        _note_move(session, link, other)
        session.target = other
        self._reopen_target(session)
        self._follow_target(session)

    def _retry_target(self, session: Session, error: SpecdecError) -> None:
        """Open a session again after a while, unless it has been failing for too long."""
        now_s = time.monotonic()
        if session.target_failing_s is None:
            session.target_failing_s = now_s
        doublings = min(session.num_target_failures, _MOST_DOUBLINGS)
        wait_s = min(self._settings.backoff_max_s, self._settings.backoff_min_s * 2**doublings)
        session.num_target_failures += 1
        if session.target is not None:
            session.target.supersede(session)
        if now_s + wait_s - session.target_failing_s > self._settings.target_timeout_s:
            failure = Unavailable(
                f"the target keeps refusing the session: {error.message}",
                retry_after_s=wait_s,
                reason="TARGET_REFUSES",
            )
            self._decode_loop.fail(session.request, failure)
            return
        _cancel(session.target_retry)
        session.target_retry = asyncio.get_running_loop().call_later(wait_s, self._reopen_target, session)

    def _reopen_target(self, session: Session) -> None:
        _cancel(session.target_retry)
        session.target_retry = None
        if session.finish is None and session.target is not None:
            self._leave_unfit_target(session, session.target)
            self._observer.metrics.session_reopens.labels("target").inc()
            session.target.open(session)

    def _leave_unfit_target(self, session: Session, link: TargetLink) -> None:
        """A session that has to be opened again is not opened where new ones would not be."""
        if link.is_ready or not link.is_up:
            return
        other = self._fleet.find_target(session.request.model, besides=link)
        if other is not None and other.is_ready:
            link.release(session)
            _note_move(session, link, other)
            session.target = other
            self._follow_target(session)

    def _follow_target(self, session: Session) -> None:
        """The draft goes by the load of the session's target, which it is told at opening."""
        if session.draft is not None and session.draft.is_up:
            self._observer.metrics.session_reopens.labels("draft").inc()
            session.draft.open(session)


def _note_move(session: Session, link: TargetLink, other: TargetLink) -> None:
    _log.info("session_moved", **session.log_fields, target=other.address)
    session.request.trace.event(
        "session_moved", choice=session.choice, source=link.address, target=other.address, position=session.position
    )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _is_fault(code: int, reason: str) -> bool:
    return code not in _NO_FAULT and reason not in _HELD_ELSEWHERE


def _reason_and_field(error: pb.SessionError) -> tuple[str, str]:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in error.status.details:
        detail.Unpack(info)
        detail.Unpack(request)
    field = request.field_violations[0].field if request.field_violations else ""
    return info.reason or code_pb2.Code.Name(error.status.code), field
