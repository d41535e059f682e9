"""What happens when a replica breaks, errs, refuses, or comes back. Tokens already delivered are never in
question.

target stream ended       another target that serves the same model takes its sessions over at once, with all their
                          tokens; without one they wait, for this target or any other that comes
no target for too long    UNAVAILABLE (the client can resume)
target drains             it gets no new sessions; those it has go on there until its stream ends
session held elsewhere    CANCELLED, TAKEN_OVER: another coordinator goes on with it
logits not finite         at a target: INTERNAL, NON_FINITE_LOGITS, for any other target would say the same; at a
                          draft: the session goes on without drafts, for good
target refuses a session  opened again with growing waits; at once, without its draft, when a proposal was at fault;
                          elsewhere, when the target has failed too often or drains
draft ended or wrong      the session goes on without it, and gets a draft again when there is one
draft drains              its sessions get another draft, if there is one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from google.rpc import code_pb2, error_details_pb2

from coordinator.decode_loop import DecodeLoop
from coordinator.links.draft_link import DraftLink
from coordinator.links.link_events import LinkState
from coordinator.links.replica_link import ReplicaLink
from coordinator.links.target_link import TargetLink
from coordinator.observer import Observer
from coordinator.recovery.drafts import DraftRecovery
from coordinator.recovery.targets import TargetRecovery
from coordinator.replicas.fleet import Fleet
from coordinator.sessions.session import Session, SessionTable
from specdec.backoff import Backoff
from specdec.rpc.errors import Cancelled, Unavailable, from_status, internal_error
from specdec.v1 import common_pb2 as pb

_FATAL = frozenset({code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.DEADLINE_EXCEEDED})
_NO_FAULT = frozenset({code_pb2.OUT_OF_RANGE, code_pb2.RESOURCE_EXHAUSTED, code_pb2.DEADLINE_EXCEEDED})
"""What a replica says that is full, whose context ends, or whose session was left open: no reason to eject it."""
_HELD_ELSEWHERE = frozenset({"STALE_LEASE", "SESSION_TAKEN_OVER"})
"""What a replica says whose session another coordinator holds now: asking again would not help."""
_NON_FINITE = "NON_FINITE_LOGITS"
"""What a replica says whose model gave NaN or infinity for the session's tokens: so would any other with that model."""
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
        self._sessions = sessions
        self._fleet = fleet
        self._decode_loop = decode_loop
        self._observer = observer
        self._drafts = DraftRecovery(settings.draft_reopen_s, fleet, observer)
        self._targets = TargetRecovery(
            fleet,
            decode_loop,
            observer,
            timeout_s=settings.target_timeout_s,
            backoff=Backoff(settings.backoff_min_s, settings.backoff_max_s),
        )
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
        self._targets.forget(link)

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
            self._targets.give_up(link)
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
            self._targets.came_up(link, lost)
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
            self._targets.went_down(link)
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
            if reason == _NON_FINITE:
                self._drafts.forgo(session, reason.lower())
            else:
                self._drafts.failed(session, reason.lower())
        elif error.status.code == code_pb2.INVALID_ARGUMENT and session.was_relayed and not field.startswith("open"):
            if session.draft is not None:
                self._fleet.failed(session.draft)
            self._drafts.failed(session, "bad_proposal")
            self._targets.reopen(session)
        elif reason in _HELD_ELSEWHERE:
            failure = Cancelled("another coordinator holds the session", reason="TAKEN_OVER")
            self._decode_loop.fail(session.request, failure)
        elif error.status.code in _FATAL or reason == _NON_FINITE:
            self._decode_loop.fail(session.request, from_status(error.status))
        else:
            if _is_fault(error.status.code, reason):
                self._fleet.failed(link)
            self._targets.retry(session, from_status(error.status))

    def on_fault(self, session: Session, error: Exception) -> None:
        """See `LinkEvents.on_fault`."""
        self._decode_loop.fail(session.request, internal_error(error))

    def on_desync(self, session: Session, cause: str) -> None:
        """A target is not where the client is: open the session again with what the client has."""
        _log.warning("session_desync", **session.log_fields, cause=cause)
        session.request.trace.session_failed("target", session, "TARGET_DESYNC")
        if session.target is not None:
            self._fleet.failed(session.target)
        self._targets.retry(session, Unavailable(cause, reason="TARGET_DESYNC"))

    def on_bad_draft(self, session: Session, cause: str) -> None:
        """The target refused a proposal: the draft starts anew after a while."""
        _log.warning("proposal_rejected", **session.log_fields, cause=cause)
        if session.draft is not None:
            self._fleet.failed(session.draft)
            self._drafts.failed(session, "bad_proposal")


def _is_fault(code: int, reason: str) -> bool:
    return code not in _NO_FAULT and reason not in _HELD_ELSEWHERE and reason != _NON_FINITE


def _reason_and_field(error: pb.SessionError) -> tuple[str, str]:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in error.status.details:
        detail.Unpack(info)
        detail.Unpack(request)
    field = request.field_violations[0].field if request.field_violations else ""
    return info.reason or code_pb2.Code.Name(error.status.code), field
