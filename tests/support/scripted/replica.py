"""The common part of scripted targets and drafts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.wire.abort import abort_with
from specdec.wire.error_details import session_key
from specdec.wire.errors import SpecdecError, Unavailable

PATIENCE_S = 60.0


@dataclass
class ScriptedSession:
    """A session as a scripted replica holds it."""

    session_id: str
    epoch: int
    body: pb.OpenSession
    token_ids: list[int]
    stream: Stream | None
    credit: int = 0
    proposals: deque[pb.Proposal] = field(default_factory=deque)
    sent: list[pb.Verdict] = field(default_factory=list)
    prompt_next: int = 1
    """First position of the prompt without computed log-probabilities."""
    prompt_credit: int = 0
    parts: list[pb.PromptLogprobsPart] = field(default_factory=list)
    """Parts that the coordinator has not acknowledged."""
    is_done: bool = False
    is_sampled: bool = False


class Stream:
    """One coordinator's stream: a queue of its responses and its end."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[Any] = asyncio.Queue()
        self.owner_id = ""

    def send(self, response: Any) -> None:
        self.responses.put_nowait(response)

    def abort(self, error: SpecdecError | None = None) -> None:
        self.responses.put_nowait(error or Unavailable("the stream broke"))

    def end(self) -> None:
        self.responses.put_nowait(None)


class ScriptedReplica:
    """A server that tests start, stop and cut off, with its sessions and streams."""

    def __init__(self, served: pb.ModelIdentity) -> None:
        self.identity = served
        self.port = 0
        self.sessions: dict[str, ScriptedSession] = {}
        self.streams: list[Stream] = []
        self.opened: list[tuple[str, int, int]] = []
        """Session id, epoch and number of tokens of every opening."""
        self.closed: list[tuple[str, str]] = []
        self.frames: list[Any] = []
        self.refuse: status_pb2.Status | None = None
        self.instance_id = ""
        self.last_end: pb.EngineEnd | None = None
        """The engine's last end, for replicas that report its sessions and step sessions apart; None: an older one."""
        self.dies_of: Callable[[ScriptedSession], bool] = lambda session: False
        """Whether the engine dies when it steps a session; another instance takes its place at once."""
        self.num_deaths = 0
        self.own_draft: pb.ModelIdentity | None = None
        self.max_message_bytes = 0
        """Bytes of a message that the replica reports to accept; 0: no report, as from older replicas."""
        self.attaches: list[pb.Attach] = []
        self.num_asked = 0
        """Number of calls of GetReplicaInfo."""
        self.changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        # Coordinators ping idle replicas, and a busy machine may leave these idle for long.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        self.register(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop as a process that dies: streams break and sessions are lost."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        self.sessions.clear()
        self.streams.clear()

    def break_streams(self) -> None:
        """Break all streams as a network failure does; sessions survive."""
        self.end_streams(Unavailable("the stream broke"))

    def end_streams(self, error: SpecdecError) -> None:
        """End all streams with an error; sessions survive."""
        for stream in self.streams:
            stream.abort(error)

    def die(self, step: Iterable[ScriptedSession] = ()) -> None:
        """End the engine in a step of these sessions; another instance takes its place."""
        self.num_deaths += 1
        error = Unavailable("the engine ended", reason="ENGINE_GONE")
        if self.last_end is not None:
            keys = b"".join(session_key(session.session_id) for session in step)
            self.last_end = pb.EngineEnd(
                instance_id=self.instance_id, reason="ENGINE_GONE", is_told=True, session_keys=keys
            )
            error.attached.append(self.last_end)
        self.instance_id = f"{self.port}-{self.num_deaths}"
        self.sessions.clear()
        self.end_streams(error)

    def step_of(self, session: ScriptedSession) -> list[ScriptedSession]:
        """Sessions of a session's step, itself included."""
        return [session] if _is_apart(session) else [s for s in self.sessions.values() if not _is_apart(s)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait for a condition on what this replica has seen."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def GetReplicaInfo(self, request: Any, context: Any) -> pb.GetReplicaInfoResponse:
        self.num_asked += 1
        await self.notify()
        return pb.GetReplicaInfoResponse(
            identity=self.identity,
            instance_id=self.instance_id,
            max_message_bytes=self.max_message_bytes,
            last_end=self.last_end,
            own_draft=self.own_draft,
        )

    async def serve(self, requests: AsyncIterator[Any], context: Any, response_type: Any) -> AsyncIterator[Any]:
        stream = Stream()
        self.streams.append(stream)
        reader = asyncio.create_task(self._read(requests, stream, response_type))
        try:
            while not isinstance(response := await stream.responses.get(), SpecdecError | None):
                yield response
            if response is not None:
                await abort_with(context, response)
        finally:
            reader.cancel()
            if stream in self.streams:
                self.streams.remove(stream)
            for session in self.sessions.values():
                if session.stream is stream:
                    session.stream = None

    async def _read(self, requests: AsyncIterator[Any], stream: Stream, response_type: Any) -> None:
        async for request in requests:
            self.frames.append(request)
            if request.HasField("attach"):
                self.attach(request.attach, stream, response_type)
            for entry in request.entries:
                self.handle(entry, stream)
            await self.notify()
        stream.end()

    def attach(self, attach: pb.Attach, stream: Stream, response_type: Any) -> None:
        stream.owner_id = attach.owner_id
        self.attaches.append(attach)
        for former in self.streams:
            if former is not stream and former.owner_id == attach.owner_id:
                former.abort()
        listed = {s.session_id: s for s in attach.sessions}
        for session_id, session in list(self.sessions.items()):
            if session_id not in listed or listed[session_id].epoch != session.epoch:
                del self.sessions[session_id]
        unknown = [session_id for session_id in listed if session_id not in self.sessions]
        attached = pb.Attached(identity=self.identity, unknown_session_ids=unknown, instance_id=self.instance_id)
        stream.send(response_type(attached=attached))
        for session_id, session in self.sessions.items():
            session.stream = stream
            for part in session.parts:
                if part.start_position + len(part.positions) > listed[session_id].prompt_logprobs_position:
                    self.emit(session, prompt_logprobs=part)
            for verdict in session.sent:
                if verdict.start_position + len(verdict.token_ids) > listed[session_id].committed_length:
                    self.emit(session, verdict=verdict)

    def handle(self, entry: Any, stream: Stream) -> None:
        kind = entry.WhichOneof("entry")
        if kind == "open":
            self._open(entry, stream)
            return
        session = self.sessions.get(entry.session_id)
        if session is None or session.epoch != entry.epoch:
            return
        if kind == "close":
            del self.sessions[entry.session_id]
            self.closed.append((entry.session_id, entry.close.reason))
        else:
            self.on_entry(session, kind, getattr(entry, kind))

    def _open(self, entry: Any, stream: Stream) -> None:
        session = ScriptedSession(
            entry.session_id,
            entry.epoch,
            entry.open,
            list(entry.open.token_ids),
            stream,
            entry.open.credit_position,
            prompt_next=max(1, entry.open.prompt_logprobs_start),
            prompt_credit=entry.open.prompt_logprobs_credit,
        )
        self.opened.append((entry.session_id, entry.epoch, len(session.token_ids)))
        if self.refuse is not None:
            self.emit(session, error=pb.SessionError(status=self.refuse))
            return
        self.sessions[entry.session_id] = session
        self.emit(session, opened=pb.SessionOpened(position=len(session.token_ids)))
        self.on_open(session)

    def fail_session(self, session_id: str, status: status_pb2.Status) -> None:
        self.emit(self.sessions.pop(session_id), error=pb.SessionError(status=status))

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        raise NotImplementedError

    def on_open(self, session: ScriptedSession) -> None:
        raise NotImplementedError

    def on_entry(self, session: ScriptedSession, kind: str, body: Any) -> None:
        raise NotImplementedError


def _is_apart(session: ScriptedSession) -> bool:
    return len(session.token_ids) < session.body.apart_until
