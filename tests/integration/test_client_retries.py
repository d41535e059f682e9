"""What a client's gRPC tries again by itself, and what not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.client import Client
from specdec.commands.up.cluster import free_port
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.abort import write_to
from specdec.wire.errors import Cancelled, NoTarget
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, request, running
from tests.support.services.faults import another, eventually, scrape

pytestmark = pytest.mark.integration

WAIT_S = 2.0


async def test_a_call_for_which_the_coordinator_waited_in_vain_ends_after_that_one_wait(tmp_path: Path) -> None:
    target = ScriptedTarget()
    await target.start()
    metrics_port = free_port()
    settings = {"targets": [target.address], "target_timeout_s": WAIT_S, "metrics_port": metrics_port}
    context = another("coordinator", tmp_path, **settings)
    cluster = await asyncio.to_thread(context.__enter__)  # in a thread: the target, which it waits for, is served here
    try:
        await target.stop()
        async with Client(cluster.address) as client:

            async def is_down() -> bool:
                return [replica.state for replica in (await client.status()).replicas] == ["down"]

            await eventually(is_down, "the coordinator knows that its target is gone")
            started_s = time.monotonic()
            with pytest.raises(NoTarget) as caught:
                await client.complete(request())
            waited_s = time.monotonic() - started_s
        samples = await asyncio.to_thread(scrape, metrics_port)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    assert caught.value.reason == "NO_TARGET"
    assert waited_s >= WAIT_S * 0.9
    assert samples["specdec_coordinator_requests_total{outcome=UNAVAILABLE}"] == 1


async def test_a_call_whose_connection_breaks_before_its_first_chunk_is_tried_again() -> None:
    target = ScriptedTarget()
    async with (
        running([target]) as harness,
        first_connection_breaks(harness.address) as (address, broken),
        Client(address) as client,
    ):
        completion = await client.complete(request())
        assert broken.is_set()
    assert completion.choices[0].token_ids == expected_ids(target, 20)


async def test_calls_that_a_server_stops_without_looking_at_are_tried_again_elsewhere() -> None:
    target = ScriptedTarget()
    with StoppingServer() as leaving:
        async with running([target]) as harness, Client(f"ipv4:{leaving.address},{harness.address}") as client:
            await until_both_answer(client)
            leaving.stop()
            completions = await asyncio.gather(*(client.complete(request()) for _ in range(8)))
            assert await asyncio.to_thread(leaving.has_stopped.wait, 30.0)
    assert [completion.choices[0].token_ids for completion in completions] == [expected_ids(target, 20)] * 8
    assert leaving.num_seen < 4, "the server looks at one of the calls that came while it was busy"


async def test_a_request_that_a_coordinator_ends_on_purpose_is_not_tried_again() -> None:
    target = ScriptedTarget()
    target.refuse = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="held elsewhere")
    target.refuse.details.add().Pack(error_details_pb2.ErrorInfo(reason="SESSION_TAKEN_OVER", domain="specdec"))
    async with running([target]) as harness, Client(harness.address) as client:
        await harness.all_ready()
        with pytest.raises(Cancelled) as caught:
            await client.complete(request())
        assert caught.value.reason == "TAKEN_OVER"
        assert harness.metric("requests_total", outcome="CANCELLED") == 1


async def test_a_client_that_goes_while_it_is_written_to_has_cancelled_its_call() -> None:
    ends: list[BaseException] = []

    async def answer(_: bytes, context: Any) -> None:
        try:
            while True:
                await write_to(context, b"more than the client has room for" * 10_000)
        except BaseException as error:
            ends.append(error)
            raise

    handlers = {"Answer": grpc.unary_stream_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def read_one_and_go() -> None:
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.unary_stream("/test/Answer")(b"")
            next(call)
            time.sleep(0.2)
            call.cancel()

    await asyncio.to_thread(read_one_and_go)

    async def has_ended() -> bool:
        return bool(ends)

    await eventually(has_ended, "the call ends")
    await server.stop(None)
    assert isinstance(ends[0], Cancelled)


class StoppingServer(grpc.GenericRpcHandler):
    """Answers GetStatus, in a thread of its own. It is told to stop while it is busy and calls wait for it."""

    def __init__(self) -> None:
        self.address = ""
        self.num_seen = 0
        self.has_stopped = threading.Event()
        self._is_serving = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._server: Any = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], daemon=True).start()
        assert self._is_serving.wait(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.has_stopped.wait(30.0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Refuses to generate, as a server that drains does."""

        async def refuse(_: bytes, context: Any) -> None:
            self.num_seen += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

        async def status(_: bytes, context: Any) -> bytes:
            return api.GetStatusResponse(owner_id="leaving").SerializeToString()

        is_generate = "Generate" in (handler_call_details.method or "")
        return grpc.unary_unary_rpc_method_handler(refuse if is_generate else status)

    def stop(self) -> None:
        """It is busy for a moment, in which calls come; then it stops."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)

    async def _stop(self) -> None:
        time.sleep(0.5)  # noqa: ASYNC251 -- the loop is to stand still
        await self._server.stop(1.0)

    async def _serve(self) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._is_serving.set()
        await self._server.wait_for_termination()
        self.has_stopped.set()


async def until_both_answer(client: Client) -> None:
    owners: set[str] = set()

    async def are_two() -> bool:
        owners.add((await client.status()).owner_id)
        return len(owners) == 2

    await eventually(are_two, "both servers answer")


@asynccontextmanager
async def first_connection_breaks(upstream: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield an address in front of another one; the first connection there is cut off when a request has come."""
    broken = asyncio.Event()
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, breaks: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if breaks and b"Generate" in data:
                    broken.set()
                    break
                writer.write(data)
        writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = upstream.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        breaks = not broken.is_set()
        relays.add(asyncio.create_task(relay(up_reader, writer, False)))
        await relay(reader, up_writer, breaks)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", broken
    finally:
        server.close()
        for task in relays:
            task.cancel()
