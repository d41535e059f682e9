"""Classify the error with which a replica ends a session, and whether it counts against the replica."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from google.rpc import code_pb2

from specdec.coordinator.sessions.session import Session, SessionHost
from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import details_of

_FATAL = frozenset({code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.DEADLINE_EXCEEDED})
_NO_FAULT = frozenset({code_pb2.OUT_OF_RANGE, code_pb2.RESOURCE_EXHAUSTED, code_pb2.DEADLINE_EXCEEDED})
"""Codes of a full replica, a full context or a session left open: no reason to eject the replica."""
_HELD_ELSEWHERE = frozenset({"STALE_LEASE", "SESSION_TAKEN_OVER"})
"""Reasons of a session that another coordinator holds now: opening it again would not help."""
_NON_FINITE = "NON_FINITE_LOGITS"
"""Reason of a model that computed NaN or infinity: every replica of that model would."""
_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""Reason of a session whose data exceed the message limit between coordinator and replica."""
_TOO_COSTLY = "CONSTRAINT_OVERLOAD"
"""Reason of a session whose constraint costs too much beside others': elsewhere it would cost as much again."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionFault:
    """A session's error, parsed."""

    code: int
    """A google.rpc.Code."""
    reason: str
    """The error's reason, or its code's name."""
    field: str
    """The entry's faulty field; empty if the replica names none."""

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
        """It counts against the replica: neither the session's parameters nor the model caused it."""
        is_own_parameters = self.code == code_pb2.INVALID_ARGUMENT and self.field.startswith("open")
        is_excused = self.is_held_elsewhere or self.is_models or self.is_too_large or is_own_parameters
        return self.code not in _NO_FAULT and not is_excused

    @property
    def is_models(self) -> bool:
        """The model cannot compute the session's tokens, at any replica."""
        return self.reason == _NON_FINITE

    @property
    def is_too_large(self) -> bool:
        """The session's data exceed the message limit."""
        return self.reason == _TOO_LARGE

    @property
    def is_fatal(self) -> bool:
        """Opening the session again, here or elsewhere, would end the same way."""
        return self.code in _FATAL or self.is_models or self.is_too_large or self.reason == _TOO_COSTLY

    @property
    def may_be_proposals(self) -> bool:
        """The replica refused another entry than the opening: a proposal, if one was relayed."""
        return self.code == code_pb2.INVALID_ARGUMENT and not self.field.startswith("open")


def note_failure(host: SessionHost, session: Session, error: pb.SessionError) -> SessionFault:
    """Parse an error; it is logged and added to the request's trace."""
    info, request, _ = details_of(error.status)
    field = request.field_violations[0].field if request.field_violations else ""
    code = error.status.code if error.status.code in code_pb2.Code.values() else code_pb2.UNKNOWN
    reason = info.reason or code_pb2.Code.Name(code)
    session.request.trace.session_failed(host.role, session.choice, host.address, reason)
    _log.warning("session_error", role=host.role, **session.log_fields, reason=reason, error=error.status.message)
    return SessionFault(code, reason, field)
