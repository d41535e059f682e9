"""Every port of a process is reached over the same addresses: those of its host."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from specdec.commands.up.cluster import free_port
from specdec.coordinator.child_process import reserved_port
from specdec.service.listening import bound_sockets
from specdec.wire.settings import join_address
from tests.support.services.echo_process import echo_process
from tests.support.services.secured import CALL_TIMEOUT_S, check_health, ready_server, secure

V4, V6 = "127.0.0.1", "::1"
PORTS = ("--health-port", "0")


def kernel_has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind((V6, 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not kernel_has_ipv6(), reason="the kernel has no IPv6 loopback address")


def get_metrics(host: str, port: int) -> bytes:
    connection = http.client.HTTPConnection(host, port, timeout=CALL_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()


async def assert_answers(host: str, listening: dict[str, Any]) -> None:
    """gRPC, health and metrics are to be had there."""
    for name in ("port", "health_port"):
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(join_address(host, listening[name]), options=options) as channel:
            assert await check_health(channel) == health_pb2.HealthCheckResponse.SERVING
    assert b"specdec_build_info" in await asyncio.to_thread(get_metrics, host, listening["metrics_port"])


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]"])
async def test_a_wildcard_stands_for_ipv4_and_ipv6_on_every_port(wildcard: str) -> None:
    async with echo_process("--host", wildcard, *PORTS) as process:
        listening = await process.event("listening")
        await process.event("ready")
        for host in (V4, V6) if kernel_has_ipv6() else (V4,):
            await assert_answers(host, listening)


@pytest.mark.parametrize("host", [V4, pytest.param(V6, marks=needs_ipv6), pytest.param("[::1]", marks=needs_ipv6)])
async def test_one_address_is_listened_on_and_no_other(host: str) -> None:
    # Of ports that are given out at one address, some other server may have one at the other.
    ports = {name: str(free_port()) for name in ("port", "health_port", "metrics_port")}
    flags = [flag for name, port in ports.items() for flag in (f"--{name.replace('_', '-')}", port)]
    async with echo_process("--host", host, *flags) as process:
        listening = await process.event("listening")
        await process.event("ready")
        await assert_answers(host.strip("[]"), listening)
        for name in ports:
            with pytest.raises(OSError, match=r"\[Errno"):
                socket.create_connection((V6 if host == V4 else V4, listening[name]), CALL_TIMEOUT_S)


async def test_a_name_stands_for_all_its_addresses() -> None:
    async with echo_process("--host", "localhost", *PORTS) as process:
        listening = await process.event("listening")
        await process.event("ready")
        addresses = {info[4][0] for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
        for host in addresses & ({V4, V6} if kernel_has_ipv6() else {V4}):
            await assert_answers(str(host), listening)


@needs_ipv6
async def test_metrics_over_tls_are_had_over_ipv6(tmp_path: Path) -> None:
    secured = secure(tmp_path / "secret")
    context = secured.ssl_context(tmp_path)
    context.check_hostname = False  # the certificate is for 127.0.0.1
    async with ready_server(secured.volume, "--metrics-tls", "--host", "::") as (_, listening):
        reader, writer = await asyncio.open_connection(V6, listening["metrics_port"], ssl=context)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"specdec_build_info" in await asyncio.wait_for(reader.read(), CALL_TIMEOUT_S)
        writer.transport.abort()


@pytest.mark.parametrize("option", ["--metrics-port", "--health-port", "--port"])
async def test_a_port_that_another_server_has_is_named(option: str) -> None:
    with listener(V4) as taken:
        port = taken.getsockname()[1]
        async with echo_process(option, str(port)) as process:
            reason = (await process.event("startup_failed"))["reason"]
            assert await process.exit_code() == 1
    setting = option.strip("-").replace("-", "_")
    assert setting in reason.partition(":")[0]
    assert reason.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


@contextlib.contextmanager
def listener(host: str, port: int = 0) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.bind((host, port))
        server.listen()
        yield server


@pytest.mark.parametrize("host", [V4, pytest.param(V6, marks=needs_ipv6)])
@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_port_reserved_for_several_processes_is_taken_at_every_address(wildcard: str, host: str) -> None:
    with reserved_port(wildcard, 0) as port, pytest.raises(OSError, match="in use") as refused:
        listener(host, port).__enter__()
    assert refused.value.errno == errno.EADDRINUSE


def test_an_address_that_is_not_this_machines_cannot_be_had() -> None:
    with pytest.raises(OSError) as refused:  # which one, says errno
        bound_sockets("203.0.113.1", 0)
    assert refused.value.errno == errno.EADDRNOTAVAIL
