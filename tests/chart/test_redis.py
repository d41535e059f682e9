"""The bundled Redis, started here as the chart starts it, and what services are told of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from specdec.store.interface import JournalWrite, NewRequest, ReplicaRecord, RequestKey, Store, StoreUnavailable
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from specdec.wire.tls_files import TlsFile, TlsPaths
from tests.chart.redis_process import Started, started, until_up
from tests.chart.rendered import ROOT, WITH_REDIS, Render, component, containers
from tests.chart.toggles import toggle_cases
from tests.support.servers.certificates import Authority, SecretVolume

# With all that a shell or a configuration file could stumble over.
PASSWORD = """p"w d'$HOME\\#% `x`"""


def _case(*positions: str) -> str:
    return next(name for name in toggle_cases() if all(position in name for position in positions))


async def _use(store: Store) -> None:
    """Every kind of operation that services have."""
    key = RequestKey("tenant", "request")
    await store.announce(ReplicaRecord("target", "a:1", "i", "ready", pb.GetReplicaInfoResponse(version="1")), 30.0)
    assert [replica.address for replica in await store.replicas()] == ["a:1"]
    await store.withdraw("target", "a:1")
    await store.add_prefixes("a:1", [b"x" * 16], 30.0)
    assert await store.prefix_holders([b"x" * 16]) == [frozenset({"a:1"})]
    begun = await store.begin(key, NewRequest(owner_id="o", seed=1, params=b"p", num_choices=1, lease_s=30.0))
    await store.append([JournalWrite(key, "o", begun.generation, 0, 0, [1, 2], [5, 5])])
    record = await store.load(key)
    assert record is not None and record.token_ids == ((1, 2),)
    assert await store.end(key, "o", begun.generation, 1.0)
    assert await store.take_tokens("tenant", 1.0, 10.0, 10.0) == 0.0


@pytest.fixture
async def plain(render: Render, tmp_path: Path) -> AsyncIterator[Started]:
    with started(render(_case("redis=bundled", "tls=off")), tmp_path, PASSWORD) as redis:
        await until_up(redis)
        yield redis


@pytest.mark.integration
async def test_services_store_what_they_need_and_nobody_else_does(plain: Started) -> None:
    url = f"redis://127.0.0.1:{plain.port}/0"
    store = connect(url, RedisOptions(password=SecretStr(PASSWORD), timeout_s=5.0))
    await _use(store)
    await store.close()
    for wrong in (None, SecretStr("wrong")):
        stranger = connect(url, RedisOptions(password=wrong, timeout_s=5.0))
        with pytest.raises(StoreUnavailable):
            await stranger.ping()
        await stranger.close()


@pytest.mark.integration
async def test_the_password_gives_no_power_over_the_server_or_keys_of_others(plain: Started) -> None:
    client = Redis(port=plain.port, password=PASSWORD)
    for command in ("FLUSHALL", "CONFIG GET *", "KEYS *", "SHUTDOWN", "SET others 1"):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command.split())
    await client.aclose()


@pytest.mark.integration
async def test_probes_pass_while_redis_answers(plain: Started) -> None:
    assert plain.probe("livenessProbe") == 0
    plain.environment["REDISCLI_AUTH"] = "wrong"
    assert plain.probe("readinessProbe") != 0


@pytest.mark.integration
async def test_with_tls_redis_is_reached_with_its_authority_and_restarts_when_its_certificate_is_renewed(
    render: Render, tmp_path: Path
) -> None:
    authority = Authority("ours")
    volume = SecretVolume(tmp_path / "tls", authority.issue("redis"), authority.certificate)
    stranger = tmp_path / "stranger.crt"
    stranger.write_bytes(Authority("another").certificate)
    with started(render(_case("redis=bundled", "tls=mutual")), tmp_path, PASSWORD) as redis:
        await until_up(redis)
        assert redis.probe("livenessProbe") == 0
        url = f"rediss://127.0.0.1:{redis.port}/0"
        for trusted in (volume.authority, stranger):
            options = RedisOptions(
                password=SecretStr(PASSWORD), tls=TlsPaths(authorities=TlsFile("redis_tls_dir", trusted)), timeout_s=5.0
            )
            store = connect(url, options)
            if trusted == stranger:
                with pytest.raises(StoreUnavailable):
                    await store.ping()
            else:
                await _use(store)
            await store.close()
        volume.write(authority.issue("redis"), authority.certificate)
        assert redis.probe("readinessProbe") == 0
        assert redis.probe("livenessProbe") != 0


@pytest.mark.parametrize("tls", ["off", "mutual"])
def test_every_service_is_told_of_the_bundled_redis_and_of_its_own_address(tls: str, render: Render) -> None:
    documents = render(_case("redis=bundled", f"tls={tls}"))
    (service,) = [d for d in documents if d["kind"] == "Service" and component(d) == "redis"]
    scheme = "redis" if tls == "off" else "rediss"
    for role, pod, container in containers(documents):
        flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in container["args"])
        if role not in WITH_REDIS:
            assert not [flag for flag in flags if flag.startswith("redis")]
            continue
        assert flags["redis-url"] == f"{scheme}://{service['metadata']['name']}:6379/0"
        assert flags["advertise-address"] == f"$(POD_IP):{flags['port']}"
        sources = {variable["name"]: variable.get("valueFrom") for variable in container["env"]}
        assert sources["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        password = sources[f"SPECDEC_{role.upper()}_REDIS_PASSWORD"]["secretKeyRef"]
        (job,) = [d for d in documents if d["kind"] == "Job" and component(d) == "secrets"]
        *_, made, keys = job["spec"]["template"]["spec"]["containers"][0]["args"]
        assert password["name"] == made and password["key"] in json.loads(keys)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        if tls == "mutual":  # The authority's certificate alone.
            assert volumes["redis-tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        else:
            assert "redis-tls" not in volumes


def test_no_secret_of_redis_is_in_a_flag(render: Render) -> None:
    documents = render("production")
    for role, _, container in containers(documents):
        assert not [flag for flag in container["args"] if flag.startswith(("--redis-url", "--redis-password"))]
        names = {variable["name"] for variable in container["env"] if "secretKeyRef" in variable.get("valueFrom", {})}
        settings = ("URL", "USERNAME", "PASSWORD", "SENTINEL_USERNAME", "SENTINEL_PASSWORD")
        told = {name for name in names if "REDIS" in name}
        assert told == ({f"SPECDEC_{role.upper()}_REDIS_{name}" for name in settings} if role in WITH_REDIS else set())


def test_data_fits_into_the_memory_that_redis_may_have(render: Render) -> None:
    documents = render(_case("redis=bundled"))
    deployment = next(d for d in documents if d["kind"] == "Deployment" and component(d) == "redis")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    flags = dict(zip(container["args"], container["args"][1:], strict=False))
    megabytes = int(flags["--maxmemory"].removesuffix("mb"))
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert 2 * megabytes <= limit
    assert flags["--maxmemory-policy"] == "volatile-lru"
    assert flags["--save"] == ""


def test_compose_starts_redis_as_the_chart_does(render: Render) -> None:
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["redis"]
    documents = render(_case("redis=bundled", "tls=off"))
    deployment = next(d for d in documents if d["kind"] == "Deployment" and component(d) == "redis")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [word.replace("$$", "$") for word in service["command"]] == container["args"]
    assert service["entrypoint"] == container["command"]
    assert container["image"] in service["image"]
    assert service["healthcheck"]["test"] == ["CMD", *container["readinessProbe"]["exec"]["command"]]
