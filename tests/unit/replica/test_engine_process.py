"""The engine process: starting, watching, stopping it, and dying with it, for real."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.rpc import status_pb2

from specdec.replica.bridge.engine_process import EngineProcess
from specdec.replica.bridge.frame_codec import FIRST_DIALLED
from specdec.v1 import common_pb2
from tests.support.services.echo_process import echo_process, gone, ready_echo, stop_process, verify_stream
from tests.support.services.echo_service import TOKENIZER_BYTES, EchoSettings

PATIENCE_S = 60.0


class Sink:
    """Collects what the engine sends to one stream."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes | status_pb2.Status | str] = asyncio.Queue()

    def on_message(self, payload: bytes) -> None:
        self.received.put_nowait(payload)

    def on_abort(self, status: status_pb2.Status) -> None:
        self.received.put_nowait(status)

    def on_engine_gone(self, end: common_pb2.EngineEnd, reason: str) -> None:
        self.received.put_nowait(reason)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.received.get(), PATIENCE_S)


@asynccontextmanager
async def engine(load: str = "ready", **settings: Any) -> AsyncIterator[EngineProcess]:
    echo_settings = EchoSettings.model_validate({"load": load, **settings})
    process = EngineProcess("tests.support.services.echo_service:run_engine", echo_settings, service="test-engine")
    process.start()
    try:
        yield process
    finally:
        await process.stop(5.0)


async def test_settings_with_secrets_reach_the_engine_without_them() -> None:
    secrets = {"redis_url": "redis://:pw@127.0.0.1:1/0", "redis_username": "u", "otlp_headers": "x-key=k"}
    async with engine(otlp_endpoint="http://127.0.0.1:1", **secrets) as process:
        assert (await process.wait_ready()).identity.name == "echo"


async def test_engine_tells_what_it_serves_and_echoes() -> None:
    async with engine() as process:
        info = await process.wait_ready()
        assert info.identity.name == "echo"
        assert len(process.tokenizer_json()) == TOKENIZER_BYTES
        assert process.tokenizer_config == '{"a": 1}'
        sink, other = Sink(), Sink()
        stream_id = process.open_stream(sink, "peer")
        other_id = process.open_stream(other, "peer")

        await process.send_message(other_id, b"hello")
        await process.send_message(stream_id, bytes(3_000_000))

        assert await other.next() == b"hello"
        assert await sink.next() == bytes(3_000_000)


async def test_frames_of_a_closed_stream_are_dropped_and_the_engine_knows() -> None:
    async with engine() as process:
        await process.wait_ready()
        sink, observer = Sink(), Sink()
        stream_id = process.open_stream(sink, "peer")
        observer_id = process.open_stream(observer, "peer")
        await process.send_message(stream_id, b"never read")
        process.close_stream(stream_id)
        process.close_stream(stream_id)

        await process.send_message(observer_id, b"events")

        assert await observer.next() == b"opened 1\nopened 2\nclosed 1"
        assert sink.received.empty()


async def test_a_dialled_stream_is_closed_at_once_where_nobody_dials() -> None:
    async with engine() as process:
        await process.wait_ready()
        sink = Sink()
        stream_id = process.open_stream(sink, "peer")
        await process.send_message(stream_id, b"dial")
        assert await sink.next() == b"dialled"
        await process.send_message(stream_id, b"events")
        assert await sink.next() == f"opened 1\nclosed {FIRST_DIALLED}".encode()


async def test_load_report_updates_the_replica_info() -> None:
    async with engine() as process:
        info = await process.wait_ready()
        sink = Sink()
        await process.send_message(process.open_stream(sink, "peer"), b"load")
        assert await sink.next() == b"load"
        assert info.load.num_running == 7


async def test_sender_waits_while_the_engine_does_not_read() -> None:
    async with engine() as process:
        await process.wait_ready()
        sink = Sink()
        stream_id = process.open_stream(sink, "peer")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)

        async def send_all() -> None:
            for _ in range(20):
                await process.send_message(stream_id, bytes(1024 * 1024))

        sending = asyncio.create_task(send_all())
        done, _ = await asyncio.wait({sending}, timeout=0.3)
        assert not done
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.wait_for(sending, PATIENCE_S)
        for _ in range(20):
            assert await sink.next() == bytes(1024 * 1024)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ("refuse", "ModelNotSupported: no attention"),
        ("raise", "ValueError: bad weights"),
        ("import", r"this needs torch: pip install 'specdec\[engine\]'"),
        ("crash", "the engine process exited with code 5"),
    ],
)
async def test_engine_that_cannot_load_says_why(load: str, reason: str) -> None:
    async with engine(load) as process:
        with pytest.raises(RuntimeError, match=reason):
            await process.wait_ready()
        assert not process.is_ready


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (b"crash", "the engine process exited with code 3"),
        (b"kill", "the engine process was killed by SIGKILL"),
    ],
)
async def test_death_of_the_engine_reaches_every_stream(command: bytes, reason: str) -> None:
    async with engine() as process:
        await process.wait_ready()
        sinks = [Sink(), Sink()]
        ids = [process.open_stream(sink, "peer") for sink in sinks]
        await process.send_message(ids[0], command)

        assert [await sink.next() for sink in sinks] == [reason, reason]
        assert await process.wait_exited() == reason
        assert not process.is_ready
        await process.send_message(ids[1], b"dropped")


async def test_drain_waits_for_the_last_session() -> None:
    async with engine(drained_at_once=False) as process:
        await process.wait_ready()
        sink = Sink()
        stream_id = process.open_stream(sink, "peer")
        assert not await process.drain(0.05)
        draining = asyncio.create_task(process.drain(PATIENCE_S))
        await process.send_message(stream_id, b"drained")
        assert await draining


async def test_engine_that_does_not_stop_is_killed() -> None:
    async with engine() as process:
        await process.wait_ready()
        assert process.pid is not None
        stop_process(process.pid)
        await process.stop(0.1)
        assert await process.wait_exited() == "the engine process was killed by SIGKILL"


async def test_engine_does_not_import_what_only_servicers_need() -> None:
    probe = (
        "import sys, specdec.replica.bridge.engine_child, specdec.replica.bridge.frames;"
        "print([name for name in ('grpc', 'torch', 'pydantic_settings') if name in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", probe, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"


@pytest.mark.parametrize("is_frozen", [False, True], ids=["idle", "frozen in a step"])
async def test_engine_dies_with_its_servicer(is_frozen: bool) -> None:
    async with ready_echo() as (process, channel):
        call = verify_stream(channel)
        await call.write(b"pid")
        engine_pid = int(await call.read())
        if is_frozen:
            stop_process(engine_pid)

        process.kill()

        await asyncio.wait_for(gone(engine_pid), PATIENCE_S)


async def test_process_exits_with_1_when_the_engine_cannot_load() -> None:
    async with echo_process("--load", "refuse") as process:
        assert await process.exit_code() == 1
        failures = [event for event in process.events if event["event"] in ("startup_failed", "failed")]
        assert [failure["reason"] for failure in failures] == ["ModelNotSupported: no attention"]


async def test_process_exits_with_1_when_loading_takes_too_long() -> None:
    async with echo_process("--load", "hang", "--load-timeout-s", "0.5") as process:
        failure = await process.event("startup_failed")
        assert failure["reason"].startswith("load_timeout_s: ")
        assert await process.exit_code() == 1
