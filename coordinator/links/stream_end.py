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
"""The reason where the connection ended before the peer said anything: its process is gone, or somebody between."""
_ENGINE_DEATHS = frozenset({"ENGINE_GONE", "ENGINE_STALLED"})
"""What a servicer says whose engine ended by itself, or did not end a step."""
_ENGINE_LOST = "ENGINE_LOST"
"""What a servicer says whose engine was killed from outside, or was frozen."""
NOT_HANDED_ON = "CAUSE_NOT_HANDED_ON"
"""The reason where the peer has said why, and gRPC has lost it: the peer can be asked."""
_MOST_KEYS_BYTES = 64 * 2**10
"""No engine works on so many sessions at once."""
_SILENCE = ("ping", "keepalive")
"""What gRPC's message names when it gave a peer up that did not answer: frozen or cut off, but not dead."""
# What grpc.aio says where it has no status of the peer's.
_NO_STATUS = "Internal error from Core"


class Ending(Enum):
    """What the end of a stream tells of the replica."""

    ANNOUNCED = auto()
    """It shut down in order."""
    BROKEN = auto()
    """Something failed, and nothing says that the replica has died."""
    LOST = auto()
    """It was killed or frozen from outside, or its connection ended: hardly the doing of a request."""
    DIED = auto()
    """Its engine died by itself, or did not end a step: a request may have done it."""


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """What the end of a stream tells."""

    ending: Ending
    session_keys: Set[bytes] | None = None
    """Those that the replica's engine was working on when it ended, of all coordinators; None: it does not say."""

    def may_be(self, session_id: str) -> bool:
        """Whether the engine may have been working on a session that was open there."""
        return self.session_keys is None or session_key(session_id) in self.session_keys


def end_of(error: Exception, *, was_draining: bool) -> EndOfStream:
    """What a stream's error tells of the replica, which may have told before that it shuts down."""
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
    """How an engine ended, where a status tells it."""
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
    """What a stream would have ended with when the engine did."""
    error = Unavailable("the engine ended", reason=end.reason or None)
    error.attached.append(end)
    return error


class StreamEnd:
    """Notes the status with which a stream ends, as the peer sent it.

    A write that is under way when the peer ends the stream fails, and for that grpc.aio replaces the status by INTERNAL
    (https://github.com/grpc/grpc/issues/36066), so that what a call says afterwards is not to be trusted. The first
    status is the peer's, and only in the call's done callback is it sure to be there still.
    """

    def __init__(self, call: Any) -> None:
        """Watch a call of grpc.aio, which has just been made."""
        self._error: SpecdecError | None = None
        call.add_done_callback(self._note)

    def error(self, otherwise: Exception) -> Exception:
        """What the stream ended with; `otherwise` if it ended well, or has not ended."""
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
    """For people: why a stream ended, or did not come about."""
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error).message
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """What a coroutine returns that has nothing to wait for, as those that ask a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise RuntimeError("a call that is done has no status")
