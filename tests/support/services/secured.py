"""A test authority with its certificates, servers that use them, and clients of these."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.v1 import common_pb2, target_pb2_grpc
from specdec.wire.errors import SpecdecError, from_rpc_error
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.services.echo_process import EchoProcess, echo_process

CALL_TIMEOUT_S = 20.0
CLIENT = "client.specdec"
COORDINATOR = "coordinator.specdec"


@dataclass(frozen=True, slots=True)
class Secured:
    """An authority, a client's certificate, and the server's mounted secret."""

    authority: Authority
    client: Certificate
    volume: SecretVolume

    def credentials(
        self, client: Certificate | None = None, authority: Authority | None = None
    ) -> grpc.ChannelCredentials:
        shown = client or self.client
        return grpc.ssl_channel_credentials((authority or self.authority).certificate, shown.key, shown.chain)

    def ssl_context(self, folder: Path, client: Certificate | None = None) -> ssl.SSLContext:
        """TLS context of a client; its certificate is written to `folder`, because Python reads it from a file."""
        shown = client or self.client
        path = folder / f"{shown.serial_number}.pem"
        path.write_bytes(shown.key + shown.chain)
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        context.load_cert_chain(path)
        context.set_alpn_protocols(["h2"])
        return context


def secure(folder: Path) -> Secured:
    authority = Authority("the authority")
    volume = SecretVolume(folder, authority.issue("server"), authority.certificate)
    return Secured(authority, authority.issue("a client", dns_names=[CLIENT]), volume)


def server_flags(volume: SecretVolume, *more: str) -> tuple[str, ...]:
    return ("--tls-dir", str(volume.folder), "--tls-verify-clients", *more)


def replica_tls(volume: SecretVolume) -> dict[str, object]:
    """Settings of a coordinator that uses the volume's certificate at replicas."""
    return {"replica_tls_dir": volume.folder}


@asynccontextmanager
async def ready_server(volume: SecretVolume, *flags: str) -> AsyncIterator[tuple[EchoProcess, dict[str, Any]]]:
    """Run a replica with mutual TLS; yields it, once it is ready, and its log line with the ports."""
    async with echo_process(*server_flags(volume, *flags)) as process:
        listening = await process.event("listening")
        await process.event("ready")
        yield process, listening


@asynccontextmanager
async def open_tls(port: int, credentials: grpc.ChannelCredentials) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        yield channel


async def check_health(channel: grpc.aio.Channel) -> int:
    make_stub: Any = health_pb2_grpc.HealthStub
    answer = await make_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
    return answer.status


async def call_target(channel: grpc.aio.Channel) -> str:
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    info = await stub.GetReplicaInfo(common_pb2.GetReplicaInfoRequest(), timeout=CALL_TIMEOUT_S)
    return info.identity.name


async def error_of(call: Any) -> SpecdecError:
    """The typed error at the end of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def served_serial(port: int, context: ssl.SSLContext) -> int:
    """Serial number of the server's certificate on a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der).serial_number


def scrape(port: int, context: ssl.SSLContext | None) -> bytes:
    """Page of /metrics over TLS, or over plain HTTP without a context."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S, context=context)
    )
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()
