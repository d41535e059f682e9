"""What a run may not leave behind: a traceback, an error in the log, a status that says nothing."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "specdec"
STATUS_KEY = "grpc-status-details-bin"
NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Whatever is sent, it is no fault of ours."""


class Fault(AssertionError):
    """Something was answered, or done, as it should not be."""


def require(holds: bool, what: str) -> None:
    """Raise Fault unless it holds."""
    if not holds:
        raise Fault(what)


def check_status(code: grpc.StatusCode, trailing: Sequence[tuple[str, Any]], allowed: frozenset[str]) -> str:
    """Return the reason of an error that a service of ours answered. Raises Fault unless it is a typed one.

    `allowed` are reasons that are INTERNAL and yet right.
    """
    encoded = [value for key, value in trailing or () if key == STATUS_KEY]
    require(len(encoded) == 1, f"{code.name} without details")
    status = status_pb2.Status()
    try:
        status.ParseFromString(encoded[0])
    except DecodeError:
        raise Fault(f"{code.name}: the details do not parse") from None
    require(status.code == code.value[0], f"{code.name}, but its details say {status.code}")
    reason = check_typed(status)
    require(code not in NEVER or reason in allowed, f"{code.name} ({reason}): {status.message}")
    return reason


def check_typed(status: status_pb2.Status) -> str:
    """Return the reason of a status. Raises Fault unless it has one, and INVALID_ARGUMENT a field."""
    infos = [info for detail in status.details if detail.Unpack(info := error_details_pb2.ErrorInfo())]
    require(len(infos) == 1 and infos[0].domain == DOMAIN and infos[0].reason != "", f"no reason: {status}")
    if status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
        bad = [request for detail in status.details if detail.Unpack(request := error_details_pb2.BadRequest())]
        names_one = len(bad) == 1 and len(bad[0].field_violations) == 1 and bad[0].field_violations[0].field != ""
        require(names_one or infos[0].reason == "MALFORMED_MESSAGE", f"names no field: {status}")
    return infos[0].reason


@dataclass
class Complaints:
    """What was logged, or raised where nobody hears it, that should not have been."""

    lines: list[str] = field(default_factory=list)

    def take(self) -> list[str]:
        """All since last taken."""
        lines, self.lines = self.lines, []
        return lines

    def check(self) -> None:
        """Raises Fault if there are any."""
        if lines := self.take():
            raise Fault("; ".join(lines[:5]))


@contextmanager
def listening(*, expected: frozenset[str] = frozenset()) -> Iterator[Complaints]:
    """Collect what this process complains of: errors, tracebacks, exceptions that nobody took.

    `expected` are events of our log that are right here.
    """
    complaints = Complaints()
    handler = _Handler(complaints)
    former_hook, former_structlog = sys.unraisablehook, structlog.get_config()
    former_thread_hook = threading.excepthook

    def process(_: Any, method: str, event: Any) -> Any:
        is_bad = method in ("error", "critical", "exception") or (event.get("exc_info") and method != "debug")
        if is_bad and event.get("event") not in expected:
            complaints.lines.append(f"{method}: {event}")
        raise structlog.DropEvent

    structlog.configure(processors=[process], wrapper_class=structlog.make_filtering_bound_logger(0))
    sys.unraisablehook = lambda unraisable: complaints.lines.append(f"unraisable: {unraisable.exc_value!r}")
    threading.excepthook = lambda ended: complaints.lines.append(f"a thread ended: {ended.exc_value!r}")
    logging.getLogger().addHandler(handler)
    try:
        yield complaints
    finally:
        logging.getLogger().removeHandler(handler)
        sys.unraisablehook, threading.excepthook = former_hook, former_thread_hook
        structlog.configure(**former_structlog)


class _Handler(logging.Handler):
    """Takes what libraries log, asyncio and gRPC above all."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            cause = record.exc_info[1] if record.exc_info else None
            self._complaints.lines.append(f"{record.name}: {record.getMessage()} {cause!r}")


async def within(seconds: float, awaitable: Any, what: str) -> Any:
    """The result. Raises Fault when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise Fault(f"not within {seconds:g} s: {what}") from None
