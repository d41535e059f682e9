"""API keys and limits of tenants: a real coordinator process; scripted replicas where a stream has to stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from specdec.client import Client, ClientSettings
from specdec.commands.app import app
from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import (
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    from_rpc_error,
)
from tests.support.scripted.replica import PATIENCE_S
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.coordinator_harness import collect, request, running
from tests.support.services.key_files import hash_key
from tests.support.services.model_pair import ModelPair

KEYS = {
    name: f"specdec_{name}-key-of-the-tests-0123456789abcdef"
    for name in ("acme", "acme-next", "expired", "limited", "metered", "unknown")
}


def entry(name: str, tenant: str | None = None, **limits: Any) -> dict[str, Any]:
    return {"id": name, "tenant": tenant or name, "sha256": hash_key(KEYS[name]), **limits}


def write_keys(path: Path, *entries: dict[str, Any]) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(yaml.safe_dump({"keys": list(entries)}), encoding="utf-8")
    fresh.rename(path)


def client_of(address: str, name: str | None, tenant: str | None = None) -> Client:
    metadata = () if tenant is None else (("specdec-tenant", tenant),)
    return Client(address, ClientSettings(api_key=None if name is None else KEYS[name], metadata=metadata))


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


def text_request(max_tokens: int = 8) -> api.GenerateRequest:
    message = api.GenerateRequest(prompt="Once upon a time")
    message.sampling.max_tokens = max_tokens
    message.sampling.ignore_eos = True
    return message


@pytest.fixture(scope="module")
def keyed_cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three processes; the coordinator wants keys."""
    folder = tmp_path_factory.mktemp("keyed_cluster")
    write_keys(
        folder / "keys.yaml",
        entry("acme"),
        entry("expired", expires_at=datetime.now(UTC) - timedelta(days=1)),
        entry("limited", max_prompt_tokens=2, max_tokens=4),
        entry("metered", tokens_per_s=20, burst_tokens=1),
    )
    plan = LocalPlan(
        target_model=str(tiny_pair.target),
        draft_model=str(tiny_pair.draft),
        device="cpu",
        free_ports=True,
        coordinator_settings={"api_keys_file": folder / "keys.yaml", "log_level": "debug"},
        target_settings={"log_level": "debug"},
        draft_settings={"log_level": "debug"},
    )
    services = plan_services(plan, environment={})
    with Cluster(services, log_dir=folder / "logs", timeouts=TIMEOUTS, api_key=KEYS["acme"]) as cluster:
        cluster.start()
        yield cluster


CALLS: dict[str, Callable[[Client], Any]] = {
    "Generate": lambda client: client.complete(text_request()),
    "Abort": lambda client: client.abort("none"),
    "Tokenize": lambda client: client.tokenize("text"),
    "Detokenize": lambda client: client.detokenize([1]),
    "GetModelInfo": lambda client: client.model_info(),
    "GetStatus": lambda client: client.status(),
}


def test_every_rpc_is_held_against_the_list_of_calls() -> None:
    methods = api.DESCRIPTOR.services_by_name["CoordinatorService"].methods
    assert {method.name for method in methods} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
async def test_every_rpc_wants_a_good_key(keyed_cluster: Cluster, name: str) -> None:
    for key, reason in (
        (None, "NO_API_KEY"),
        ("unknown", "INVALID_API_KEY"),
        ("expired", "API_KEY_EXPIRED"),
    ):
        async with client_of(keyed_cluster.address, key) as client:
            with pytest.raises(Unauthenticated) as caught:
                await CALLS[name](client)
            assert caught.value.reason == reason
    async with client_of(keyed_cluster.address, "acme") as client:
        await CALLS[name](client)


async def test_what_does_not_parse_tells_a_stranger_no_more_than_what_does(keyed_cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(keyed_cluster.address) as channel:
        call = channel.unary_unary(
            "/specdec.v1.CoordinatorService/GetStatus",
            request_serializer=lambda _: b"\xff",
            response_deserializer=api.GetStatusResponse.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(empty_pb2.Empty())
    assert isinstance(from_rpc_error(caught.value), Unauthenticated)


async def test_health_and_reflection_need_no_key(keyed_cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(keyed_cluster.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        names = [s.name async for r in reflect.ServerReflectionInfo(asked) for s in r.list_services_response.service]
        assert "specdec.v1.CoordinatorService" in names


async def test_a_key_is_no_use_for_another_tenant(keyed_cluster: Cluster) -> None:
    async with client_of(keyed_cluster.address, "acme", tenant="limited") as client:
        with pytest.raises(PermissionDenied):
            await client.complete(text_request())
    async with client_of(keyed_cluster.address, "acme", tenant="acme") as client:
        assert (await client.complete(text_request())).num_tokens == 8


async def test_limits_of_a_key_name_the_field(keyed_cluster: Cluster) -> None:
    async with client_of(keyed_cluster.address, "limited") as client:
        assert (await client.model_info()).max_tokens_limit == 4
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(text_request(4))
        assert caught.value.field == "prompt"
        short = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[5, 6]))
        short.sampling.ignore_eos = True
        assert (await client.complete(short)).num_tokens == 4
        short.sampling.max_tokens = 8
        assert (await client.complete(short)).num_tokens == 4


async def test_a_refusal_by_quota_tells_a_delay_that_is_enough(keyed_cluster: Cluster) -> None:
    async with client_of(keyed_cluster.address, "metered") as client:
        with pytest.raises(Overloaded) as caught:
            while True:  # until they come faster than the tokens do
                await client.complete(text_request(16))
        assert caught.value.reason == "QUOTA_EXCEEDED"
        assert 0 < caught.value.retry_after_s < 20
        await asyncio.sleep(caught.value.retry_after_s)  # what a client does with it
        assert (await client.complete(text_request(1))).num_tokens == 1


def test_logs_hold_no_key_and_no_hash(keyed_cluster: Cluster) -> None:
    told: list[str] = []
    for name in (None, "unknown", "expired", "acme"):
        with grpc.insecure_channel(keyed_cluster.address) as channel:
            call = channel.unary_unary("/specdec.v1.CoordinatorService/GetStatus")
            try:
                call(b"", metadata=None if name is None else bearer(name))
            except grpc.RpcError as error:
                told.append(str(error))
    assert len(told) == 3
    logs = "".join(path.read_text() for path in keyed_cluster.log_dir.glob("*.log"))
    assert "api_keys_loaded" in logs
    assert not [secret for secret in secrets_of_the_tests() if secret in logs or secret in str(told)]


async def test_logs_at_level_debug_hold_no_prompt_and_no_output(keyed_cluster: Cluster) -> None:
    prompt = "Xyzzy and plugh are what a reader of logs must not see"
    body = api.GenerateRequest(prompt=prompt, request_id="told")
    body.sampling.max_tokens, body.sampling.ignore_eos = 32, True
    async with client_of(keyed_cluster.address, "acme") as client:
        completion = await client.complete(body)
    output = completion.choices[0].text
    assert len(output) > 8
    logs = "".join(path.read_text() for path in keyed_cluster.log_dir.glob("*.log"))
    assert "request_id=told" in logs
    for text in (prompt, output, str(list(completion.choices[0].token_ids))[1:-1]):
        assert text not in logs
        assert json.dumps(text)[1:-1] not in logs


def secrets_of_the_tests() -> list[str]:
    return [*KEYS.values(), *map(hash_key, KEYS.values())]


def test_a_coordinator_whose_key_file_is_wrong_does_not_start(tmp_path: Path, tiny_pair: ModelPair) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, entry("acme") | {"sha256": KEYS["acme"]})
    plan = LocalPlan(
        target_model=str(tiny_pair.target),
        draft_model=str(tiny_pair.draft),
        device="cpu",
        free_ports=True,
        coordinator_settings={"api_keys_file": path},
    )
    specs = [spec for spec in plan_services(plan, environment={}) if spec.name == "coordinator"]
    with (
        Cluster(specs, log_dir=tmp_path / "logs", timeouts=TIMEOUTS) as cluster,
        pytest.raises(ClusterFailed) as caught,
    ):
        cluster.start()
    assert "api_keys_file" in str(caught.value)
    assert "keys.0.sha256" in str(caught.value)
    assert KEYS["acme"] not in str(caught.value)


async def until(client: Client, accepted: bool) -> None:
    """Ask until a key is accepted, or until it no longer is."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await client.status()
                is_accepted = True
            except Unauthenticated:
                is_accepted = False
            if is_accepted == accepted:
                return


async def test_keys_rotate_while_a_stream_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, entry("acme"))
    target = ScriptedTarget()
    target.set_limit(3)
    async with running([target], api_keys_file=path) as harness:
        call = harness.stub.Generate(request(request_id="long"), metadata=bearer("acme"))
        assert (await call.read()).HasField("started")
        async with client_of(harness.address, "acme") as old, client_of(harness.address, "acme-next") as new:
            write_keys(path, entry("acme"), entry("acme-next", "acme"))
            await until(new, accepted=True)
            await old.status()
            write_keys(path, entry("acme-next", "acme"))
            await until(old, accepted=False)
            target.set_limit(None)
            assert len((await collect(call)).ids()) == 20


async def test_a_tenant_has_its_places_across_its_keys_and_refusals_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    one = {"max_concurrent_requests": 1}
    write_keys(path, entry("acme", **one), entry("acme-next", "acme", **one), entry("limited"))
    target = ScriptedTarget()
    target.set_limit(3)
    async with running([target], api_keys_file=path) as harness:
        call = harness.stub.Generate(request(), metadata=bearer("acme"))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.stub.Generate(request(), metadata=bearer("acme-next")))
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert error.reason == "TOO_MANY_REQUESTS_OF_TENANT" and 1.0 <= error.retry_after_s <= 2.0
        assert harness.metric("admission_rejects_total", cause="concurrency") == 1
        other = harness.stub.Generate(request(), metadata=bearer("limited"))
        assert (await other.read()).HasField("started")
        target.set_limit(None)
        await collect(call)
        assert len((await collect(harness.stub.Generate(request(), metadata=bearer("acme-next")))).ids()) == 20


async def test_settings_of_the_deployment_hold_without_keys() -> None:
    changes = {"quota_tokens_per_s": 0.001, "quota_burst_tokens": 5, "max_prompt_tokens": 4}
    async with running([ScriptedTarget()], **changes) as harness:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.stub.Generate(request((5, 6, 7, 8, 9))))
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, InvalidRequest)
        assert refused.field == "prompt_token_ids"
        await collect(harness.stub.Generate(request()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.stub.Generate(request()))
        assert from_rpc_error(caught.value).reason == "QUOTA_EXCEEDED"
        assert harness.metric("admission_rejects_total", cause="quota") == 1
        await collect(harness.stub.Generate(request(), metadata=(("specdec-tenant", "other"),)))


async def test_a_prompt_whose_request_got_no_place_is_not_charged() -> None:
    target = ScriptedTarget()
    target.set_limit(1)
    changes = {"quota_tokens_per_s": 0.001, "quota_burst_tokens": 5, "max_running": 1, "max_waiting": 0}
    async with running([target], **changes) as harness:
        call = harness.stub.Generate(request(), metadata=(("specdec-tenant", "other"),))
        await call.read()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(harness.stub.Generate(request()))
            assert from_rpc_error(caught.value).reason == "OVERLOADED"
        target.set_limit(None)
        await collect(call)
        assert len((await collect(harness.stub.Generate(request()))).ids()) == 20


def test_the_benchmark_measures_with_a_key_as_its_tenant_and_names_what_is_missing_without(
    keyed_cluster: Cluster,
) -> None:
    arguments = ["bench", "--address", keyed_cluster.address, "--concurrency", "1", "--requests", "1"]
    arguments += ["--repeats", "1", "--max-tokens", "8"]
    measured = CliRunner().invoke(app, arguments, env={"SPECDEC_API_KEY": KEYS["acme"]})
    assert measured.exit_code == 0, measured.stderr
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 11
    assert "NO_API_KEY" in refused.stderr
