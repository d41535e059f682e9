"""Calls that an engine answers by itself, as callers see them: real processes, real sockets, an engine that echoes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.commands.views.failures import EXIT_CODES
from specdec.wire.errors import FailedPrecondition, InvalidRequest, NotReady, SpecdecError, Unavailable, from_rpc_error
from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.services.echo_process import SERVICE, echo_process, ready_echo, verify_stream
from tests.support.services.secured import server_flags


def begin(channel: grpc.aio.Channel, request: bytes) -> Any:
    method: Any = channel.unary_unary(f"/{SERVICE}/SetDrafters")
    return method(request, timeout=60)


async def refusal(call: Any) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


async def events_until(stream: Any, name: str) -> list[str]:
    """What the engine has seen of streams and calls, once `name` is among it."""
    events: list[str] = []
    async with asyncio.timeout(60):
        while name not in events:
            await stream.write(b"events")
            events = (await stream.read()).decode().splitlines()
    return events


async def first_stream(channel: grpc.aio.Channel) -> Any:
    """A stream that the engine knows before any call that follows: it numbers both as they arrive."""
    stream = verify_stream(channel)
    await stream.write(b"first")
    assert await stream.read() == b"first"
    return stream


async def test_answers_and_refusals_are_the_engines_and_streams_go_on_beside_them() -> None:
    async with ready_echo() as (_, channel):
        stream = await first_stream(channel)
        assert await begin(channel, b"abc") == b"cba"
        error = await refusal(begin(channel, b"abort"))
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.message) == ("NOT_ATTACHED", "attach first")
        assert await begin(channel, b"x" * 65_536) == b"x" * 65_536
        error = await refusal(begin(channel, b"x" * 65_537))
        assert isinstance(error, InvalidRequest)
        await stream.write(b"after")
        assert await stream.read() == b"after"
        await events_until(stream, "closed 4")


async def test_the_engine_is_told_when_a_caller_leaves() -> None:
    async with ready_echo() as (_, channel):
        stream = await first_stream(channel)
        held = begin(channel, b"hold")
        await events_until(stream, "called 2")
        held.cancel()
        await events_until(stream, "closed 2")


async def test_an_engine_that_ends_has_answered_nobody() -> None:
    async with ready_echo("--engine-restarts", "0", "--drain-s", "0") as (_, channel):
        stream = await first_stream(channel)
        held = begin(channel, b"hold")
        await events_until(stream, "called 2")
        await stream.write(b"crash")
        error = await refusal(held)
        assert isinstance(error, Unavailable)
        assert error.reason == "ENGINE_GONE"


async def test_before_the_model_is_loaded_nobody_is_asked() -> None:
    async with echo_process("--load", "hang") as process:
        port = (await process.event("listening"))["port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert isinstance(await refusal(begin(channel, b"abc")), NotReady)


async def test_the_command_reaches_a_target_that_demands_a_certificate(tmp_path: Path) -> None:
    authority = Authority("the authority")
    server, client = (
        SecretVolume(tmp_path / name, authority.issue(name), authority.certificate) for name in ("server", "client")
    )
    async with echo_process(*server_flags(server)) as process:
        address = f"127.0.0.1:{(await process.event('listening'))['port']}"
        await process.event("ready")
        command = [
            sys.executable,
            "-m",
            "specdec.commands.main",
            "drafters",
            "--json",
            "--target",
            address,
            "--tls-ca",
            str(server.authority),
        ]
        own = ["--tls-key", str(client.key), "--tls-cert", str(client.certificate)]
        environment = {**os.environ, "COLUMNS": "200"}

        def run(*flags: str) -> subprocess.CompletedProcess[str]:
            arguments = [*command, *flags]
            return subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment, timeout=60)

        assert json.loads(run(*own).stdout) == []
        assert run().returncode == EXIT_CODES[Unavailable.code.name]
