"""Errors of one session, sent in-band so that the shared stream goes on, and errors that end an engine."""

from __future__ import annotations

import structlog
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.constraints.limits.faults import GrammarError
from specdec.engine.errors import KVInvariantError, NonFiniteLogits, is_out_of_memory

_DEVICE_WORDS = ("CUDA", "cuBLAS", "CUBLAS", "cuDNN", "NCCL", "out of memory")
_NO_MEMORY = (
    "the replica's device has too little free memory for the session: ask for a shorter prompt or no prompt_logprobs, "
    "or lower max_batch_tokens or kv_cache_memory_bytes of the replica"
)
_log = structlog.get_logger("specdec.replica.worker")


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
        """A `google.rpc.Status` with an ErrorInfo and, for a field, a BadRequest."""
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
    """A SessionFailure for a session whose logits allow no sampling.

    Its parameters were checked when it was opened, so the model or its numerics are at fault.
    """
    message = f"{error}: the model, its weights or its dtype are at fault"
    return SessionFailure(code_pb2.INTERNAL, "NON_FINITE_LOGITS", message, expected_position=expected_position)


def constraint_failure(error: GrammarError, *, expected_position: int = 0) -> SessionFailure:
    """A SessionFailure for a constraint that cannot be compiled or followed."""
    field = error.field if error.field.startswith("open.") else f"open.sampling.{error.field}"
    text = f"{field}: {error}"
    return SessionFailure(error.code, error.reason, text, field=field, expected_position=expected_position)


def stream_status(code: int, reason: str, message: str) -> status_pb2.Status:
    """A status of a whole stream."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="specdec")
    return status_pb2.Status(code=code, message=message, details=[_pack(info)])


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def is_engines_own(error: Exception) -> bool:
    """Whether an error means that the engine cannot go on, for any session."""
    if isinstance(error, KVInvariantError | MemoryError | OSError):
        return True
    if is_out_of_memory(error):
        return False
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _DEVICE_WORDS)


class FaultLog:
    """Turns errors into failures of sessions; a traceback is logged once per raising line."""

    def __init__(self) -> None:
        self._seen: set[tuple[type, str, int]] = set()

    def failure(self, error: Exception) -> SessionFailure:
        """The failure for the session's owner: a SessionFailure itself, or one made of a GrammarError or a fault.

        Raises the error itself if it is the engine's own.
        """
        if isinstance(error, SessionFailure):
            return error
        if isinstance(error, GrammarError):
            return constraint_failure(error)
        self.note(error)
        if is_out_of_memory(error):
            return SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "OUT_OF_DEVICE_MEMORY", _NO_MEMORY)
        message = f"the session met a fault of the replica: {type(error).__name__}"
        return SessionFailure(code_pb2.INTERNAL, "SESSION_FAULT", message)

    def note(self, error: Exception) -> None:
        """Log an error that ends no session. Raises the error itself if it is the engine's own."""
        if is_engines_own(error):
            raise error
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (
            (type(error), "", 0) if trace is None else (type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        )
        is_new = place not in self._seen
        self._seen.add(place)
        _log.error("fault", error=repr(error), place=f"{place[1]}:{place[2]}", exc_info=error if is_new else None)
