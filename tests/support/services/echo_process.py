"""Starts the echo replica as a process and reads its log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.wire.channel import open_channel
from specdec.wire.errors import SpecdecError, from_rpc_error
from specdec.wire.settings import PeerSettings

SERVICE = "specdec.v1.TargetService"
VERIFY = f"/{SERVICE}/Verify"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def verify_stream(channel: grpc.aio.Channel) -> Any:
    """Open a Verify stream of raw bytes."""
    open_stream: Any = channel.stream_stream(VERIFY)
    return open_stream()


async def health_of(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    """Health status of a service."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def error_of(call: Any) -> SpecdecError:
    """The error at the end of a stream, whose messages are dropped."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended without an error")


class EchoProcess:
    """A running replica; `events` are the log lines read so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    async def event(self, name: str) -> dict[str, Any]:
        """Read the log up to the next line with this event; returns that line."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            entry: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {"event": line.decode()}
            self.events.append(entry)
            if entry["event"] == name:
                return entry
        raise AssertionError(f"the process ended without {name!r}: {self.events}")

    async def exit_code(self) -> int:
        """Read the rest of the log and wait for the end; returns the exit code."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.events.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})
        return await self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@asynccontextmanager
async def echo_process(*flags: str) -> AsyncIterator[EchoProcess]:
    """Run a replica on free ports; it is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.services.echo_service",
        *("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield EchoProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def ready_echo(*flags: str) -> AsyncIterator[tuple[EchoProcess, grpc.aio.Channel]]:
    """Run a replica; yields it, once it is ready, with a channel to it."""
    async with echo_process(*flags) as process:
        port = (await process.event("listening"))["port"]
        await process.event("ready")
        async with open_channel(f"127.0.0.1:{port}", PeerSettings()) as channel:
            yield process, channel


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def stop_process(pid: int) -> None:
    """Freeze a process, as a step that never returns does."""
    os.kill(pid, signal.SIGSTOP)
