"""A replica's sessions, shared by its role and its loop: the table, results for owners, ends of sessions."""

from __future__ import annotations

from typing import Any, Generic, Protocol

import structlog

from specdec.replica.bridge.engine_answers import EngineAnswers
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.replica.bridge.step_memory import StepMemory
from specdec.replica.worker.errors import FaultLog, SessionFailure
from specdec.replica.worker.pending_responses import PendingResponses, ResponseLimits
from specdec.replica.worker.role import Wire
from specdec.replica.worker.sessions import EngineSession, EngineSessionTable, Owner, SessionT
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import most_entry_bytes

_MAX_PIECE_BYTES = 256 * 1024
"""Bytes of a piece of a large result: results of other sessions must not wait long behind it."""


class DirectWay(Protocol):
    """Takes results that need not go to the owner; see `specdec.replica.worker.links`."""

    def takes(self, session: Any, body: dict[str, Any]) -> bool:
        """Look at a result before it goes to the owner; True: it went another way."""

    def ended(self, session: Any) -> None:
        """The session is removed."""


class SessionHost(Generic[SessionT]):
    """The role's interface to its owners: it emits results here, and reports the sessions that it has closed.

    The host does not know the role: `EngineWorker`, or the role itself, closes a session at the role first, then calls
    `ended` or `failed`.
    """

    def __init__(
        self,
        port: EnginePort,
        wire: Wire,
        identity: pb.ModelIdentity,
        session_ttl_s: float,
        limits: ResponseLimits | None = None,
        steps: StepMemory | None = None,
    ) -> None:
        """`steps`: memory in which the loop and the role note the sessions of their current work."""
        self.sessions = EngineSessionTable[SessionT](session_ttl_s)
        self.responses = PendingResponses(port, wire, limits or ResponseLimits())
        self.faults = FaultLog()
        self.answers = EngineAnswers()
        self.steps = steps or StepMemory()
        self.defer_results = False
        """Set by the role: the last step's results are sent when the next step, due at once, is launched."""
        self.gpu_busy = False
        """Set by the loop: a device computes a step, and arriving frames are for the next one."""
        self.links: DirectWay | None = None
        """The direct links of sessions; set once, by the loop."""
        self._port = port
        self._wire = wire
        self._identity = identity
        self._log = structlog.get_logger("specdec.replica.worker")

    def emit(self, session: SessionT, **body: Any) -> None:
        """Queue a result for the session's owner; dropped if its stream is broken (attaching resends)."""
        if self.links is not None and self.links.takes(session, body):
            return
        if session.owner.stream_id is not None:
            self.responses.add(session.owner.stream_id, session.session_id, session.epoch, **body)

    def piece_bytes(self, owner: Owner) -> int:
        """Bytes of a piece of a large result, so that it fits into a message to an owner with other results."""
        return min(_MAX_PIECE_BYTES, most_entry_bytes(owner.message_bytes) // 2)

    def refuse(self, stream_id: int, session_id: str, epoch: int, failure: SessionFailure) -> None:
        """Send the refusal of an opening."""
        self.responses.add(stream_id, session_id, epoch, error=_session_error(failure))

    def ended(self, session: SessionT, reason: str) -> None:
        """Remove a session that its role has closed; `reason` is for its trace."""
        self.sessions.remove(session)
        if self.links is not None:
            self.links.ended(session)
        self.tell_trace(session, reason)

    def failed(self, session: SessionT, failure: SessionFailure) -> None:
        """Remove a session that its role has closed because of an error, and send the error to its owner."""
        self._log.warning("session_failed", **session.log_fields, reason=failure.reason, error=str(failure))
        self.emit(session, error=_session_error(failure))
        if session.trace is not None:
            session.trace.attributes["error.type"] = failure.reason
        self.ended(session, "failed")

    def tell_trace(self, session: EngineSession, reason: str) -> None:
        """Send the trace of a session that ends, if it is traced, to the servicer."""
        if session.trace is None:
            return
        session.trace.attributes.update(
            {
                "gen_ai.request.model": self._identity.name,
                "specdec.session_id": session.session_id,
                "specdec.epoch": session.epoch,
                "specdec.device": self._identity.device,
                "specdec.numerics_id": self._identity.numerics_id,
                "specdec.end_reason": reason,
            }
        )
        told = session.trace.encode(self._wire.span_name, self._wire.last_phase)
        self._port.send(FrameKind.SESSION_SPAN, payload=told)


def _session_error(failure: SessionFailure) -> pb.SessionError:
    return pb.SessionError(status=failure.to_status(), expected_position=failure.expected_position)
