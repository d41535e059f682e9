"""What a replica says when it ends a session with an error, and what of it is a fault of the replica's."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from google.rpc import code_pb2

from specdec.coordinator.sessions.session import Session, SessionHost
from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import details_of

_FATAL = frozenset({code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.DEADLINE_EXCEEDED})
_NO_FAULT = frozenset({code_pb2.OUT_OF_RANGE, code_pb2.RESOURCE_EXHAUSTED, code_pb2.DEADLINE_EXCEEDED})
"""What a replica says that is full, whose context ends, or whose session was left open: no reason to eject it."""
_HELD_ELSEWHERE = frozenset({"STALE_LEASE", "SESSION_TAKEN_OVER"})
"""What a replica says whose session another coordinator holds now: asking again would not help."""
_NON_FINITE = "NON_FINITE_LOGITS"
"""What a replica says whose model gave NaN or infinity for the session's tokens: so would any other with that model."""
_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""What there is to tell of the session is more than a message between the two holds: at this replica it ends."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionFailure:
    """A session's error, taken apart."""

    code: int
    """Of google.rpc.Code."""
    reason: str
    """The error's own, or its code's name."""
    field: str
    """What of the entry was at fault; empty when the replica does not say."""

    @property
    def is_held_elsewhere(self) -> bool:
        """Another coordinator holds the session now."""
        return self.reason in _HELD_ELSEWHERE

    @property
    def is_full(self) -> bool:
        """The replica has no room for the session; another one may have."""
        return self.code == code_pb2.RESOURCE_EXHAUSTED

    @property
    def is_session_fault(self) -> bool:
        """The replica could not handle this one session, and goes on with the others."""
        return self.reason == "SESSION_FAULT"

    @property
    def is_fault(self) -> bool:
        """It counts against the replica, unlike what the session's own parameters, or the model, caused."""
        is_own_parameters = self.code == code_pb2.INVALID_ARGUMENT and self.field.startswith("open")
        is_excused = self.is_held_elsewhere or self.is_models or self.is_too_large or is_own_parameters
        return self.code not in _NO_FAULT and not is_excused

    @property
    def is_models(self) -> bool:
        """The model can do nothing with the session's tokens, at whatever replica."""
        return self.reason == _NON_FINITE

    @property
    def is_too_large(self) -> bool:
        """The replica has more to tell of the session than a message holds."""
        return self.reason == _TOO_LARGE

    @property
    def is_fatal(self) -> bool:
        """Opening the session again, here or elsewhere, would end the same way."""
        return self.code in _FATAL or self.is_models or self.is_too_large

    @property
    def may_be_proposals(self) -> bool:
        """An entry was refused that was not the opening: a proposal, if one was relayed."""
        return self.code == code_pb2.INVALID_ARGUMENT and not self.field.startswith("open")


def note_failure(host: SessionHost, session: Session, error: pb.SessionError) -> SessionFailure:
    """Take an error apart; the log and the request's trace tell of it."""
    info, request, _ = details_of(error.status)
    field = request.field_violations[0].field if request.field_violations else ""
    code = error.status.code if error.status.code in code_pb2.Code.values() else code_pb2.UNKNOWN
    reason = info.reason or code_pb2.Code.Name(code)
    session.request.trace.session_failed(host.role, session.choice, host.address, reason)
    _log.warning("session_error", role=host.role, **session.log_fields, reason=reason, error=error.status.message)
    return SessionFailure(code, reason, field)
