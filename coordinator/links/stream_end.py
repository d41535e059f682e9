"""How a stream to a replica ended."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import STATUS_KEY, rich_status, session_key, split_keys
from specdec.wire.errors import SpecdecError, Unavailable, from_rpc_error

_Result = TypeVar("_Result")
CONNECTION_LOST = "CONNECTION_LOST"
"""Reason of a connection that ended without a status: the peer's process or the network failed."""
_ENGINE_DEATHS = frozenset({"ENGINE_GONE", "ENGINE_STALLED"})
"""Reasons of a servicer whose engine crashed, or stalled in a step."""
_ENGINE_LOST = "ENGINE_LOST"
"""Reason of a servicer whose engine was killed from outside, or was frozen."""
NOT_HANDED_ON = "CAUSE_NOT_HANDED_ON"
"""Reason of a stream whose status gRPC has lost: the peer can be asked."""
_MOST_KEYS_BYTES = 64 * 2**10
"""Bytes of session keys, at most; longer lists are taken for garbage."""
_SILENCE = ("ping", "keepalive")
"""Words in gRPC's message when it gave up a silent peer: frozen or cut off, but not dead."""
# grpc.aio's message when it has lost the peer's status.
_NO_STATUS = "Internal error from Core"


class Ending(Enum):
    """How a stream ended."""

    ANNOUNCED = auto()
    """The replica announced its shutdown."""
    BROKEN = auto()
    """The stream failed, and nothing shows that the replica has died."""
    LOST = auto()
    """The replica was killed or frozen from outside, or its connection ended: hardly a request's fault."""
    DIED = auto()
    """The replica's engine crashed or stalled: a request may have caused it."""


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The end of a stream, and the sessions that may have caused it."""

    ending: Ending
    session_keys: Set[bytes] | None = None
    """Sessions, of all coordinators, in the engine's last step; None: not reported."""

    def may_be(self, session_id: str) -> bool:
        """Whether the engine's last step may have contained an open session."""
        return self.session_keys is None or session_key(session_id) in self.session_keys


def end_of(error: Exception, *, was_draining: bool) -> EndOfStream:
    """The end that a stream's error describes. `was_draining`: the replica had announced its shutdown."""
    reason = error.reason if isinstance(error, SpecdecError) else ""
    if was_draining or reason == "DRAINING":
        return EndOfStream(Ending.ANNOUNCED)
    if reason not in _ENGINE_DEATHS and reason not in (CONNECTION_LOST, _ENGINE_LOST):
        return EndOfStream(Ending.BROKEN)
    attached = error.attached if isinstance(error, SpecdecError) else ()
    told = next((end for end in attached if isinstance(end, pb.EngineEnd) and end.is_told), None)
    keys = None
    if told is not None and len(told.session_keys) <= _MOST_KEYS_BYTES:
        keys = split_keys(told.session_keys)
    return EndOfStream(Ending.DIED if reason in _ENGINE_DEATHS else Ending.LOST, keys)


def engine_end_in(trailing: Iterable[Any] | None) -> pb.EngineEnd | None:
    """The EngineEnd in a status's details, if any."""
    status = rich_status(trailing)
    for detail in () if status is None else status.details:
        end = pb.EngineEnd()
        try:
            if detail.Unpack(end):
                return end
        except DecodeError:
            return None
    return None


def error_of(end: pb.EngineEnd) -> SpecdecError:
    """The error of a stream whose engine ended so."""
    error = Unavailable("the engine ended", reason=end.reason or None)
    error.attached.append(end)
    return error


class StreamEnd:
    """Notes the status with which a stream ends, as the peer sent it.

    A write that is under way when the peer ends the stream fails, and grpc.aio then replaces the status by INTERNAL
    (https://github.com/grpc/grpc/issues/36066), so the call's later status cannot be trusted. The first status is the
    peer's, and only the call's done callback is sure to see it.
    """

    def __init__(self, call: Any) -> None:
        """Watch a new call of grpc.aio."""
        self._error: SpecdecError | None = None
        call.add_done_callback(self._note)

    def error(self, otherwise: Exception) -> Exception:
        """The stream's error; `otherwise` if it ended with OK, or has not ended."""
        return self._error or otherwise

    def _note(self, call: Any) -> None:
        code, details, trailing = _now(call.code()), _now(call.details()), _now(call.trailing_metadata())
        if self._error is not None or code is grpc.StatusCode.OK:
            return
        if code is grpc.StatusCode.INTERNAL and details == _NO_STATUS:
            self._error = Unavailable("the stream broke while it was written to", reason=NOT_HANDED_ON)
        else:
            self._error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))
            if (end := engine_end_in(trailing)) is not None:
                self._error.attached.append(end)
            is_told = any(key == STATUS_KEY for key, _ in trailing or ())
            is_silence = any(word in (details or "").lower() for word in _SILENCE)
            if code is grpc.StatusCode.UNAVAILABLE and not is_told and not is_silence:
                self._error.reason = CONNECTION_LOST


def describe(error: Exception) -> str:
    """Why a stream ended or could not be opened, for people."""
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error).message
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that does not wait, as those of a finished call."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise RuntimeError("a finished call has no status")
