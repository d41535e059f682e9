"""Stands in for the process of an engine: the production worker is turned by the virtual clock.

Everything behind the socket is the product: worker, sessions, role, engine. A turn is a callback of a process of its
own, so that an engine can be killed, frozen and slowed apart from its servicer.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from google.rpc import status_pb2
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings, TargetSettings
from specdec.drafting.role.drafter import ModelDrafter
from specdec.drafting.role.metrics import DraftRecorder
from specdec.replica.bridge.engine_process import StreamSink
from specdec.replica.bridge.engine_watch import END_REASONS, EndCause
from specdec.replica.bridge.frame_codec import NO_STREAM, Frame, FrameKind
from specdec.replica.bridge.local_sockets import LocalSockets
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.role import Wire
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.verifier import Verifier
from specdec.telemetry import DraftMetrics, TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.protocol.simulation import model
from tests.protocol.simulation.virtual_loop import Process, VirtualLoop, current_process

_LOAD_S = 0.05
_SESSION_TTL_S = 5.0
"""Seconds; a tenth of what replicas keep to, so that simulated minutes see sessions freed."""
_FORWARD_S = 2e-5
"""For clocks that are read before and after a forward pass."""
_LEAST_WAIT_S = 1e-4
_WIRES = {
    "target": Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse),
    "draft": Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse, joins_links=True),
}


@cache
def _metrics(role: str) -> Any:
    """Nobody looks at them: all replicas count into the same ones."""
    make: Any = {"target": TargetMetrics, "draft": DraftMetrics}[role]
    return make(CollectorRegistry())


@cache
def _pulse() -> Pulse:
    return Pulse()


class TurnPort:
    """An engine's port, for one turn at a time: `poll` never waits, but notes for how long it would have."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.pulse = _pulse()
        self.inbox: deque[Frame] = deque()
        self.outbox: list[Frame] = []
        self.local = LocalSockets(select.poll())
        self.links: set[int] = set()
        """All streams between drafts and targets so far."""
        self.waits_s: float | None = None
        """None: the turn ran a step, and the next one is due."""

    def poll(self, timeout_s: float | None) -> list[Frame]:
        """What has come; nothing the second time in a turn, which would wait."""
        if timeout_s != 0:
            self.waits_s = timeout_s
            return []
        frames = list(self.inbox)
        self.inbox.clear()
        self.links.update(frame.stream_id for frame in frames if frame.kind is FrameKind.LINK_OPENED)
        return frames

    def send(self, kind: FrameKind, stream_id: int = NO_STREAM, payload: bytes = b"") -> None:
        """To the servicer, after the turn."""
        self.outbox.append(Frame(kind, stream_id, payload))

    def pending_bytes(self, stream_id: int | None = None) -> int:
        """The servicer always reads."""
        return 0

    def flush(self, timeout_s: float) -> bool:
        """Nothing is kept."""
        return True


class EngineCore:
    """A worker over a tiny engine, which turns when it is told to."""

    def __init__(
        self,
        role: str,
        settings: TargetSettings | DraftSettings,
        instance_id: str,
        loop: VirtualLoop,
        session_ttl_s: float,
    ) -> None:
        self.port = TurnPort(instance_id)
        self.built = model.build(role, instance_id, lambda: loop.skip(_FORWARD_S))
        port: Any = self.port
        self.host: SessionHost[Any] = SessionHost(port, _WIRES[role], self.built.info.identity, session_ttl_s)
        make: Any = {"target": Verifier, "draft": ModelDrafter}[role]
        recorder: Any = {"target": TargetRecorder, "draft": DraftRecorder}[role]
        self.role = make(self.host, self.built, settings, recorder(_metrics(role)))
        self.worker: EngineWorker[Any] = EngineWorker(
            port, _WIRES[role], self.built.info, self.host, self.role, pulse=self.port.pulse, clock=loop.time
        )

    def turn(self) -> list[Frame]:
        """One turn; returns what it sent."""
        self.port.waits_s = None
        self.worker._turn()
        sent, self.port.outbox = self.port.outbox, []
        return sent


class SimulatedEngine:
    """One life of an engine, as its servicer sees it."""

    def __init__(
        self,
        role: str,
        settings: Any,
        loop: VirtualLoop,
        instance_id: str,
        step_s: Callable[[], float],
        session_ttl_s: float = _SESSION_TTL_S,
        on_dial: Callable[[Any, int, str], None] | None = None,
    ) -> None:
        servicer = current_process()
        assert servicer is not None
        self.instance_id = instance_id
        self.exit_reason = ""
        self.end_cause = EndCause.EXITED
        self.how_ended: pb.EngineEnd | None = None
        self.info: pb.GetReplicaInfoResponse | None = None
        self.tokenizer_config = "{}"
        self.pid: int | None = None
        self.process = Process(loop, f"{servicer.name}/engine")
        self.core: EngineCore | None = None
        self.spy: Callable[[SimulatedEngine, list[Frame], list[Frame]], None] = lambda engine, taken, sent: None
        """Told of each turn: what it took, and what it sent."""
        self._on_dial = on_dial
        self._role = role
        self._settings = settings
        self._session_ttl_s = session_ttl_s
        self._loop = loop
        self._step_s = step_s
        self._servicer = servicer
        self._sinks: dict[int, StreamSink] = {}
        self._next_stream_id = NO_STREAM + 1
        self._wake: asyncio.Future[None] | None = None
        self._has_ended = asyncio.Event()
        self._has_drained = asyncio.Event()
        self._is_ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """It serves."""
        return self.info is not None and not self.exit_reason

    def tokenizer_json(self) -> bytes:
        """Of the tiny models."""
        return model.tokenizer_json()

    def start(self) -> None:
        """Load, then turn."""
        self.process.start(self._run(), "engine")

    async def wait_ready(self) -> pb.GetReplicaInfoResponse:
        """As EngineProcess."""
        await self._is_ready.wait()
        if self.info is None:
            raise RuntimeError(self.exit_reason)
        return self.info

    async def wait_ended(self) -> str:
        """As EngineProcess."""
        await self._has_ended.wait()
        return self.exit_reason

    wait_exited = wait_ended

    async def drain(self, timeout_s: float) -> bool:
        """As EngineProcess."""
        self._put(FrameKind.DRAIN, NO_STREAM, b"")
        try:
            await asyncio.wait_for(self._has_drained.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        """As EngineProcess."""
        self.end(EndCause.KILLED, "stopped")

    def open_stream(self, sink: StreamSink, peer: str, kind: FrameKind = FrameKind.STREAM_OPENED) -> int:
        """As EngineProcess."""
        stream_id = self._next_stream_id
        self._next_stream_id += 1
        self._sinks[stream_id] = sink
        self._put(kind, stream_id, peer.encode())
        return stream_id

    def adopt(self, stream_id: int, sink: StreamSink) -> None:
        """As EngineProcess."""
        self._sinks[stream_id] = sink

    def close_stream(self, stream_id: int, reason: str = "") -> None:
        """As EngineProcess."""
        if self._sinks.pop(stream_id, None) is not None:
            self._put(FrameKind.STREAM_CLOSED, stream_id, reason.encode())

    async def send_message(self, stream_id: int, payload: bytes) -> None:
        """As EngineProcess."""
        self._put(FrameKind.MESSAGE, stream_id, payload)

    def end(self, cause: EndCause, reason: str) -> None:
        """The engine is gone; its servicer learns it at once."""
        if self.exit_reason:
            return
        self.process.kill()
        self.exit_reason, self.end_cause = reason, cause
        keys = b"" if self.core is None else self.core.host.steps.read_keys()
        end = self.how_ended = pb.EngineEnd(
            instance_id=self.instance_id, reason=END_REASONS[cause], is_told=keys is not None, session_keys=keys or b""
        )
        for event in (self._has_ended, self._has_drained, self._is_ready):
            event.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_engine_gone(end, reason)

    def _put(self, kind: FrameKind, stream_id: int, payload: bytes) -> None:
        if self.core is not None and not self.exit_reason:
            self.core.port.inbox.append(Frame(kind, stream_id, payload))
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    async def _run(self) -> None:
        try:
            await self._loop_forever()
        except Exception as error:
            self._loop.call_exception_handler({"message": f"{self.process} ended", "exception": error})
            self._servicer.call(self.end, EndCause.EXITED, repr(error))

    def load(self) -> EngineCore:
        """Be ready."""
        core = self.core = EngineCore(self._role, self._settings, self.instance_id, self._loop, self._session_ttl_s)
        self.info = core.built.info
        self.info.load.CopyFrom(core.role.load())
        self._servicer.call(self._is_ready.set)
        return core

    def turn(self) -> None:
        """One turn of the loop, and what it sent."""
        assert self.core is not None
        taken = list(self.core.port.inbox)
        sent = self.core.turn()
        self.spy(self, taken, sent)
        for frame in sent:
            self._servicer.call(self._on_frame, frame)

    async def _loop_forever(self) -> None:
        await asyncio.sleep(_LOAD_S)
        core = self.load()
        while True:
            self.turn()
            if core.port.waits_s is None:
                await asyncio.sleep(self._step_s())
            elif not core.port.inbox:
                await self._wait(max(_LEAST_WAIT_S, core.port.waits_s))

    async def _wait(self, timeout_s: float) -> None:
        self._wake = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, _resolve, self._wake)
        try:
            await self._wake
        finally:
            timer.cancel()
            self._wake = None

    def _on_frame(self, frame: Frame) -> None:
        sink = self._sinks.get(frame.stream_id)
        if frame.kind is FrameKind.LOAD and self.info is not None:
            self.info.load.ParseFromString(frame.payload)
        elif frame.kind is FrameKind.LINK_DIAL and self._on_dial is not None:
            self._on_dial(self, frame.stream_id, frame.payload.decode())
        elif frame.kind is FrameKind.DRAINED:
            self._has_drained.set()
        elif sink is not None and frame.kind is FrameKind.MESSAGE:
            sink.on_message(frame.payload)
        elif sink is not None and frame.kind is FrameKind.STREAM_ABORT:
            sink.on_abort(status_pb2.Status.FromString(frame.payload))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
