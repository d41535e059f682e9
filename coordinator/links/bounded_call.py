"""The stream of a draft, with bounded parsing time: a hostile draft must not hold up other sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.v1 import draft_pb2
from specdec.wire.errors import Unavailable
from specdec.wire.parsing.parts import MOST_PARTS, TooManyParts, check_parts

_METHOD = f"/{draft_pb2.DESCRIPTOR.services_by_name['DraftService'].full_name}/Draft"


class BoundedCall:
    """See `Call`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Begin the streaming call."""
        self._call: Any = channel.stream_stream(_METHOD)()

    async def write(self, request: draft_pb2.DraftRequest) -> None:
        """See `Call.write`."""
        await self._call.write(request.SerializeToString())

    async def read(self) -> object:
        """See `Call.read`. Raises Unavailable if the frame is malformed or has too many parts."""
        data = await self._call.read()
        if data is grpc.aio.EOF:
            return data
        try:
            check_parts(draft_pb2.DraftResponse.DESCRIPTOR, data, MOST_PARTS)
            return draft_pb2.DraftResponse.FromString(data)
        except (TooManyParts, DecodeError) as error:
            raise Unavailable(f"the draft sent a malformed frame: {error}", reason="MALFORMED_MESSAGE") from None

    async def done_writing(self) -> None:
        """See `Call.done_writing`."""
        await self._call.done_writing()

    def cancel(self) -> bool:
        """See `Call.cancel`."""
        return self._call.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See `Call.add_done_callback`."""
        self._call.add_done_callback(callback)
