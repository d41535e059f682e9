"""Links over real gRPC: a draft's dialer, and a target's relay, with engines that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings
from specdec.replica.bridge.frame_codec import FIRST_DIALLED, FrameKind
from specdec.replica.bridge.link_dialer import LinkDialer
from specdec.replica.bridge.stream_relay import StreamRelay
from specdec.telemetry import RelayMetrics
from specdec.wire.errors import NotReady
from tests.support.services.faults import eventually

pytestmark = pytest.mark.integration
STREAM = FIRST_DIALLED


class PlayedEngine:
    """An engine process as its servicer sees it."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sink: Any = None
        self.came: asyncio.Queue[tuple[str, bytes | str]] = asyncio.Queue()

    def open_stream(self, sink: Any, peer: str, kind: FrameKind) -> int:
        self.sink = sink
        self.came.put_nowait(("opened", kind.name))
        return 1

    def adopt(self, stream_id: int, sink: Any) -> None:
        assert stream_id == STREAM
        self.sink = sink

    def close_stream(self, stream_id: int, reason: str = "") -> None:
        self.came.put_nowait(("closed", reason))

    def tell_taken(self, stream_id: int, num_bytes: int) -> None: ...

    async def send_message(self, stream_id: int, payload: bytes) -> None:
        self.came.put_nowait(("message", payload))

    async def next(self) -> tuple[str, bytes | str]:
        async with asyncio.timeout(20):
            return await self.came.get()


class Linked:
    """A target's server, and a draft that may call it."""

    def __init__(self, server: grpc.aio.Server, relay: StreamRelay, target: PlayedEngine, port: int) -> None:
        self.server, self.relay, self.target = server, relay, target
        self.address = f"127.0.0.1:{port}"
        self.draft = PlayedEngine()
        metrics = RelayMetrics(CollectorRegistry(), "draft")
        self.dialer = LinkDialer(DraftSettings(model="m", link_targets=(self.address,)), metrics)

    def dial(self, address: str | None = None) -> None:
        self.dialer.dial(self.draft, STREAM, address or self.address)  # type: ignore[arg-type]


@pytest.fixture
async def linked() -> AsyncIterator[Linked]:
    target: Any = PlayedEngine()
    metrics = RelayMetrics(CollectorRegistry(), "target")
    relay = StreamRelay(lambda: target, metrics, 1 << 20, is_link=True)
    server = grpc.aio.server()
    handlers = {"Link": grpc.stream_stream_rpc_method_handler(relay.handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdec.v1.TargetService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = Linked(server, relay, target, port)
    yield made
    await made.dialer.close()
    await server.stop(0)


async def test_frames_pass_unopened_both_ways_until_one_engine_ends_the_stream(linked: Linked) -> None:
    linked.dial()
    assert await linked.target.next() == ("opened", "LINK_OPENED")
    linked.draft.sink.on_message(b"\xff no protobuf")
    assert await linked.target.next() == ("message", b"\xff no protobuf")
    linked.target.sink.on_message(b"back")
    assert await linked.draft.next() == ("message", b"back")
    linked.relay.end_streams(NotReady("the target is shutting down", reason="DRAINING"))
    assert await linked.draft.next() == ("closed", "the target is shutting down")
    assert await linked.target.next() == ("closed", "")


async def test_a_link_that_has_ended_leaves_no_connection(linked: Linked) -> None:
    port = int(linked.address.rpartition(":")[2])

    def num_connections() -> int:
        found = psutil.Process().net_connections(kind="tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in found)

    async def is_unconnected() -> bool:
        return not num_connections()

    for _ in range(3):
        linked.dial()
        assert await linked.target.next() == ("opened", "LINK_OPENED")
        assert num_connections() == 1
        linked.relay.end_streams(NotReady("the target is shutting down", reason="DRAINING"))
        assert await linked.draft.next() == ("closed", "the target is shutting down")
        assert await linked.target.next() == ("closed", "")
        await eventually(is_unconnected, "no connection is left")


async def test_what_an_engine_sends_right_behind_its_dialling_arrives(linked: Linked) -> None:
    linked.dial()
    linked.draft.sink.on_message(b"hello")
    linked.draft.sink.on_message(b"join")
    assert [await linked.target.next() for _ in range(3)] == [
        ("opened", "LINK_OPENED"),
        ("message", b"hello"),
        ("message", b"join"),
    ]


async def test_an_address_that_the_settings_do_not_name_is_never_called(linked: Linked) -> None:
    host, _, port = linked.address.partition(":")
    assert host == "127.0.0.1"
    for other in ("127.0.0.1:1", f"localhost:{port}", f"dns:///{linked.address}", "unix:/run/x", ""):
        linked.dial(other)
        if other:
            kind, reason = await linked.draft.next()
            assert kind == "closed"
            assert "link_targets" in str(reason)
            assert other in str(reason)
    assert linked.target.sink is None


async def test_a_target_that_cannot_be_reached_is_told_with_the_cause(linked: Linked) -> None:
    await linked.server.stop(0)
    linked.dial()
    kind, reason = await linked.draft.next()
    assert kind == "closed"
    assert reason
