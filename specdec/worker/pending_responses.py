"""What waits for coordinators: everything decided for one of them leaves in one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from specdec.rpc.bridge.frames import EnginePort, FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.worker.errors import stream_status
from specdec.worker.role import Wire


class PendingResponses:
    """Results, and answers to an attach, by stream."""

    def __init__(self, port: EnginePort, wire: Wire) -> None:
        self._port = port
        self._wire = wire
        self._results: dict[int, list[Any]] = defaultdict(list)
        self._attached: dict[int, pb.Attached] = {}

    def add(self, stream_id: int, session_id: str, epoch: int, **body: Any) -> None:
        """Queue a result; `body` is the one field of its oneof."""
        self._results[stream_id].append(self._wire.result(session_id=session_id, epoch=epoch, **body))

    def attached(self, stream_id: int, answer: pb.Attached) -> None:
        """Queue the answer to an attach; it leads the stream's next message."""
        self._attached[stream_id] = answer

    @property
    def streams(self) -> set[int]:
        """Those for which something waits."""
        return set(self._results) | set(self._attached)

    @property
    def has_attached(self) -> bool:
        """Whether an attach waits for its answer, which comes with a report of the load."""
        return bool(self._attached)

    def drop(self, stream_id: int) -> None:
        """Forget what waits for a stream that has ended."""
        self._results.pop(stream_id, None)
        self._attached.pop(stream_id, None)

    def abort(self, stream_id: int, code: int, reason: str, message: str) -> None:
        """End a stream with a status; what waits for it is dropped."""
        self.drop(stream_id)
        self._port.send(FrameKind.STREAM_ABORT, stream_id, stream_status(code, reason, message).SerializeToString())

    def flush(
        self, streams: Iterable[int], load: pb.LoadReport | None, load_on_attach: pb.LoadReport | None = None
    ) -> None:
        """Send each of the streams what waits for it.

        `load` goes along if there is a report of it; a stream that has just attached gets `load_on_attach`.
        """
        for stream_id in streams:
            response = self._wire.response(results=self._results.pop(stream_id, ()))
            told = load
            if (attached := self._attached.pop(stream_id, None)) is not None:
                response.attached.CopyFrom(attached)
                told = load_on_attach
            if told is not None:
                response.load.CopyFrom(told)
            self._port.send(FrameKind.MESSAGE, stream_id, response.SerializeToString())
