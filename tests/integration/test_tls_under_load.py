"""Certificates of all services are renewed, and expire, while clients of both protocols ask over TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specdec.client import Client, ClientSettings, Completion
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable
from tests.support.servers.certificates import SecretVolume
from tests.support.services.clusters import TIMEOUTS, TINY_HOLD_OFF_MS
from tests.support.services.faults import CREDIT_WINDOW, Reading, SmallBuffers, eventually, make_request
from tests.support.services.model_pair import ModelPair
from tests.support.services.secured import Secured, replica_tls, secure

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(900)]
ROLES = ("target", "draft", "coordinator", "gateway")
WITHIN_S = 10.0
LIFETIME, SHORT = timedelta(seconds=15), timedelta(seconds=3)
RENEW_S = 4.0
NUM_RENEWALS = 12
NUM_CLIENTS = 3
NUM_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Fleet:
    """Four services with mutual TLS on every hop behind the gateway."""

    cluster: Cluster
    secured: Secured
    volumes: dict[str, SecretVolume]

    def renew(self, valid_for: timedelta) -> None:
        """Give all services new certificates."""
        for role, volume in self.volumes.items():
            certificate = self.secured.authority.issue(role, dns_names=[f"{role}.specdec"], valid_for=valid_for)
            volume.write(certificate, self.secured.authority.certificate)

    def client(self, kind: type[ClientSettings] = ClientSettings) -> Client:
        """A client over gRPC with a connection of its own."""
        shown = self.secured.client
        settings = kind(
            root_certificates=self.secured.authority.certificate, client_certificate=(shown.key, shown.chain)
        )
        return Client(self.cluster.address, settings)

    def http(self) -> httpx2.AsyncClient:
        """A client over HTTPS with a connection of its own."""
        trusted = ssl.create_default_context(cadata=self.secured.authority.certificate.decode())
        return httpx2.AsyncClient(base_url=f"https://{self.gateway}", verify=trusted, timeout=60.0)

    async def tells_of_expiry(self) -> bool:
        """Whether the log of each service says that its certificate has expired."""
        logs = [self.cluster.services[role].log_path for role in ROLES]
        return all("certificate_expired" in path.read_text() for path in logs)

    @property
    def gateway(self) -> str:
        """host:port of the gateway."""
        return self.cluster.services["gateway"].spec.address


@pytest.fixture
def fleet(tiny_pair: ModelPair, tmp_path: Path) -> Iterator[Fleet]:
    secured = secure(tmp_path / "unused")
    volumes = {
        role: SecretVolume(tmp_path / role, secured.authority.issue(role), secured.authority.certificate)
        for role in ROLES
    }
    serving: dict[str, dict[str, Any]] = {role: {"tls_dir": volumes[role].folder} for role in ROLES}
    for role in ("target", "draft", "coordinator"):
        serving[role] |= {"tls_verify_clients": True, "metrics_port": None}
    plan = LocalPlan(
        target_model=str(tiny_pair.target),
        draft_model=str(tiny_pair.draft),
        device="cpu",
        free_ports=True,
        target_settings={**serving["target"], "hold_off_ms": TINY_HOLD_OFF_MS},
        draft_settings={**serving["draft"], **replica_tls(volumes["draft"])},
        coordinator_settings={
            **serving["coordinator"],
            **replica_tls(volumes["coordinator"]),
            "credit_window_tokens": CREDIT_WINDOW,
        },
    )
    services = plan_services(plan, environment={})
    with Cluster(services, log_dir=tmp_path, timeouts=TIMEOUTS, credentials=secured.credentials()) as cluster:
        cluster.start()
        settings = RoleSettings(
            overrides={
                **serving["gateway"],
                "coordinators": [cluster.address],
                "coordinator_tls_dir": volumes["gateway"].folder,
            }
        )
        spec = service_spec("gateway", "gateway", free_port(), settings, environment={})
        with Cluster([spec], log_dir=tmp_path) as gateway:
            gateway.services["gateway"].start()
            cluster.services["gateway"] = gateway.services["gateway"]
            yield Fleet(cluster, secured, volumes)
            del cluster.services["gateway"]


def as_json(body: api.GenerateRequest) -> dict[str, Any]:
    sampling = body.sampling
    return {
        "prompt": body.prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


class Pauses:
    """The longest pause of any stream, from its request on."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.num_answers = 0

    async def grpc(self, client: Client, body: api.GenerateRequest) -> list[int]:
        """Token ids of an answer."""
        completion, last_s = Completion(), time.monotonic()
        async for chunk in client.generate(body):
            last_s = self._moved(last_s)
            completion.add(chunk)
        return completion.choices[0].token_ids

    async def http(self, client: httpx2.AsyncClient, body: api.GenerateRequest) -> list[int]:
        """The same over HTTP."""
        ids: list[int] = []
        last_s = time.monotonic()
        async with client.stream("POST", "/v1/completions", json=as_json(body)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                last_s = self._moved(last_s)
                ids += ids_of(line)
        return ids

    def _moved(self, last_s: float) -> float:
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - last_s)
        return now_s


def ids_of(line: str) -> list[int]:
    if not line.startswith("data: {"):
        return []
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]


async def up(fleet: Fleet) -> list[int]:
    """Wait until the gateway serves; returns the undisturbed answer."""
    ids: list[int] = []

    async def serves() -> bool:
        with suppress(httpx2.HTTPError, AssertionError):
            async with fleet.http() as client:
                ids[:] = await Pauses().http(client, make_request(max_tokens=NUM_TOKENS))
        return len(ids) == NUM_TOKENS

    await eventually(serves, "the gateway serves")
    return ids


@asynccontextmanager
async def load(ask: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Ask again and again, by several clients at once. What one raises is raised here."""
    ending = asyncio.Event()

    async def go_on() -> None:
        while not ending.is_set():
            await ask()

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(go_on())
        yield
        ending.set()


async def test_no_answer_notices_that_certificates_are_renewed_every_few_seconds(fleet: Fleet) -> None:
    expected, pauses = await up(fleet), Pauses()
    body = make_request(max_tokens=NUM_TOKENS)

    async def over_grpc() -> None:
        async with fleet.client() as client:  # a connection for each request: it meets every certificate
            assert await pauses.grpc(client, body) == expected
        pauses.num_answers += 1

    async def over_http() -> None:
        async with fleet.http() as client:
            assert await pauses.http(client, body) == expected
        pauses.num_answers += 1

    fleet.renew(LIFETIME)
    async with load(over_grpc), load(over_http):
        for _ in range(NUM_RENEWALS):
            await asyncio.sleep(RENEW_S)
            fleet.renew(LIFETIME)
        fleet.renew(timedelta(hours=1))
    assert pauses.num_answers > NUM_RENEWALS
    assert pauses.longest_s < WITHIN_S


async def test_streams_outlive_expired_certificates_and_new_ones_come_with_the_renewal(fleet: Fleet) -> None:
    expected = await up(fleet)
    body = make_request(max_tokens=NUM_TOKENS)
    async with fleet.client(SmallBuffers) as client, fleet.http() as http, Reading(client, body) as stream:
        await stream.until(20)
        async with http.stream("POST", "/v1/completions", json=as_json(body)) as answer:
            lines = answer.aiter_lines()
            ids: list[int] = []
            while len(ids) < 20:
                ids += ids_of(await anext(lines))
            fleet.renew(SHORT)
            expired = datetime.now(UTC) + SHORT
            while datetime.now(UTC) <= expired + timedelta(seconds=1):  # noqa: ASYNC110 - time passes
                await asyncio.sleep(0.2)
            with pytest.raises(Unavailable, match="expired"):
                async with fleet.client() as late:
                    await late.complete(body)
            async with fleet.http() as late_http:
                with pytest.raises(httpx2.ConnectError, match="expired"):
                    await late_http.get("/version")
            async for line in lines:
                ids += ids_of(line)
        assert (await stream.rest()).choices[0].token_ids == ids == expected
    await eventually(fleet.tells_of_expiry, "each service logs that its certificate has expired")
    fleet.renew(timedelta(hours=1))
    assert await up(fleet) == expected
    async with fleet.client() as client:
        assert await Pauses().grpc(client, body) == expected
