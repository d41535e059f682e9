"""How a stream to a replica ended."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from specdec.rpc.errors import SpecdecError, Unavailable, from_rpc_error

_Result = TypeVar("_Result")
# What grpc.aio says where it has no status of the peer's.
_NO_STATUS = "Internal error from Core"


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
            self._error = Unavailable("the stream broke while it was written to")
        else:
            self._error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


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
