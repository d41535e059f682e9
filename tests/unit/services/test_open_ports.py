"""Who reaches a port beyond loopback without key and certificate gets nothing that the operator has not allowed."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from specdec.commands.up.cluster import free_port
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.gateway import openness
from specdec.gateway.service import run_gateway
from specdec.gateway.settings import GatewaySettings
from specdec.service.exposure import ExposureSettings, is_loopback
from specdec.wire.errors import PermissionDenied, from_rpc_error
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.echo_process import SERVICE, ready_echo
from tests.support.services.gateways import GatewayAtHand, gateway

EVERYWHERE = "0.0.0.0"
KEY = "secret"
OPENAPI, METRICS, MODELS, HEALTH = "/openapi.json", "/metrics", "/v1/models", "/health"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("a.name", False),
    ],
)
def test_loopback_is_known_without_resolving_names(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("fields", "has_keys", "warns", "is_trusted"),
    [
        ({}, False, True, False),
        ({"allow_unauthenticated": True}, False, True, True),
        ({}, True, False, False),
        ({"host": "127.0.0.1"}, False, False, True),
    ],
)
def test_who_is_open_to_all_says_so_once(fields: Any, has_keys: bool, warns: bool, is_trusted: bool) -> None:
    settings = ExposureSettings(**fields)
    with capture_logs() as logs:
        settings.warn_if_open(has_keys=has_keys, remedy="keys")
    assert [line["event"] for line in logs] == ["open_to_all"] * warns
    assert settings.trusts_network is is_trusted


def test_verified_certificates_are_trusted(tmp_path: Path) -> None:
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).touch()
    settings = ExposureSettings(tls_dir=tmp_path, tls_verify_clients=True)
    assert settings.trusts_network
    assert not ExposureSettings(tls_dir=tmp_path).trusts_network


def test_a_coordinators_keys_are_known_by_its_settings() -> None:
    assert not CoordinatorSettings(targets=("a:1",)).has_keys
    assert CoordinatorSettings.model_validate({"targets": "a:1", "api_keys_file": "keys.yaml"}).has_keys


@pytest.mark.parametrize("settings", [CoordinatorSettings, TargetSettings, DraftSettings])
def test_reflection_follows_the_rule_unless_it_is_set(settings: Any) -> None:
    fields = {"model": "m"} if settings is not CoordinatorSettings else {"targets": ("a:1",)}
    assert not settings(**fields).serves_reflection
    assert settings(**fields, reflection=True).serves_reflection
    assert settings(**fields, host="::1").serves_reflection
    assert not settings(**fields, host="::1", reflection=False).serves_reflection


@pytest.mark.parametrize(
    ("flag", "is_allowed"), [("--no-allow-unauthenticated", False), ("--allow-unauthenticated", True)]
)
async def test_strangers_change_nothing_at_a_replica(flag: str, is_allowed: bool) -> None:
    async with ready_echo("--host", EVERYWHERE, flag) as (_, channel):
        call = channel.unary_unary(f"/{SERVICE}/SetDrafters")
        try:
            await call(b"")
            error = None
        except grpc.aio.AioRpcError as caught:
            error = from_rpc_error(caught)
    assert isinstance(error, PermissionDenied) is not is_allowed
    if error is not None and not is_allowed:
        assert "allow_unauthenticated" in error.message


async def statuses(one: GatewayAtHand, *paths: str, key: str = "") -> list[int]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with one.http() as client:
        return [(await client.get(path, headers=headers)).status_code for path in paths]


async def until_serving(one: GatewayAtHand) -> None:
    async with asyncio.timeout(30):
        while await statuses(one, MODELS, key=KEY) != [200]:  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.01)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with one key: KEY."""
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - {{id: one, tenant: acme, sha256: '{sha256(KEY.encode()).hexdigest()}'}}\n")
    return file


async def test_a_gateway_that_everybody_could_use_serves_nobody_and_ends() -> None:
    async with running([ScriptedTarget()]) as harness:
        async with gateway(harness.address, host=EVERYWHERE) as one:
            assert "demands no key" in await one.parts.openness.refused()
            assert await statuses(one, MODELS, OPENAPI, METRICS) == [503, 404, 404]
            async with one.http() as client:
                assert "demand keys" in (await client.get(HEALTH)).text
        settings = GatewaySettings(coordinators=(harness.address,), host=EVERYWHERE, port=0)
        with capture_logs() as logs:
            assert await run_gateway(settings) == 1
    (line,) = [line for line in logs if line["event"] == "open_to_all"]
    assert all(word in line["reason"] for word in (harness.address, "api_keys_file", "allow_unauthenticated"))


async def test_a_gateway_that_is_told_so_serves_everybody_and_says_so_once() -> None:
    def told() -> list[str]:
        return [line["host"] for line in logs if line["event"] == "open_to_all"]

    async with running([ScriptedTarget()]) as harness:
        with capture_logs() as logs:
            async with gateway(harness.address, host=EVERYWHERE, allow_unauthenticated=True) as one:
                assert await statuses(one, MODELS, OPENAPI, METRICS) == [200] * 3
                async with asyncio.timeout(30):
                    while not told():  # noqa: ASYNC110 - logs have no event
                        await asyncio.sleep(0.01)
    assert told() == [EVERYWHERE]


async def test_a_gateway_before_coordinators_with_keys_serves_who_has_one(keys: Path) -> None:
    async with running([ScriptedTarget()], api_keys_file=keys) as harness:
        with capture_logs() as logs:
            async with gateway(harness.address, host=EVERYWHERE) as one:
                await until_serving(one)
                assert await statuses(one, MODELS, OPENAPI, METRICS, key=KEY) == [200, 404, 404]
                assert await statuses(one, MODELS) == [401]
            async with gateway(harness.address, host=EVERYWHERE, public_metrics=True) as one:
                assert await statuses(one, METRICS) == [200]
    assert not [line for line in logs if line["event"] == "open_to_all"]


async def test_a_gateway_waits_for_a_coordinators_word_and_notices_one_without_keys(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openness, "_INTERVAL_S", 0.05)
    port = free_port()
    async with running([ScriptedTarget()], api_keys_file=keys) as harness:
        async with gateway(f"127.0.0.1:{port}", host=EVERYWHERE) as one:
            assert await statuses(one, MODELS, HEALTH, key=KEY) == [503, 503]
        async with gateway(harness.address, f"127.0.0.1:{port}", host=EVERYWHERE) as one:
            await until_serving(one)
            async with running([ScriptedTarget()], port=port), asyncio.timeout(30):
                assert str(port) in await one.parts.openness.refused()
            assert await statuses(one, MODELS, key=KEY) == [503]
