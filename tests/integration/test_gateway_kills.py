"""The same HTTP request gives the same tokens and text whatever is killed in mid-stream, and those of gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.service.server import SECOND_SIGNAL_S
from tests.support.servers.redis_server import RedisServer
from tests.support.services.clusters import TIMEOUTS, start_cluster
from tests.support.services.faults import (
    PATIENCE_S,
    addresses_of,
    another,
    eventually,
    load_of,
    make_request,
    scrape,
    start_again,
)
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 500
NUM_BEFORE = 30
"""Tokens that have come when something is killed: nearly all are still to come."""
SHARED: dict[str, object] = {"resume_secret": "a secret that two coordinators share", "redis_timeout_s": 20.0}
Answer = tuple[list[int], str, str]
"""Token ids, text and finish_reason."""


@dataclass
class Fleet:
    """Two coordinators, two targets and two drafts behind a gateway, all of them processes."""

    replicas: Cluster
    second: Cluster
    front: Cluster
    metrics_ports: tuple[int, int]
    url: str
    killed: list[tuple[Cluster, str]] = field(default_factory=list)

    @property
    def coordinators(self) -> tuple[Cluster, Cluster]:
        """The clusters that have the first and the second one."""
        return self.replicas, self.second

    def kill(self, cluster: Cluster, name: str) -> None:
        """SIGKILL; it is started again when the test has ended."""
        self.killed.append((cluster, name))
        cluster.kill(name)

    def start_again(self) -> None:
        """All that was killed."""
        while self.killed:
            cluster, name = self.killed.pop()
            start_again(cluster, name)

    def counted(self, name: str) -> float:
        """A metric of the coordinators that run, summed."""
        alive = [
            port
            for cluster, port in zip(self.coordinators, self.metrics_ports, strict=True)
            if cluster.services["coordinator"].is_running
        ]
        return sum(scrape(port).get(f"specdec_coordinator_{name}", 0.0) for port in alive)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def fleet(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "redis").mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        ports = (free_port(), free_port())
        shared = {**SHARED, "redis_url": redis.url}
        replicas = stack.enter_context(
            start_cluster(
                tiny_pair,
                folder / "replicas",
                num_targets=2,
                num_drafts=2,
                coordinator_settings={**shared, "owner_id": "one", "metrics_port": ports[0]},
            )
        )
        more = {**shared, **addresses_of(replicas), "owner_id": "two", "metrics_port": ports[1]}
        second = stack.enter_context(another("coordinator", folder / "second", **more))
        settings = RoleSettings(
            defaults={"log_format": "console", "drain_s": PATIENCE_S},
            overrides={"coordinators": [replicas.address, second.address]},
        )
        spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
        front = stack.enter_context(Cluster([spec], log_dir=folder / "front", timeouts=TIMEOUTS))
        front.start()
        yield Fleet(replicas, second, front, ports, f"http://{spec.address}")


@pytest.fixture
async def whole(fleet: Fleet) -> AsyncIterator[Fleet]:
    """The fleet, all of it running before and after."""
    replicas, second = fleet.coordinators
    replicas.wait_connected()
    second.wait_connected(num_ready=4)
    yield fleet
    fleet.start_again()


def body(seed: int, **fields: Any) -> dict[str, Any]:
    """A request that decodes to NUM_TOKENS."""
    same = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0}
    return {**same, "seed": seed, "return_token_ids": True, **fields}


async def over_grpc(fleet: Fleet, seed: int) -> Answer:
    """The answer without a gateway, undisturbed."""
    asked = make_request(prompt="Once upon a time", max_tokens=NUM_TOKENS, temperature=1.0, seed=seed)
    async with Client(fleet.replicas.address) as client:
        completion = await client.complete(asked)
    choice = completion.choices[0]
    return choice.token_ids, choice.text, "length"


class Stream:
    """A streamed answer that is read step by step."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.ids: list[int] = []
        self.text = ""
        self.endings: list[str] = []
        self.is_done = False

    async def until(self, num_tokens: int) -> None:
        """Read until this many tokens have come, or to the end."""
        while len(self.ids) < num_tokens and not self.is_done:
            await self._read_line()

    async def rest(self) -> Answer:
        """Read to the end."""
        while not self.is_done:
            await self._read_line()
        (ending,) = self.endings
        return self.ids, self.text, ending

    async def _read_line(self) -> None:
        line = await anext(self._lines)
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                self.ids += choice.get("token_ids") or []
                self.text += choice["text"]
                self.endings += [choice["finish_reason"]] if choice["finish_reason"] else []


def answer_of(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["text"], choice["finish_reason"]


async def the_coordinator_in_use(fleet: Fleet) -> tuple[Cluster, str]:
    for cluster in fleet.coordinators:
        async with Client(cluster.address) as client:
            if (await client.status()).num_running:
                return cluster, "coordinator"
    raise AssertionError("no coordinator runs a request")


async def _replica_in_use(fleet: Fleet, role: str) -> tuple[Cluster, str]:
    names = [name for name, service in fleet.replicas.services.items() if service.spec.role == role]
    found: list[str] = []

    async def is_known() -> bool:
        loads = {name: await load_of(role, fleet.replicas.services[name].spec.address) for name in names}
        found[:] = [name for name, load in loads.items() if load.kv_blocks_used]
        return len(found) == 1

    await eventually(is_known, f"one {role} has the session")
    return fleet.replicas, found[0]


async def the_target_in_use(fleet: Fleet) -> tuple[Cluster, str]:
    return await _replica_in_use(fleet, "target")


async def the_draft_in_use(fleet: Fleet) -> tuple[Cluster, str]:
    return await _replica_in_use(fleet, "draft")


async def failovers(fleet: Fleet) -> float:
    async with fleet.http() as client:
        page = (await client.get("/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith("specdec_gateway_failovers_total ")]
    return float(line.split()[1])


@pytest.mark.smoke
async def test_http_and_grpc_give_the_same_streamed_and_whole(whole: Fleet) -> None:
    expected = await over_grpc(whole, 3)
    async with whole.http() as client:
        assert answer_of((await client.post("/v1/completions", json=body(3))).json()) == expected
        async with client.stream("POST", "/v1/completions", json=body(3, stream=True)) as response:
            assert await Stream(response.aiter_lines()).rest() == expected
        plain = body(3, speculation={"enabled": False})
        assert answer_of((await client.post("/v1/completions", json=plain)).json()) == expected
    assert len(expected[0]) == NUM_TOKENS


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("find", "seed"),
    [(the_coordinator_in_use, 11), (the_target_in_use, 12), (the_draft_in_use, 13)],
    ids=["coordinator", "target", "draft"],
)
async def test_who_is_killed_in_mid_stream_is_not_seen(
    whole: Fleet, find: Callable[[Fleet], Any], seed: int, streams: bool
) -> None:
    expected = await over_grpc(whole, seed)
    failed_over, before = await failovers(whole), whole.counted("tokens_total")
    async with whole.http() as client:
        if streams:
            async with client.stream("POST", "/v1/completions", json=body(seed, stream=True)) as response:
                stream = Stream(response.aiter_lines())
                await stream.until(NUM_BEFORE)
                cluster, name = await find(whole)
                whole.kill(cluster, name)
                answer = await stream.rest()
        else:
            asking = asyncio.create_task(client.post("/v1/completions", json=body(seed)))

            async def has_begun() -> bool:
                return whole.counted("tokens_total") >= before + NUM_BEFORE

            await eventually(has_begun, "tokens are sent")
            cluster, name = await find(whole)
            whole.kill(cluster, name)
            answer = answer_of((await asking).json())
    assert answer == expected
    if name == "coordinator":
        assert await failovers(whole) > failed_over
    else:
        assert whole.counted("session_reopens_total") + whole.counted("draft_fallbacks_total") > 0


@pytest.mark.smoke
async def test_one_of_each_killed_one_after_the_other_in_one_stream_is_not_seen(whole: Fleet) -> None:
    expected = await over_grpc(whole, 14)
    asked = body(14, stream=True)
    async with whole.http() as client, client.stream("POST", "/v1/completions", json=asked) as response:
        stream = Stream(response.aiter_lines())
        for find in (the_draft_in_use, the_target_in_use, the_coordinator_in_use):
            await stream.until(len(stream.ids) + NUM_BEFORE)
            whole.kill(*await find(whole))
        assert await stream.rest() == expected


async def test_a_gateway_that_drains_ends_its_streams_whole_and_then_itself(whole: Fleet) -> None:
    expected = await over_grpc(whole, 15)
    service = whole.front.services["gateway"]
    async with whole.http() as client:
        async with client.stream("POST", "/v1/completions", json=body(15, stream=True)) as response:
            stream = Stream(response.aiter_lines())
            await stream.until(NUM_BEFORE)
            asking = asyncio.create_task(client.post("/v1/completions", json=body(15)))
            await stream.until(2 * NUM_BEFORE)
            service.terminate()
            await stream.until(3 * NUM_BEFORE)
            assert service.is_running
            assert await stream.rest() == expected
        whole_answer = await asking
        if whole_answer.status_code == 200:
            assert answer_of(whole_answer.json()) == expected
        else:  # It came when the gateway was draining.
            assert whole_answer.json()["error"]["code"] == "service_unavailable"

    async def has_left() -> bool:
        return not service.is_running

    await eventually(has_left, "the gateway has left")
    assert service.exit_code == 0
    start_again(whole.front, "gateway")
    async with whole.http() as client:
        assert answer_of((await client.post("/v1/completions", json=body(15))).json()) == expected


async def test_a_gateway_told_twice_to_end_says_so_in_the_stream(whole: Fleet) -> None:
    service = whole.front.services["gateway"]
    asked = body(16, stream=True, max_tokens=3000)
    async with whole.http() as client, client.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.aiter_lines()
        await Stream(lines).until(NUM_BEFORE)
        whole.front.signal("gateway", signal.SIGTERM)

        async def is_draining() -> bool:
            return (await client.get("/health")).status_code == 503

        await eventually(is_draining, "it has heard the first")
        await asyncio.sleep(SECOND_SIGNAL_S)
        whole.front.signal("gateway", signal.SIGTERM)
        last = [line async for line in lines if line][-2:]
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert last[1] == "data: [DONE]"

    async def has_left() -> bool:
        return not service.is_running

    await eventually(has_left, "the gateway has left")
    start_again(whole.front, "gateway")
