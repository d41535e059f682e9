"""The link between a test and an engine: frames in lists, and the messages of both roles."""

from __future__ import annotations

import select
from collections import deque

from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.replica.bridge.local_sockets import LocalSockets
from specdec.replica.worker.role import Wire
from specdec.v1 import draft_pb2, target_pb2

TARGET_WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse)
DRAFT_WIRE = Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse)
STREAM = 1
FIRST_CALL = 1000


class ListPort:
    """An engine port whose peer is the test."""

    def __init__(self) -> None:
        self.inbox: deque[Frame] = deque()
        self.outbox: list[Frame] = []
        self.num_pending_bytes = 0
        self.local = LocalSockets(select.poll())
        self.links: set[int] = set()
        """All streams between drafts and targets so far."""

    def poll(self, timeout_s: float | None) -> list[Frame]:
        frames = list(self.inbox)
        self.inbox.clear()
        self.links.update(frame.stream_id for frame in frames if frame.kind is FrameKind.LINK_OPENED)
        return frames

    def send(self, kind: FrameKind, stream_id: int = 0, payload: bytes = b"") -> None:
        self.outbox.append(Frame(kind, stream_id, payload))

    def pending_bytes(self, stream_id: int | None = None) -> int:
        return self.num_pending_bytes

    def flush(self, timeout_s: float) -> bool:
        return True
