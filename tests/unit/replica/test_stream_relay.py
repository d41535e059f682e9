"""A replica's servicer as its peers see it: real processes, real sockets, an engine that echoes."""

import asyncio
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.service.server import SECOND_SIGNAL_S
from specdec.v1 import common_pb2, target_pb2_grpc
from specdec.wire.channel import open_channel
from specdec.wire.errors import (
    FailedPrecondition,
    NotReady,
    Overloaded,
    Unavailable,
    from_rpc_error,
)
from specdec.wire.settings import PeerSettings
from tests.support.services.echo_process import (
    NOT_SERVING,
    SERVICE,
    SERVING,
    echo_process,
    error_of,
    health_of,
    ready_echo,
    verify_stream,
)
from tests.support.services.echo_service import TOKENIZER_BYTES
from tests.support.services.reflection import list_services, reflect


async def engine_event(call: Any, name: str) -> None:
    """Returns when the engine has seen an event, asking over one stream."""
    events: list[str] = []
    while name not in events:
        await call.write(b"events")
        events = (await call.read()).decode().splitlines()


async def test_messages_of_each_stream_come_back_in_order() -> None:
    async with ready_echo() as (_, channel):
        calls = [verify_stream(channel) for _ in range(3)]
        for number in range(50):
            for index, call in enumerate(calls):
                await call.write(f"{index} {number}".encode())
        for index, call in enumerate(calls):
            received = [await call.read() for _ in range(50)]
            assert received == [f"{index} {number}".encode() for number in range(50)]


async def test_stream_ends_ok_when_the_peer_is_done_writing() -> None:
    async with ready_echo() as (_, channel):
        call = verify_stream(channel)
        await call.write(b"one")
        assert await call.read() == b"one"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_engine_learns_that_a_peer_cancelled() -> None:
    async with ready_echo() as (_, channel):
        cancelled = verify_stream(channel)
        await cancelled.write(b"hello")
        await cancelled.read()
        cancelled.cancel()
        observer = verify_stream(channel)
        await engine_event(observer, "closed 1")


async def test_engine_aborts_a_stream_with_a_typed_error_after_its_last_message() -> None:
    async with ready_echo() as (_, channel):
        call = verify_stream(channel)
        await call.write(b"abort")
        assert await call.read() == b"last words"
        error = await error_of(call)
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "NOT_ATTACHED"


async def test_message_over_the_limit_is_resource_exhausted_and_harms_nobody_else() -> None:
    async with ready_echo() as (_, channel):
        other = verify_stream(channel)
        call = verify_stream(channel)
        await call.write(bytes(15 * 1024 * 1024))
        assert len(await call.read()) == 15 * 1024 * 1024
        await call.write(bytes(100 * 1024 * 1024))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.write(b"still here")
        assert await other.read() == b"still here"


async def test_peer_that_does_not_read_is_aborted_and_others_go_on() -> None:
    async with ready_echo("--stream-buffer-bytes", str(4 * 1024 * 1024)) as (_, channel):
        stuck = verify_stream(channel)
        await stuck.write(b"hello")
        await stuck.read()
        await stuck.write(b"flood")
        other = verify_stream(channel)
        await engine_event(other, "closed 1")
        error = await error_of(stuck)
        assert isinstance(error, Overloaded)
        assert error.reason == "STREAM_NOT_READ"


async def test_before_the_model_is_loaded_everything_is_unavailable_with_a_retry_delay() -> None:
    async with echo_process("--load", "hang") as process:
        port = (await process.event("listening"))["port"]
        await process.event("engine_started")
        async with open_channel(f"127.0.0.1:{port}", PeerSettings()) as channel:
            assert [await health_of(channel, name) for name in ("", SERVICE)] == [NOT_SERVING, NOT_SERVING]
            stub = target_pb2_grpc.TargetServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
            with pytest.raises(grpc.aio.AioRpcError) as tokenizer:
                await stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
            errors = [
                from_rpc_error(info.value),
                from_rpc_error(tokenizer.value),
                await error_of(verify_stream(channel)),
            ]
            assert [type(error) for error in errors] == [NotReady] * 3
            process.terminate()
            assert await process.exit_code() == 0


async def test_ready_replica_tells_what_it_serves() -> None:
    async with ready_echo() as (_, channel):
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [SERVING, SERVING]
        stub = target_pb2_grpc.TargetServiceStub(channel)
        info = await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest())
        assert info.identity.name == "echo"
        assert info.version
        pieces = [piece async for piece in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert [piece.tokenizer_config for piece in pieces] == ['{"a": 1}', "", ""]
        assert max(len(piece.tokenizer_json) for piece in pieces) <= 1024 * 1024
        assert sum(len(piece.tokenizer_json) for piece in pieces) == TOKENIZER_BYTES


async def test_reflection_lists_the_service_and_can_be_switched_off() -> None:
    async with ready_echo() as (_, channel):
        assert SERVICE in await list_services(channel)
    async with ready_echo("--no-reflection") as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflect(channel).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_restarts_the_death_of_the_engine_ends_the_process_with_1() -> None:
    async with ready_echo("--engine-restarts", "0") as (process, channel):
        call = verify_stream(channel)
        await call.write(b"crash")
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert await process.exit_code() == 1
        failure = next(event for event in process.events if event["event"] == "failed")
        assert failure["reason"] == "the engine process exited with code 3"


@pytest.fixture
def hangup_is_heard() -> Iterator[None]:
    """Under nohup a hangup is ignored, by a service as well."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.usefixtures("hangup_is_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_all_of_a_replica_lets_sessions_end_and_then_exits_with_0(number: signal.Signals) -> None:
    async with ready_echo("--no-drained-at-once") as (process, channel):
        call = verify_stream(channel)
        await call.write(b"hello")
        await call.read()
        engine_pid = next(event["pid"] for event in process.events if event["event"] == "engine_started")
        for pid in (engine_pid, process.pid):
            os.kill(pid, number)
        os.kill(process.pid, signal.SIGINT)  # in the same second: no second signal
        await process.event("draining")
        while await health_of(channel) != NOT_SERVING:
            pass
        await call.write(b"still served")
        assert await call.read() == b"still served"

        await call.write(b"drained")

        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        assert await process.exit_code() == 0
        assert "drained" in [event["event"] for event in process.events]


async def test_drain_ends_after_its_time_and_a_second_signal_ends_it_at_once() -> None:
    async with ready_echo("--no-drained-at-once", "--drain-s", "0.1") as (process, _):
        process.terminate()
        await process.event("drain_timed_out")
        assert await process.exit_code() == 0
    async with ready_echo("--no-drained-at-once", "--drain-s", "600") as (process, _):
        process.terminate()
        await process.event("draining")
        await asyncio.sleep(SECOND_SIGNAL_S)
        process.terminate()
        assert await process.exit_code() == 0


async def test_metrics_of_servicer_and_engine_are_on_one_page() -> None:
    async with echo_process() as process:
        listening = await process.event("listening")
        await process.event("ready")
        async with open_channel(f"127.0.0.1:{listening['port']}", PeerSettings()) as channel:
            call = verify_stream(channel)
            for _ in range(3):
                await call.write(b"hello")
                await call.read()
            url = f"http://127.0.0.1:{listening['metrics_port']}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    lines = page.splitlines()
    assert 'specdec_target_steps_total{kind="verify"} 3.0' in lines
    assert 'specdec_target_messages_total{direction="in"} 3.0' in lines
    assert "specdec_target_open_streams 1.0" in lines


@pytest.mark.parametrize("setting", ["port", "metrics_port", "health_port"])
async def test_port_that_is_taken_is_named_and_the_process_exits_with_1(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag = f"--{setting.replace('_', '-')}"
        async with echo_process(flag, str(taken.getsockname()[1])) as process:
            failure = await process.event("startup_failed")
            assert setting in failure["reason"].split(":")[0].split(", ")
            assert await process.exit_code() == 1


def make_certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2")
    (folder / "san.cnf").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "san.cnf",
        )  # fmt: skip


async def test_mutual_tls_lets_in_only_who_has_a_certificate_and_health_stays_plain(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    ca, key, cert = (tmp_path / name for name in ("ca.pem", "server.key", "server.pem"))
    flags = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-client-ca-file", ca, "--health-port", 0]
    async with echo_process(*map(str, flags)) as process:
        listening = await process.event("listening")
        await process.event("ready")
        told = {event["setting"]: event["reason"] for event in process.events if event["event"] == "setting_outdated"}
        assert told.keys() == {"tls_cert_file", "tls_key_file", "tls_client_ca_file"}
        assert "set tls_dir and tls_verify_clients instead" in told["tls_client_ca_file"]
        address = f"127.0.0.1:{listening['port']}"
        stranger = PeerSettings(replica_tls=True, replica_tls_ca_file=ca)
        member = stranger.model_copy(
            update={
                "replica_tls_cert_file": tmp_path / "client.pem",
                "replica_tls_key_file": tmp_path / "client.key",
            }
        )
        async with open_channel(address, member) as channel:
            assert await health_of(channel) == SERVING
        for settings in (stranger, PeerSettings()):
            async with open_channel(address, settings) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health_of(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(f"127.0.0.1:{listening['health_port']}", PeerSettings()) as channel:
            assert await health_of(channel) == SERVING
