"""Calls that an engine answers by itself, one request and one answer each, beside the streams of its sessions."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import Message
from google.rpc import status_pb2

from specdec.replica.bridge.frames import EnginePort, FrameKind


class CallHandler(Protocol):
    """Whoever answers, by `EngineAnswers.answer` or `refuse`, at once or later."""

    def call(self, call_id: int, request: bytes) -> None:
        """Somebody asks. What it raises is how that is refused."""

    def call_ended(self, call_id: int) -> None:
        """Whoever asked is answered, or has gone."""


class EngineAnswers:
    """Answers of one engine. They leave with the loop's next flush, after the load that shows what they changed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, FrameKind, bytes]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def answer(self, call_id: int, response: Message) -> None:
        """What was asked for is done."""
        self._waiting.append((call_id, FrameKind.MESSAGE, response.SerializeToString()))

    def refuse(self, call_id: int, status: status_pb2.Status) -> None:
        """It is not, and why."""
        self._waiting.append((call_id, FrameKind.STREAM_ABORT, status.SerializeToString()))

    def send(self, port: EnginePort) -> None:
        """Send the answers that wait."""
        waiting, self._waiting = self._waiting, []
        for call_id, kind, payload in waiting:
            port.send(kind, call_id, payload)
