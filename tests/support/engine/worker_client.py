"""A coordinator's side of one engine worker, frame by frame."""

from __future__ import annotations

from typing import Any

from google.rpc import error_details_pb2, status_pb2

from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.role import Role
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2, trace_pb2
from tests.support.engine.list_port import DRAFT_WIRE, TARGET_WIRE, ListPort
from tests.support.engine.local_pair import LocalPair


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class WorkerClient:
    """Sends frames to a worker and sorts its frames."""

    def __init__(self, pair: LocalPair, role: str) -> None:
        pair.reset()
        self.pair = pair
        self.worker: EngineWorker[Any] = getattr(pair, role)
        self.host: SessionHost[Any] = getattr(pair, f"{role}_host")
        self.role: Role[Any] = pair.verifier if role == "target" else pair.drafter
        self.port: ListPort = getattr(pair, f"{role}_port")
        self.engine = getattr(pair, f"{role}_built").engine
        self.wire = TARGET_WIRE if role == "target" else DRAFT_WIRE
        self._entry = target_pb2.TargetEntry if role == "target" else draft_pb2.DraftEntry
        self.clock = Clock()
        self.worker._clock = self.worker.owners._clock = self.clock
        self.results: list[Any] = []
        self.attached: list[pb.Attached] = []
        self.loads: dict[int, pb.LoadReport] = {}
        self.aborts: dict[int, status_pb2.Status] = {}
        self.kinds: list[FrameKind] = []
        self.message_bytes: list[int] = []
        """Size of each received message."""
        self.spans: list[trace_pb2.SessionSpan] = []
        self.port.inbox.clear()
        self.port.outbox.clear()

    def frame(self, kind: FrameKind, stream_id: int = 1, payload: bytes = b"") -> None:
        self.port.inbox.append(Frame(kind, stream_id, payload))

    def send(self, stream_id: int = 1, **fields: Any) -> None:
        self.frame(FrameKind.MESSAGE, stream_id, self.wire.request(**fields).SerializeToString())

    def attach(
        self,
        stream_id: int = 1,
        owner: str = "a",
        lease: int = 0,
        held: dict[str, tuple[int, int]] | None = None,
        *,
        prompt_position: int = 0,
        max_message_bytes: int = 0,
    ) -> None:
        """Attach with sessions `held`, as id -> (epoch, committed length), and one `prompt_position` for all."""
        sessions = [
            pb.AttachedSession(
                session_id=s, epoch=epoch, committed_length=length, prompt_logprobs_position=prompt_position
            )
            for s, (epoch, length) in (held or {}).items()
        ]
        attach = pb.Attach(
            owner_id=owner, lease_generation=lease, sessions=sessions, max_message_bytes=max_message_bytes
        )
        self.send(stream_id, attach=attach)

    def entry(self, session_id: str, epoch: int = 1, *, stream_id: int = 1, **body: Any) -> None:
        self.send(stream_id, entries=[self._entry(session_id=session_id, epoch=epoch, **body)])

    def turn(self, times: int = 1) -> None:
        """Let the worker poll, step and send, and sort its frames."""
        for _ in range(times):
            self.worker._turn()
        for frame in self.port.outbox:
            self.kinds.append(frame.kind)
            if frame.kind is FrameKind.STREAM_ABORT:
                self.aborts[frame.stream_id] = status_pb2.Status.FromString(frame.payload)
            elif frame.kind is FrameKind.SESSION_SPAN:
                self.spans.append(trace_pb2.SessionSpan.FromString(frame.payload))
            elif frame.kind is FrameKind.MESSAGE and frame.stream_id not in self.port.links:
                response = self.wire.response.FromString(frame.payload)
                if response.HasField("attached"):
                    self.attached.append(response.attached)
                self.results += response.results
                self.message_bytes.append(len(frame.payload))
                if response.HasField("load"):
                    self.loads[frame.stream_id] = response.load
        self.port.outbox.clear()

    def take(self, kind: str, session_id: str = "s") -> list[Any]:
        """Remove and return a session's results of one kind."""
        found = [r for r in self.results if r.WhichOneof("result") == kind and r.session_id == session_id]
        self.results = [r for r in self.results if not any(r is each for each in found)]
        return [getattr(result, kind) for result in found]

    def session(self, session_id: str = "s") -> Any:
        return self.host.sessions.get(session_id)

    def end_all(self) -> None:
        """End all sessions, as the worker does."""
        for session in list(self.host.sessions):
            self.worker.owners.end(session, "closed")

    def check_nothing_held(self) -> None:
        assert len(self.host.sessions) == 0
        assert len(self.engine.scheduler) == 0
        assert self.engine.stats().blocks_used == 0


def reason_of(status: status_pb2.Status) -> str:
    """Reason of a status's ErrorInfo."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            assert info.domain == "specdec"
            return info.reason
    raise AssertionError("no ErrorInfo")


def fields_of(status: status_pb2.Status) -> list[str]:
    """Fields of a status's violations."""
    for detail in status.details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            return [violation.field for violation in request.field_violations]
    return []
