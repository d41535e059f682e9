"""Errors of one session, sent in-band: they never end the stream that other sessions share. And the end of a rank."""

from __future__ import annotations

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.engine.errors import NonFiniteLogits
from specdec.grammar.source import GrammarError


class RankLost(RuntimeError):
    """A rank ended or is stopped; the others cannot go on without it. Raised wherever the engine's thread just was."""


class SessionFailure(Exception):
    """Ends one session with a typed status.

    Args:
        code: canonical gRPC code (`google.rpc.Code`).
        reason: stable, machine-readable reason, for example ``COMMIT_GAP``.
        message: for people; names the field at fault.
        field: the field at fault, if there is one.
        expected_position: the position the replica expected next.
    """

    def __init__(
        self, code: int, reason: str, message: str, *, field: str | None = None, expected_position: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.field = field
        self.expected_position = expected_position

    def to_status(self) -> status_pb2.Status:
        """As `google.rpc.Status` with an ErrorInfo and, for a field, a BadRequest."""
        details = [_pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="specdec"))]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=str(self))
            details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
        return status_pb2.Status(code=self.code, message=str(self), details=details)


def invalid(field: str, message: str, *, expected_position: int = 0) -> SessionFailure:
    """A SessionFailure for a bad field."""
    text = f"{field}: {message}"
    return SessionFailure(
        code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", text, field=field, expected_position=expected_position
    )


def non_finite_logits(error: NonFiniteLogits, *, expected_position: int = 0) -> SessionFailure:
    """A SessionFailure for a session from whose logits nothing can be drawn.

    Its parameters are legal, which was checked when it was opened, so it is the model's fault, or its numerics'.
    """
    message = f"{error}: the model, its weights or its dtype are at fault"
    return SessionFailure(code_pb2.INTERNAL, "NON_FINITE_LOGITS", message, expected_position=expected_position)


def constraint_failure(error: GrammarError, *, expected_position: int = 0) -> SessionFailure:
    """A SessionFailure for a constraint that cannot be compiled, or followed."""
    field = error.field if error.field.startswith("open.") else f"open.sampling.{error.field}"
    reason = "INVALID_FIELD" if error.code == code_pb2.INVALID_ARGUMENT else "CONSTRAINT_NOT_COMPILED"
    return SessionFailure(error.code, reason, f"{field}: {error}", field=field, expected_position=expected_position)


def stream_status(code: int, reason: str, message: str) -> status_pb2.Status:
    """A status about a whole stream."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="specdec")
    return status_pb2.Status(code=code, message=message, details=[_pack(info)])


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
