"""Transport security of one real process: who is let in, and certificates renewed while it runs.

A replica with an echoing engine shows what every service does.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2
from pydantic import ValidationError

from specdec.service.settings import ServiceSettings
from specdec.wire.errors import PermissionDenied, Unavailable
from tests.support.servers.certificates import Authority, Certificate
from tests.support.services.echo_process import echo_process, verify_stream
from tests.support.services.reflection import list_services, reflect
from tests.support.services.secured import (
    CLIENT,
    COORDINATOR,
    Secured,
    call_target,
    check_health,
    error_of,
    open_tls,
    ready_server,
    scrape,
    secure,
    served_serial,
    server_flags,
)


@pytest.fixture
def secured(tmp_path: Path) -> Secured:
    return secure(tmp_path / "secret")


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(lambda own: grpc.ssl_channel_credentials(own.authority.certificate), id="no_certificate"),
        pytest.param(
            lambda own: own.credentials(Authority("another").issue("x")), id="certificate_of_another_authority"
        ),
        pytest.param(
            lambda own: own.credentials(own.authority.issue("x", valid_for=timedelta(hours=-1))),
            id="expired_certificate",
        ),
        pytest.param(lambda own: own.credentials(authority=Authority("another")), id="client_trusts_another_authority"),
    ],
)
async def test_a_handshake_that_fails_is_unavailable_and_others_still_get_in(
    secured: Secured, shown: Callable[[Secured], grpc.ChannelCredentials]
) -> None:
    async with ready_server(secured.volume) as (_, listening):
        async with open_tls(listening["port"], shown(secured)) as channel:
            assert type(await error_of(check_health(channel))) is Unavailable
        async with open_tls(listening["port"], secured.credentials()) as channel:
            assert await call_target(channel) == "echo"


async def test_only_allowed_names_may_call_and_all_may_ask_for_health(secured: Secured) -> None:
    async with ready_server(secured.volume, "--tls-allowed-client-names", f"{COORDINATOR}, The Tool") as (_, listening):
        by_dns_name = secured.authority.issue("x", dns_names=["other.specdec", COORDINATOR.upper()])
        by_common_name = secured.authority.issue("the tool")
        for allowed in (by_dns_name, by_common_name):
            async with open_tls(listening["port"], secured.credentials(allowed)) as channel:
                assert await call_target(channel) == "echo"
                stream = verify_stream(channel)
                await stream.write(b"hello")
                assert await stream.read() == b"hello"
                assert await list_services(channel)
        async with open_tls(listening["port"], secured.credentials()) as channel:
            assert await check_health(channel) == health_pb2.HealthCheckResponse.SERVING
            for call in (call_target(channel), verify_stream(channel).read(), reflect(channel).read()):
                error = await error_of(call)
                assert isinstance(error, PermissionDenied)
                assert error.reason == "CLIENT_NAME_NOT_ALLOWED"
                assert CLIENT in error.message


async def test_a_renewed_certificate_is_served_to_new_connections_and_streams_go_on(
    secured: Secured, tmp_path: Path
) -> None:
    context = secured.ssl_context(tmp_path)
    async with (
        ready_server(secured.volume, "--metrics-tls") as (process, listening),
        open_tls(listening["port"], secured.credentials()) as channel,
    ):
        stream = verify_stream(channel)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        old_serial = await served_serial(listening["port"], context)
        renewed = secured.authority.issue("server")
        secured.volume.write(renewed, secured.authority.certificate)
        for port in (listening["port"], listening["metrics_port"]):
            assert await served_serial(port, context) == renewed.serial_number != old_serial
        await stream.write(b"after")
        assert await stream.read() == b"after"
        assert (await process.event("tls_files_renewed"))["level"] == "info"


@pytest.mark.parametrize("broken", ["key_of_another_certificate", "no_certificate", "no_authority", "missing"])
async def test_broken_new_files_are_logged_and_the_old_ones_kept(secured: Secured, tmp_path: Path, broken: str) -> None:
    context = secured.ssl_context(tmp_path)
    authority = secured.authority.certificate
    async with ready_server(secured.volume, "--metrics-tls") as (process, listening):
        old_serial = await served_serial(listening["port"], context)
        good = secured.authority.issue("server")
        match broken:
            case "key_of_another_certificate":
                secured.volume.write(Certificate(secured.authority.issue("x").key, good.chain), authority)
            case "no_certificate":
                secured.volume.write(Certificate(good.key, b"garbage"), authority)
            case "no_authority":
                secured.volume.write(good, b"garbage")
            case _:
                secured.volume.key.unlink()
        for port in (listening["port"], listening["metrics_port"]):
            assert await served_serial(port, context) == old_serial
        files = {"no_authority": "ca.crt", "missing": "tls.key"}.get(broken, "tls.crt, tls.key")
        reason = f"tls_dir: {files} in {secured.volume.folder}: "
        assert (await process.event("tls_files_refused"))["reason"].startswith(reason)
        if broken != "missing":
            secured.volume.write(good, authority)
            assert await served_serial(listening["port"], context) == good.serial_number


async def test_a_renewed_authority_decides_who_gets_in(secured: Secured) -> None:
    new_authority = Authority("the next authority")
    async with ready_server(secured.volume) as (_, listening):
        async with open_tls(listening["port"], secured.credentials()) as channel:
            assert await call_target(channel) == "echo"
        secured.volume.write(secured.authority.issue("server"), new_authority.certificate)
        async with open_tls(listening["port"], secured.credentials()) as channel:
            assert type(await error_of(check_health(channel))) is Unavailable
        async with open_tls(listening["port"], secured.credentials(new_authority.issue("x"))) as channel:
            assert await call_target(channel) == "echo"


async def test_a_process_with_unusable_files_exits_and_names_the_setting(secured: Secured) -> None:
    good, authority = secured.authority.issue("server"), secured.authority.certificate
    private_key = serialization.load_pem_private_key(good.key, None)
    encrypted = private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    cases = [
        (secured.client.key, good.chain, authority, "tls.crt, tls.key", "the key does not belong"),
        (encrypted, good.chain, authority, "tls.crt, tls.key", ""),
        (good.key, b"garbage", authority, "tls.crt, tls.key", "not usable PEM"),
        (good.key, good.chain, b"garbage", "ca.crt", "not usable PEM"),
    ]
    for key, chain, client_ca, files, why in cases:
        reason = f"tls_dir: {files} in {secured.volume.folder}: {why}"
        secured.volume.write(Certificate(key, chain), client_ca)
        async with echo_process(*server_flags(secured.volume)) as process:
            assert (await process.event("startup_failed"))["reason"].startswith(reason)
            assert await process.exit_code() == 1


async def test_metrics_over_tls_demand_a_client_certificate(secured: Secured, tmp_path: Path) -> None:
    without_certificate = ssl.create_default_context(cadata=secured.authority.certificate.decode())
    async with ready_server(secured.volume, "--metrics-tls") as (_, listening):
        port = listening["metrics_port"]
        # A client that says nothing holds up nobody.
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        with_certificate = secured.ssl_context(tmp_path)
        with_certificate.set_alpn_protocols(["http/1.1"])
        assert b"specdec_" in await asyncio.to_thread(scrape, port, with_certificate)
        with pytest.raises(OSError):
            await asyncio.to_thread(scrape, port, without_certificate)
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(scrape, port, None)
        assert b"specdec_" in await asyncio.to_thread(scrape, port, with_certificate)
        silent.close()


@pytest.mark.parametrize("setting", [{"tls_allowed_client_names": "a,b"}, {"metrics_tls": True}])
def test_settings_that_need_tls_say_so(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(setting))} needs tls_"):
        ServiceSettings(**setting)
