"""Handle the events of target links."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from specdec.coordinator.finishing import Finisher
from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.observer import Observer
from specdec.coordinator.recovery.drafts import DraftRecovery
from specdec.coordinator.recovery.moves import TargetMoves
from specdec.coordinator.recovery.session_errors import note_failure
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.session import Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Overloaded,
    SpecdecError,
    Unavailable,
    from_status,
    internal_error,
)

_RETRY_OVERLOAD_S = 30.0
"""Seconds until a request may find room for a costly constraint."""
_log = structlog.get_logger(__name__)


class TargetRecovery:
    """Keeps sessions on working targets. Receives the events of all target links: see `LinkEvents`."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        drafts: DraftRecovery,
        fleet: Fleet,
        finisher: Finisher,
        observer: Observer,
        timeout_s: float,
        backoff: Backoff,
    ) -> None:
        """`timeout_s`: how long a session may be without a target. `backoff`: waits between two tries."""
        self._drafts = drafts
        self._fleet = fleet
        self._finisher = finisher
        self._observer = observer
        self.moves = TargetMoves(
            sessions=sessions,
            fleet=fleet,
            finisher=finisher,
            observer=observer,
            timeout_s=timeout_s,
            backoff=backoff,
        )
        """Opens sessions again, at the same or another target."""

    def set_links(self, links: Sequence[TargetLink]) -> None:
        """The list of targets changed."""
        self._fleet.targets = links
        self._observer.replicas(self._fleet.links)

    def on_removed(self, link: TargetLink) -> None:
        """A link, which has no sessions, is gone for good."""
        self._fleet.on_removed(link)
        self._fleet.forget_prefixes(link)
        self.moves.forget(link)
        self.moves.quarantine.forget(link.address)

    def check_instance(self, link: TargetLink, instance_id: str) -> None:
        """See `LinkEvents.check_instance`."""
        self._fleet.check_instance(link, instance_id)

    async def check_identity(self, link: TargetLink, identity: pb.ModelIdentity) -> None:
        """See `LinkEvents.check_identity`."""
        await self._fleet.check_target(link, identity)

    def on_state(self, link: TargetLink) -> None:
        """See `LinkEvents.on_state`."""
        self._fleet.on_state()
        if not link.is_up and not link.instance_id:
            self._fleet.forget_prefixes(link)  # without an instance id a restart goes unnoticed
        self._observer.replicas(self._fleet.links)
        if link.state is LinkState.INCOMPATIBLE:
            self.moves.give_up(link)

    def on_load(self, link: TargetLink) -> None:
        """See `LinkEvents.on_load`."""
        self._observer.target_load(self._fleet.targets)
        if link.load is not None:
            drafting = (side.host for session in link.sessions.values() for side in session.drafting.sides)
            for draft in dict.fromkeys(drafting):
                draft.tell_target_load(link.address, link.load)

    def on_up(self, link: TargetLink, lost: Sequence[Session]) -> None:
        """See `LinkEvents.on_up`."""
        if link.num_streams > 1:
            self._observer.stream_reconnected(link.role)
        self.moves.quarantine.came_back(link.address, link.instance_id)
        self.moves.came_up(link, lost)

    def on_down(self, link: TargetLink, end: EndOfStream) -> None:
        """See `LinkEvents.on_down`."""
        if end.ending is not Ending.ANNOUNCED:
            self._fleet.failed(link)
        if end.ending in (Ending.DIED, Ending.LOST):
            for request in self.moves.quarantine.died(link, link.instance_id, end):
                self._finisher.fail(request, _quarantined())
        self.moves.went_down(link)

    def on_session_error(self, link: TargetLink, session: Session, error: pb.SessionError) -> None:
        """See `LinkEvents.on_session_error`."""
        failure = note_failure(link, session, error)
        if failure.may_be_proposals and session.target.was_relayed:
            self._drafts.blame(session)
            self.moves.reopen(session)
        elif failure.is_held_elsewhere:
            held = Cancelled("another coordinator holds the session", reason="TAKEN_OVER")
            self._finisher.fail(session.request, held)
        elif failure.is_session_fault:
            self._faulted(link, session, error)
        elif failure.is_fatal:
            self._finisher.fail(session.request, _as_asked(from_status(error.status)))
        elif failure.is_full:
            link.refused_s = time.monotonic()
            self.moves.try_elsewhere(session, from_status(error.status))
        else:
            if failure.is_fault:
                self._fleet.failed(link)
            self.moves.retry(session, from_status(error.status))

    def on_too_large(self, link: TargetLink, session: Session, cause: str) -> None:
        """See `LinkEvents.on_too_large`."""
        _log.warning("session_too_large", **session.log_fields, target=link.address, cause=cause)
        message = f"max_message_bytes of target {link.address} is too small: {cause}"
        self._finisher.fail(session.request, FailedPrecondition(message, reason="MESSAGE_TOO_LARGE"))

    def on_closed(self, link: TargetLink, session: Session, reason: str) -> None:
        """See `LinkEvents.on_closed`."""
        self.moves.quarantine.settle(link.address)
        if reason != "finished" or session.finish is None:
            return
        self._fleet.succeeded(link)
        if link.is_up:
            self._fleet.remember(link, session)

    def on_fault(self, link: TargetLink, session: Session, error: Exception) -> None:
        """See `LinkEvents.on_fault`."""
        self._finisher.fail(session.request, internal_error(error))

    def on_progress(self, session: Session) -> None:
        """A suspect has made progress at its target."""
        side = session.target
        self.moves.quarantine.got_on(session)
        if side.faulted_by is not None and side.faulted_by is not side.host:
            self._fleet.failed(side.faulted_by)  # another target could do it
        side.faulted_by = None

    def _faulted(self, link: TargetLink, session: Session, error: pb.SessionError) -> None:
        """A target could not handle a session: one other target may try, and none after that."""
        others = (other.target for other in session.request.sessions if other is not session and other.finish is None)
        if not any(side.faulted_by is link for side in others):  # the choices of a request count once
            session.request.num_deaths += 1
        if session.request.num_deaths > 1 or session.target.faulted_by is not None:
            self._finisher.fail(session.request, _quarantined())
            return
        session.target.faulted_by = link
        self.moves.try_elsewhere(session, from_status(error.status))

    def on_desync(self, session: Session, cause: str) -> None:
        """A target's position differs from the client's: open the session again with the client's tokens."""
        _log.warning("session_desync", **session.log_fields, cause=cause)
        if (host := session.target.host) is not None:
            session.request.trace.session_failed("target", session.choice, host.address, "TARGET_DESYNC")
            self._fleet.failed(host)
        self.moves.retry(session, Unavailable(cause, reason="TARGET_DESYNC"))


def _quarantined() -> Internal:
    message = "two replicas failed on this request: it is not tried a third time"
    return Internal(message, reason="REQUEST_QUARANTINED")


def _as_asked(error: SpecdecError) -> SpecdecError:
    """Rename the field of a sampling parameter's error to the one in the client's request; say when to retry."""
    if isinstance(error, Overloaded):
        message = str(error).removeprefix("open.")
        return Overloaded(message, reason=error.reason, retry_after_s=_RETRY_OVERLOAD_S)
    if isinstance(error, InvalidRequest) and error.field.startswith("open.sampling."):
        field = error.field.removeprefix("open.")
        return InvalidRequest(field, error.description.removeprefix(f"{error.field}: "))
    return error
