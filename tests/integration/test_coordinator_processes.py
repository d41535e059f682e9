"""Several coordinator processes behind one port: calls spread, metrics add up, and what dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client, Completion, generate_resuming
from specdec.commands.up.cluster import Cluster, free_port, port_is_free
from specdec.wire.errors import RequestExists, Unavailable
from tests.support.servers.redis_server import RedisServer
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    SmallBuffers,
    addresses_of,
    another,
    eventually,
    make_request,
    scrape,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NAME = "many"
OWNERS = {f"{NAME}-0", f"{NAME}-1"}
MOST_CONNECTIONS = 64
NUM_TOKENS = 300
NUM_BEFORE = 20
EXIT_S = 60.0
PREFIX = "specdec_coordinator_"
COORDINATOR = [sys.executable, "-m", "specdec.coordinator", "--host=127.0.0.1", "--port=0", "--metrics-port=null"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Start = Callable[[], AbstractContextManager["Running"]]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def start(tiny_cluster: Cluster, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a coordinator of two processes in front of the shared replicas; it is `Running` when both serve."""

    @contextmanager
    def make() -> Iterator[Running]:
        metrics_port, health_port = free_port(), free_port()
        settings: dict[str, object] = {
            **addresses_of(tiny_cluster),
            "num_processes": 2,
            "redis_url": redis.url,
            "redis_timeout_s": 20.0,
            "owner_id": NAME,
            "credit_window_tokens": CREDIT_WINDOW,
            "log_format": "json",
            "metrics_port": metrics_port,
            "health_port": health_port,
        }
        with another("coordinator", tmp_path_factory.mktemp("coordinator"), **settings) as cluster:
            running = Running(cluster, metrics_port, health_port)
            asyncio.run(running.until_both_serve())
            yield running

    return make


@pytest.fixture(scope="module")
def shared(start: Start) -> Iterator[Running]:
    """One that no test ends."""
    with start() as running:
        yield running


@dataclass(frozen=True, slots=True)
class Running:
    """A coordinator of two processes."""

    cluster: Cluster
    metrics_port: int
    health_port: int

    async def until_both_serve(self) -> None:
        async def serve() -> bool:
            return self.metrics().get("processes") == 2

        await eventually(serve, "both processes serve")

    def metrics(self) -> dict[str, float]:
        """The page's samples, without the prefix of the coordinator's."""
        return {name.removeprefix(PREFIX): value for name, value in scrape(self.metrics_port).items()}

    def health(self) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            return int(check(health_pb2.HealthCheckRequest(), timeout=EXIT_S).status)

    def pid(self, index: int) -> int:
        """The process number of one of the processes."""
        supervisor = self.cluster.services["coordinator"].pid
        for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")[-1] == str(index):
                return int(pid)
        raise AssertionError(f"no process {index}")


@asynccontextmanager
async def clients_of_both(cluster: Cluster) -> AsyncIterator[dict[str, list[Client]]]:
    """Clients by the process they are connected to, at least two of each; every client has its own connection.

    Their streams stand still while they are not read.
    """
    clients: dict[str, list[Client]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        for number in range(MOST_CONNECTIONS):
            # Channels with equal arguments share a connection.
            settings = SmallBuffers(keepalive_s=60.0 + number)
            client = await stack.enter_async_context(Client(cluster.address, settings))
            clients[(await client.status()).owner_id].append(client)
            if clients.keys() == OWNERS and min(map(len, clients.values())) >= 2:
                break
        assert clients.keys() == OWNERS
        yield clients


def counted(samples: dict[str, float]) -> dict[str, float]:
    """What must never go down."""
    return {name: value for name, value in samples.items() if name.partition("{")[0].endswith(("_total", "_count"))}


def events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


async def test_calls_spread_over_the_processes_and_add_up_on_one_page(shared: Running) -> None:
    before = shared.metrics()
    async with clients_of_both(shared.cluster) as clients:
        calls = [client.complete(make_request()) for of_one in clients.values() for client in of_one]
        completions = await asyncio.gather(*calls)
    after = shared.metrics()
    more = {name: value - before.get(name, 0.0) for name, value in counted(after).items()}
    assert len({str(completion.identity) for completion in completions}) == 1
    assert more["requests_total{outcome=OK}"] == more["request_seconds_count"] == len(completions)
    assert more["tokens_total"] == sum(c.num_tokens for c in completions)
    # Each process sees the same replicas, which are not more for that.
    assert after["replicas{role=target,state=ready}"] == after["replicas{role=draft,state=ready}"] == 1
    assert after["specdec_build_info"] == 1
    assert after["requests_running"] == 0


async def test_a_process_that_is_killed_takes_only_its_streams_with_it_and_comes_back(shared: Running) -> None:
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    resumed = Completion()
    before: dict[str, float] = {}
    async with clients_of_both(shared.cluster) as clients, AsyncExitStack() as stack:
        (plain, resuming, *_), (other, *_) = (clients[f"{NAME}-{index}"] for index in range(2))
        whole = await other.complete(body)
        lost, kept = [await stack.enter_async_context(Reading(client, body)) for client in (plain, other)]
        await asyncio.gather(lost.until(NUM_BEFORE), kept.until(NUM_BEFORE))
        async for chunk in generate_resuming(resuming, body):
            resumed.add(chunk)
            if resumed.num_tokens >= NUM_BEFORE and not before:
                before = shared.metrics()
                os.kill(shared.pid(0), signal.SIGKILL)
        with pytest.raises(Unavailable):
            await lost.rest()
        assert (await kept.rest()).identity == resumed.identity == whole.identity
    assert shared.health() == SERVING
    await shared.until_both_serve()
    after = shared.metrics()
    async with clients_of_both(shared.cluster) as clients:
        assert (await clients[f"{NAME}-0"][0].complete(body)).identity == whole.identity
    ended = events(shared.cluster.services["coordinator"].log_path, "process_ended")
    assert before["requests_running"] == 3
    assert {name for name, value in counted(before).items() if after.get(name, -1.0) < value} == set()
    assert after["process_restarts_total"] - before["process_restarts_total"] == 1
    assert after["requests_running"] == 0
    assert [(line["process"], line["exit_code"]) for line in ended] == [(0, -signal.SIGKILL)]


async def test_a_process_that_hangs_is_killed_and_comes_back(shared: Running) -> None:
    stopped = shared.pid(1)
    os.kill(stopped, signal.SIGSTOP)

    async def is_replaced() -> bool:
        with contextlib.suppress(AssertionError):
            return shared.pid(1) != stopped
        return False

    await eventually(is_replaced, "the stopped process is replaced")
    await shared.until_both_serve()
    log = shared.cluster.services["coordinator"].log_path.read_text().splitlines()
    hung = [line for line in map(json.loads, log) if line["event"] == "process_hung"]
    assert [(line["process"], line["pid"]) for line in hung] == [(1, stopped)]


async def test_an_id_that_runs_in_one_process_is_taken_in_the_other(shared: Running) -> None:
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    body.request_id = "runs once"
    async with clients_of_both(shared.cluster) as clients:
        (one, *_), (other, *_) = clients.values()
        async with Reading(one, body) as stream:
            await stream.until(NUM_BEFORE)
            with pytest.raises(RequestExists):
                await other.complete(body)
            assert (await stream.rest()).finished is not None


def test_a_port_that_other_processes_share_is_in_use(shared: Running) -> None:
    port = shared.cluster.address.rpartition(":")[2]
    result = told_by(f"--port={port}", "--num-processes=2", "--redis-url=redis://127.0.0.1:1", "--targets=a:1")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1
    assert json.loads(line)["event"] == "startup_failed"
    assert f"host, port: cannot listen on 127.0.0.1:{port}" in json.loads(line)["reason"]


def test_all_processes_drain_on_sigterm_and_die_with_their_supervisor(start: Start) -> None:
    with start() as running:
        asyncio.run(drain(running))
        cluster = running.cluster
        assert cluster.services["coordinator"].exit_code == 0
        cluster.restart("coordinator")
        port = int(cluster.address.rpartition(":")[2])
        cluster.kill("coordinator")

        async def is_free() -> bool:
            return port_is_free(port)

        asyncio.run(eventually(is_free, "nobody listens any more"))


async def drain(running: Running) -> None:
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    service = running.cluster.services["coordinator"]
    async with clients_of_both(running.cluster) as clients, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(Reading(of_one[0], body)) for of_one in clients.values()]
        await asyncio.gather(*(stream.until(NUM_BEFORE) for stream in streams))
        service.terminate()

        async def drains() -> bool:
            return running.metrics()["processes"] == 0

        await eventually(drains, "both processes drain")
        assert running.health() == NOT_SERVING
        for of_one in clients.values():
            with pytest.raises(Unavailable):
                await of_one[1].complete(body)
        first, second = await asyncio.gather(*(stream.rest() for stream in streams))
    assert await asyncio.to_thread(service.wait, EXIT_S)
    assert first.finished is not None
    assert first.identity == second.identity


def test_the_processes_agree_on_a_free_port() -> None:
    arguments = ("--num-processes=2", "--redis-url=redis://127.0.0.1:1", "--targets=127.0.0.1:1")
    with subprocess.Popen([*COORDINATOR, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            listening, starting = next_event(process, "listening"), next_event(process, "starting")
            process.terminate()
            process.communicate(timeout=EXIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert listening["num_processes"] == 2
    assert starting["service"] == "coordinator-0"
    assert starting["port"] == listening["port"] > 0


def test_what_is_wrong_with_settings_is_told_once() -> None:
    result = told_by("--num-processes=2", "--targets=a:1")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert "num_processes" in line
    assert "redis_url" in line


def test_what_keeps_the_first_process_from_starting_is_told_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: 7\n")
    result = told_by(
        "--num-processes=4", "--redis-url=redis://127.0.0.1:1", "--targets=127.0.0.1:1", f"--api-keys-file={keys}"
    )
    told = [line for line in map(json.loads, result.stderr.splitlines()) if line["event"] == "startup_failed"]
    assert result.returncode == 1
    assert [(line["service"], "api_keys_file" in line["reason"]) for line in told] == [("coordinator-0", True)]


def told_by(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a coordinator that must end by itself."""
    return subprocess.run([*COORDINATOR, *arguments], stderr=subprocess.PIPE, text=True, timeout=EXIT_S, check=False)


def next_event(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        record: dict[str, Any] = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"no {event}")
