"""Unary calls that an engine answers, beside its sessions' streams."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import Message
from google.rpc import status_pb2

from specdec.replica.bridge.frames import EnginePort, FrameKind


class CallHandler(Protocol):
    """Answers calls by `EngineAnswers.answer` or `refuse`, at once or later."""

    def call(self, call_id: int, request: bytes) -> None:
        """A call came; an exception refuses it."""

    def call_ended(self, call_id: int) -> None:
        """The call was answered, or its caller left."""


class EngineAnswers:
    """Answers of one engine.

    They are sent with the loop's next flush, after the load report that shows their effect.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, FrameKind, bytes]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def answer(self, call_id: int, response: Message) -> None:
        """Queue the answer to a call."""
        self._waiting.append((call_id, FrameKind.MESSAGE, response.SerializeToString()))

    def refuse(self, call_id: int, status: status_pb2.Status) -> None:
        """Queue the refusal of a call."""
        self._waiting.append((call_id, FrameKind.STREAM_ABORT, status.SerializeToString()))

    def send(self, port: EnginePort) -> None:
        """Send the queued answers."""
        waiting, self._waiting = self._waiting, []
        for call_id, kind, payload in waiting:
            port.send(kind, call_id, payload)
