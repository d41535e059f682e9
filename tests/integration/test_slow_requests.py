"""Clients that take their time: headers, bodies and handshakes by the byte, and thousands of connections.

While they are there, good requests are answered within a bound; when they are gone, nothing of them is left.
"""

from __future__ import annotations

import asyncio
import resource
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from specdec.commands.up.cluster import free_port
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.discovery import ReplicaAddress
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, expected_ids, request, running
from tests.support.services.faults import another, eventually
from tests.support.services.gateways import gateway
from tests.support.services.key_files import hash_key
from tests.support.services.raw_http2 import DATA, HEADERS, PREFACE, SETTINGS, RawConnection, frame, grpc_message

GENERATE = "/specdec.v1.CoordinatorService/Generate"
DEADLINE_EXCEEDED, UNAUTHENTICATED = 4, 16
READ_S = 0.5
MOST_WAIT_S = 10.0
"""For a good request meanwhile, on a machine that is busy with something else."""
MOST_MORE_DESCRIPTORS = 16
MOST_MORE_RSS_BYTES = 96 * 2**20
"""What allocators keep of what the connections took."""
WAVE = 2000


async def test_a_body_that_comes_by_the_byte_is_ended_with_a_type_while_others_are_served() -> None:
    target = ScriptedTarget()
    async with (
        running([target], request_read_s=READ_S, max_held_prompt_bytes=2**29) as harness,
        AsyncExitStack() as stack,
    ):
        slow = [await stack.enter_async_context(RawConnection(harness.address)) for _ in range(20)]
        for connection in slow:
            for _ in range(5):
                connection.send(frame(DATA, 0, connection.begin(GENERATE), grpc_message(bytes(1000))[:6]))
        result = await collect(harness.stub.Generate(request(), timeout=MOST_WAIT_S))
        assert result.ids() == expected_ids(target, 20)
        for connection in slow:
            async with asyncio.timeout(MOST_WAIT_S):
                assert await connection.status(1) == DEADLINE_EXCEEDED


async def test_calls_that_are_reset_as_soon_as_they_have_begun_cut_nobody_elses_off() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness, RawConnection(harness.address) as hasty:
        for _ in range(5000):
            hasty.cancel(hasty.begin(GENERATE))
        result = await collect(harness.stub.Generate(request(), timeout=MOST_WAIT_S))
        assert result.ids() == expected_ids(target, 20)


async def test_who_has_no_key_is_refused_before_its_request_has_come(tmp_path: Path) -> None:
    target = ScriptedTarget()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys:\n  - id: one\n    sha256: {hash_key('the-key-of-the-tenant')}\n    tenant: tenant\n")
    async with (
        running([target], api_keys_file=keys, request_read_s=600.0) as harness,
        RawConnection(harness.address) as slow,
    ):
        stream_id = slow.begin(GENERATE)
        async with asyncio.timeout(MOST_WAIT_S):
            assert await slow.status(stream_id) == UNAUTHENTICATED


class Victim:
    """A coordinator process that is besieged, and what it held before."""

    def __init__(self, pid: int, address: str, metrics_port: int, target: ScriptedTarget) -> None:
        self._process = psutil.Process(pid)
        self._target = target
        self.address = address
        self.metrics_port = metrics_port

    async def serve(self) -> float:
        """A good request over a new connection and a scrape are answered; how long they took. Raises if not."""
        began_s = time.monotonic()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with asyncio.timeout(MOST_WAIT_S), grpc.aio.insecure_channel(self.address, options=options) as channel:
            stub = api_grpc.CoordinatorServiceStub(channel)
            result = await collect(stub.Generate(request(), wait_for_ready=True))
            assert result.ids() == expected_ids(self._target, 20)
            page = await asyncio.to_thread(self._scrape)
        assert b"specdec_coordinator_requests_total" in page
        return time.monotonic() - began_s

    async def settle(self) -> None:
        """Note what it holds when nobody is there."""
        for _ in range(3):
            await self.serve()
        self._num_descriptors = self._process.num_fds()
        self._rss_bytes = self._process.memory_info().rss

    async def check_all_gone(self) -> None:
        """What it held is what it holds."""

        async def is_so() -> bool:
            return self._process.num_fds() <= self._num_descriptors + MOST_MORE_DESCRIPTORS

        await eventually(is_so, "the connections are gone")
        await self.serve()
        assert self._process.memory_info().rss <= self._rss_bytes + MOST_MORE_RSS_BYTES

    def _scrape(self) -> bytes:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=MOST_WAIT_S) as page:
            return bytes(page.read())


@asynccontextmanager
async def besieged(folder: Path) -> AsyncIterator[Victim]:
    """A coordinator process over a scripted target in this one."""
    target, metrics_port = ScriptedTarget(), free_port()
    await target.start()
    settings = {"targets": [target.address], "metrics_port": metrics_port, "request_read_s": 1.0}
    with ExitStack() as stack:
        cluster = await asyncio.to_thread(stack.enter_context, another("coordinator", folder, **settings))
        service = cluster.services["coordinator"]
        victim = Victim(service.pid, service.spec.address, metrics_port, target)
        await victim.settle()
        try:
            yield victim
        finally:
            await asyncio.to_thread(stack.close)
            await target.stop()


async def dribble(port: int, beginning: bytes, until: asyncio.Event) -> None:
    """A connection that says the beginning, then a byte now and then, for as long as it may."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(beginning)
        while not until.is_set() and not reader.at_eof():
            writer.write(b"a")
            await asyncio.wait([asyncio.create_task(until.wait())], timeout=0.2)
    except ConnectionError:
        pass  # it has had enough of it
    finally:
        writer.transport.abort()


def half_header(num_bytes: int = 5000) -> bytes:
    """The first frames of a connection, and a call's headers of which nothing follows."""
    return PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, bytes(num_bytes))[:9]


@pytest.mark.timeout(600)
async def test_dribbled_headers_and_silent_connections_on_both_ports_cost_others_nothing(tmp_path: Path) -> None:
    async with besieged(tmp_path) as victim:
        grpc_port = int(victim.address.rpartition(":")[2])
        enough = asyncio.Event()
        beginnings = [(grpc_port, half_header()), (grpc_port, PREFACE[:7]), (grpc_port, b""), (grpc_port, b"\x16\x03")]
        http = b"GET /metrics HTTP/1.1\r\nX: "
        beginnings += [(victim.metrics_port, http), (victim.metrics_port, b"")]
        slow = [asyncio.create_task(dribble(*beginning, enough)) for beginning in beginnings for _ in range(30)]
        silent = [await asyncio.open_connection("127.0.0.1", port) for port in (grpc_port, victim.metrics_port) * 50]
        for _ in range(5):
            await victim.serve()
        enough.set()
        await asyncio.gather(*slow)
        for _, writer in silent:
            writer.transport.abort()
        await victim.check_all_gone()


@pytest.mark.parametrize("num_connects", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
async def test_thousands_of_connects_cost_others_nothing(tmp_path: Path, num_connects: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wave = min(WAVE, limit // 4, num_connects)
    waits_s = []
    async with besieged(tmp_path) as victim:
        for port in (int(victim.address.rpartition(":")[2]), victim.metrics_port):
            for _ in range(num_connects // wave):
                tried = [asyncio.open_connection("127.0.0.1", port) for _ in range(wave)]
                made = await asyncio.gather(*tried, return_exceptions=True)
                waits_s.append(await victim.serve())
                for connection in made:
                    if not isinstance(connection, BaseException):  # the metrics port keeps few
                        connection[1].transport.abort()
        await victim.check_all_gone()
    assert max(waits_s) < MOST_WAIT_S


async def test_a_gateways_reader_that_reads_nothing_gets_little_ahead_and_holds_up_nobody() -> None:
    target = ScriptedTarget()
    target.step_s = 0.0
    async with running([target], credit_window_tokens=16) as harness, gateway(harness.address) as one:
        connection = one._connect(ReplicaAddress(harness.address))  # all HTTP clients share it
        async with connection:
            unread = connection.generate(request(max_tokens=3000, logprobs=20, request_id="unread"))
            await anext(unread)
            completion = await connection.complete(request(max_tokens=1000, logprobs=1))
            assert len(completion.choices[0].token_ids) == 1000
            [session] = target.sessions.values()  # the other one has ended
            assert 16 < len(session.token_ids) < 300
            await unread.aclose()  # type: ignore[attr-defined]
