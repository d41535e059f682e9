"""The errors of specdec's services, each with one gRPC code and typed details.

SpecdecError                    domain "specdec", a stable reason
├── InvalidRequest              INVALID_ARGUMENT     BadRequest: names the field
├── Unauthenticated             UNAUTHENTICATED
├── PermissionDenied            PERMISSION_DENIED
├── NotFound                    NOT_FOUND
│   └── ModelNotFound
├── RequestExists               ALREADY_EXISTS
├── Overloaded                  RESOURCE_EXHAUSTED   RetryInfo
├── FailedPrecondition          FAILED_PRECONDITION
│   └── IncompatibleReplica
├── Unavailable                 UNAVAILABLE          RetryInfo
│   ├── NotReady
│   └── NoTarget                                     gRPC's own retries are called off
├── Cancelled                   CANCELLED
├── DeadlineExceeded            DEADLINE_EXCEEDED
├── DataLoss                    DATA_LOSS
├── Unimplemented               UNIMPLEMENTED
└── Internal                    INTERNAL             carries an error id; the cause is in the log only

Every error converts to a google.rpc.Status (`to_status`) and back (`from_status`, `from_rpc_error`) and keeps
its class, reason, field and retry delay.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import grpc
import structlog
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from specdec.wire.error_details import MAX_FIELD_BYTES, cut, details_of, retry_delay, retry_seconds, rich_status

DOMAIN = "specdec"
CUT_OFF = "CUT_OFF"
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of an InvalidRequest: prompt and output do not fit the model's context."""
_MAX_STATUS_BYTES = 4096
"""gRPC carries a status in HTTP/2 metadata, of which peers take 8 KiB in all: the message there, and again with the
details. A client that is sent more sees RESOURCE_EXHAUSTED in place of the status."""
_TOO_LARGE = re.compile(r"(CLIENT|SERVER): Received message larger than max \((\d+) vs\. (\d+)\)")
"""What gRPC says of a message above its receiver's limit: who received it, its bytes, and the limit in bytes."""
_log = structlog.get_logger(__name__)


class SpecdecError(Exception):
    """An error for the caller: a message for people, a code and a stable reason for programs."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.attached: list[Message] = []
        """More typed details for the caller, of any type."""

    def details(self) -> Iterator[Message]:
        """The typed details beside ErrorInfo."""
        return iter(())


class InvalidRequest(SpecdecError):
    """A field of the request has a value that is not allowed; `field` is its path, as in sampling.top_p."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"

    def __init__(
        self,
        field: str,
        description: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field}: {description}", reason=reason, metadata=metadata)
        self.field = field
        self.description = description

    def details(self) -> Iterator[Message]:
        """BadRequest with the one violation."""
        request = error_details_pb2.BadRequest()
        request.field_violations.add(field=cut(self.field, MAX_FIELD_BYTES), description=cut(self.description))
        yield request


class Unauthenticated(SpecdecError):
    """The caller sent no key, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(SpecdecError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class NotFound(SpecdecError):
    """The object that the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    default_reason = "MODEL_NOT_FOUND"


class RequestExists(SpecdecError):
    """A request with this id is running."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "REQUEST_EXISTS"


class _Retryable(SpecdecError):
    """An error with the time after which the caller may try again."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s

    def details(self) -> Iterator[Message]:
        """RetryInfo with the delay."""
        yield error_details_pb2.RetryInfo(retry_delay=retry_delay(self.retry_after_s))


class Overloaded(_Retryable):
    """All places are taken, those of the queue included."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class Unavailable(_Retryable):
    """The service, or another one that it needs, cannot answer now; nothing was done."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"
    has_waited: ClassVar[bool] = False
    """Whether the service has already waited for the missing replica: the client's gRPC must then not retry."""


class NotReady(Unavailable):
    """The service is starting (its model is loading) or draining."""

    default_reason = "NOT_READY"


class NoTarget(Unavailable):
    """No target became ready while the service waited for one."""

    default_reason = "NO_TARGET"
    has_waited = True


class FailedPrecondition(SpecdecError):
    """The request does not fit the state of the service; trying again unchanged does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class IncompatibleReplica(FailedPrecondition):
    """Models or tokenizers of two replicas do not go together."""

    default_reason = "INCOMPATIBLE_REPLICA"


class Cancelled(SpecdecError):
    """The caller, or an Abort, ended the request."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class DeadlineExceeded(SpecdecError):
    """The request's deadline has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class DataLoss(SpecdecError):
    """The client's tokens and the journalled ones contradict each other."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class Unimplemented(SpecdecError):
    """This deployment does not offer the method or the feature."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Internal(SpecdecError):
    """A fault of the service. The caller gets an id, the log gets the cause under the same id."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _subclasses(base: type[SpecdecError]) -> Iterator[type[SpecdecError]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def to_status(error: BaseException) -> status_pb2.Status:
    """The google.rpc.Status of an error; all but a SpecdecError become INTERNAL and are logged.

    It fits into a call's metadata: long texts are cut, and details for which there is no room are left out.
    """
    known = error if isinstance(error, SpecdecError) else internal_error(error)
    status = status_pb2.Status(code=known.code.value[0], message=cut(known.message))
    info = error_details_pb2.ErrorInfo(reason=known.reason, domain=DOMAIN, metadata=known.metadata)
    for detail in (info, *known.details(), *known.attached):
        if status.ByteSize() + detail.ByteSize() <= _MAX_STATUS_BYTES:
            status.details.add().Pack(detail)
    return status


def internal_error(cause: BaseException) -> Internal:
    """Log the cause with its traceback, and return an error with an id, which is all that the caller learns."""
    error_id = uuid.uuid4().hex[:12]
    _log.error("internal_error", error_id=error_id, exc_info=cause)
    return Internal(f"internal error {error_id}", metadata={"error_id": error_id})


def from_status(status: status_pb2.Status) -> SpecdecError:
    """The error that a status stands for: the class its reason names, else the one its code names.

    Statuses of other makers (gRPC itself, proxies) become the class of their code, or Internal where there is none.
    Details that do not parse count as missing.
    """
    info, violations, retry = details_of(status)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason = info.reason if info.domain == DOMAIN else ""
    metadata = dict(info.metadata)
    cls = _class_of(code, reason)
    message = status.message or code.name
    common: dict[str, Any] = {"reason": reason or None, "metadata": metadata}
    if issubclass(cls, InvalidRequest):
        if not violations.field_violations:
            return InvalidRequest("request", message, **common)
        violation = violations.field_violations[0]
        # Replicas put the field before the description.
        description = violation.description.removeprefix(f"{violation.field}: ")
        return InvalidRequest(violation.field, description, **common)
    if issubclass(cls, _Retryable):
        retry_after_s = retry_seconds(retry.retry_delay) if retry.HasField("retry_delay") else 1.0
        return cls(message, retry_after_s=retry_after_s, **common)
    return cls(message, **common)


def _class_of(code: grpc.StatusCode, reason: str) -> type[SpecdecError]:
    if code is SpecdecError.code:
        return Internal
    of_code = [cls for cls in _subclasses(SpecdecError) if cls.code is code]
    for cls in of_code:
        if cls.default_reason == reason:
            return cls
    return of_code[0] if of_code else Internal


def from_rpc_error(error: grpc.RpcError, *, is_own_end: bool = True) -> SpecdecError:
    """The error behind a failed call: from its typed details where it has them, else from its code.

    `is_own_end`: the caller may have cancelled the call itself. Otherwise CANCELLED without details means that the call
    was cut off on the way, for example by a server that stops before it reads the call: Unavailable. So does INTERNAL.
    """
    status = rich_status(error.trailing_metadata())
    if status is None:
        if (too_large := _too_large(error)) is not None:
            return too_large
        # Services send INTERNAL with details; without them a proxy whose upstream died, or gRPC, has ended the call.
        is_of_the_way = error.code() is grpc.StatusCode.INTERNAL
        if is_of_the_way or (error.code() is grpc.StatusCode.CANCELLED and not is_own_end):
            return Unavailable(f"the call was cut off: {error.details()}", reason=CUT_OFF)
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return from_status(status)


def _too_large(error: grpc.RpcError) -> InvalidRequest | None:
    """The error behind a message that gRPC refused for its size, with the code of an overload; None: it was another."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    if (told := _TOO_LARGE.search(error.details() or "")) is None:
        return None
    receiver, num_bytes, most = told.groups()
    if receiver == "CLIENT":
        return InvalidRequest(
            "max_message_bytes", f"an answer of {num_bytes} bytes exceeds the client's limit of {most}"
        )
    return InvalidRequest("request", f"{num_bytes} bytes exceed the server's limit of {most} (max_message_bytes)")
