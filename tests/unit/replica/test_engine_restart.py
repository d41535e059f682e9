"""A replica whose engine ends, freezes or hangs: streams end at once, and it is started again by its servicer."""

import asyncio
import os
import signal
import urllib.request
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from specdec.coordinator.links.stream_end import engine_end_in
from specdec.replica.bridge.engine_keeper import EngineKeeper
from specdec.replica.bridge.engine_watch import EndCause
from specdec.telemetry import RelayMetrics
from specdec.v1 import common_pb2, target_pb2_grpc
from specdec.wire.error_details import session_key, split_keys
from specdec.wire.errors import NotReady, Unavailable
from tests.support.services.echo_process import (
    SERVING,
    echo_process,
    error_of,
    gone,
    health_of,
    ready_echo,
    verify_stream,
)

SOON = ("--silence-s", "1", "--engine-stall-s", "1")
PATIENCE_S = 60.0


async def pid_of_engine(channel: grpc.aio.Channel) -> tuple[Any, int]:
    """An open stream, and the engine behind it."""
    call = verify_stream(channel)
    await call.write(b"pid")
    return call, int(await call.read())


async def disturb(call: Any, engine: int, fault: str) -> None:
    match fault:
        case "kill":
            os.kill(engine, signal.SIGKILL)
        case "stop":
            os.kill(engine, signal.SIGSTOP)
        case "hang":
            await call.write(b"hang")


@pytest.mark.parametrize(
    ("fault", "reason", "cause"),
    [("kill", "ENGINE_LOST", "killed"), ("stop", "ENGINE_LOST", "silent"), ("hang", "ENGINE_STALLED", "stuck")],
)
async def test_an_engine_that_fails_is_replaced_and_its_streams_are_told_why(
    fault: str, reason: str, cause: str
) -> None:
    async with echo_process(*SOON) as process:
        listening = await process.event("listening")
        await process.event("ready")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listening['port']}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            call, engine = await pid_of_engine(channel)

            await disturb(call, engine, fault)

            error = await asyncio.wait_for(error_of(call), PATIENCE_S)
            assert (type(error), error.reason) == (Unavailable, reason)
            await asyncio.wait_for(gone(engine), PATIENCE_S)
            assert (await watch.read()).status != SERVING
            assert (await watch.read()).status == SERVING
            watch.cancel()
            _, other = await pid_of_engine(channel)
            assert other != engine
        url = f"http://127.0.0.1:{listening['metrics_port']}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        assert f'specdec_target_engine_restarts_total{{cause="{cause}"}} 1.0' in page.splitlines()
        process.terminate()
        assert await process.exit_code() == 0


async def test_while_an_engine_is_started_again_everything_is_unavailable() -> None:
    # With a log of one's own nothing is started again before the first of them is seen.
    async with ready_echo(*SOON) as (process, channel):
        call, engine = await pid_of_engine(channel)
        os.kill(engine, signal.SIGSTOP)
        await error_of(call)
        assert isinstance(await error_of(verify_stream(channel)), NotReady)
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await process.event("engine_ready_again")


async def test_whom_an_engine_was_working_for_is_told_with_its_end_and_whenever_it_is_asked_for() -> None:
    async with ready_echo() as (process, channel):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
        assert info.HasField("last_end")
        assert info.last_end == common_pb2.EngineEnd()
        call = verify_stream(channel)
        await call.write(b"crash in a step of a and b")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
        await process.event("engine_ready_again")
        info = await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
    end = info.last_end
    assert (end.reason, end.is_told) == ("ENGINE_GONE", True)
    assert split_keys(end.session_keys) == {session_key("a"), session_key("b")}
    assert engine_end_in(ended.value.trailing_metadata()) == end
    assert engine_end_in(refused.value.trailing_metadata()) == end


async def test_an_engine_that_ends_again_and_again_ends_the_service() -> None:
    async with ready_echo("--engine-restarts", "2") as (process, channel):
        for number in range(3):
            call = verify_stream(channel)
            await call.write(b"crash")
            assert (await error_of(call)).reason == "ENGINE_GONE"
            if number < 2:
                await process.event("engine_ready_again")
        assert await process.exit_code() == 1
        [failure] = [event for event in process.events if event["event"] == "failed"]
        assert failure["reason"] == "the engine process exited with code 3; the engine ended 3 times in ten minutes"


async def test_a_service_that_drains_does_not_replace_its_engine() -> None:
    async with ready_echo("--no-drained-at-once") as (process, channel):
        call = verify_stream(channel)
        await call.write(b"hello")
        await call.read()
        process.terminate()
        await process.event("draining")
        await call.write(b"crash")
        assert await process.exit_code() == 0
        assert "engine_restarts" not in [event["event"] for event in process.events]


async def test_a_frozen_service_that_goes_on_keeps_its_engine() -> None:
    async with ready_echo(*SOON) as (process, channel):
        call, engine = await pid_of_engine(channel)
        for pid in (process.pid, engine):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.5)  # longer than an engine may be silent
        for pid in (engine, process.pid):
            os.kill(pid, signal.SIGCONT)
        await call.write(b"pid")
        assert int(await call.read()) == engine
        assert await health_of(channel) == SERVING


class _Startable:
    """An engine process, of which the second cannot be started."""

    made: ClassVar[list["_Startable"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.number = len(self.made)
        self.pid: int | None = None
        self.instance_id, self.how_ended, self.end_cause = str(self.number), None, EndCause.EXITED
        self.ended = asyncio.Event()

    def start(self) -> None:
        if self.number == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.pid = self.number

    async def wait_ready(self) -> common_pb2.GetReplicaInfoResponse:
        return common_pb2.GetReplicaInfoResponse()

    async def wait_ended(self) -> str:
        await self.ended.wait()
        return "killed"

    async def wait_exited(self) -> str:
        return await self.wait_ended()

    async def stop(self, grace_s: float) -> None:
        pass


async def test_an_engine_for_whose_process_there_is_no_room_at_first_is_started_later() -> None:
    ready = asyncio.Event()

    async def on_ready(is_ready: bool) -> None:
        if is_ready:
            ready.set()

    metrics = RelayMetrics(CollectorRegistry(), "target")
    _Startable.made.clear()
    keeper = EngineKeeper(
        _Startable,  # type: ignore[arg-type]
        load_timeout_s=5.0,
        max_restarts=5,
        metrics=metrics,
        on_ready=on_ready,
        on_exit=lambda pid: None,
    )
    await keeper.start()
    _Startable.made[0].ended.set()
    async with asyncio.timeout(PATIENCE_S):
        await ready.wait()
    assert [each.pid for each in _Startable.made] == [1, None, 3]
    await keeper.stop(0.0)
