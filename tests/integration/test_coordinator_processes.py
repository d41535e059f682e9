"""Several coordinator processes behind one port: calls spread, metrics add up, and what dies is started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.cli.cluster import Cluster, free_port, port_is_free
from specdec.client import Client, ClientSettings, Completion
from specdec.resuming import generate_resuming
from specdec.rpc.errors import Unavailable
from tests.chaos.faults import Reading, addresses_of, another, eventually, make_request, scrape
from tests.integration.redis_server import RedisServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NAME = "many"
OWNERS = {f"{NAME}-0", f"{NAME}-1"}
MOST_CONNECTIONS = 64
NUM_TOKENS = 300
NUM_BEFORE = 20
WINDOW = 16
EXIT_S = 60.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def start(tiny_cluster: Cluster, redis: RedisServer, tmp_path: Path) -> Callable[..., Any]:
    """Starts a coordinator of two processes in front of the shared replicas."""

    def make(**settings: object) -> Any:
        return another(
            "coordinator",
            tmp_path / "coordinator",
            **{
                **addresses_of(tiny_cluster),
                "num_processes": 2,
                "redis_url": redis.url,
                "owner_id": NAME,
                "credit_window_tokens": WINDOW,
                "log_format": "json",
                **settings,
            },
        )

    return make


@asynccontextmanager
async def clients_of_both(cluster: Cluster) -> AsyncIterator[dict[str, list[Client]]]:
    """Clients by the process they are connected to, at least two of each; every client has its own connection."""
    clients: dict[str, list[Client]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        for number in range(MOST_CONNECTIONS):
            # Channels with equal arguments share a connection.
            settings = ClientSettings(keepalive_s=60.0 + number)
            client = await stack.enter_async_context(Client(cluster.address, settings))
            clients[(await client.status()).owner_id].append(client)
            if clients.keys() == OWNERS and min(map(len, clients.values())) >= 2:
                break
        assert clients.keys() == OWNERS
        yield clients


async def until_both_serve(metrics_port: int) -> None:
    async def serve() -> bool:
        return scrape(metrics_port).get("specdec_coordinator_processes") == 2

    await eventually(serve, "both processes serve")


def pid_of(cluster: Cluster, index: int) -> int:
    """The process number of one of the processes."""
    supervisor = cluster.services["coordinator"].pid
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")[-1] == str(index):
            return int(pid)
    raise AssertionError(f"no process {index}")


def counted(samples: dict[str, float]) -> dict[str, float]:
    """What must never go down."""
    return {name: value for name, value in samples.items() if name.partition("{")[0].endswith(("_total", "_count"))}


def events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def health_of(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        return int(check(health_pb2.HealthCheckRequest(), timeout=EXIT_S).status)


async def test_calls_spread_over_the_processes_and_add_up_on_one_page(start: Callable[..., Any]) -> None:
    metrics_port = free_port()
    with start(metrics_port=metrics_port) as cluster:
        await until_both_serve(metrics_port)
        async with clients_of_both(cluster) as clients:
            calls = [client.complete(make_request()) for of_one in clients.values() for client in of_one]
            completions = await asyncio.gather(*calls)
        samples = scrape(metrics_port)
    assert len({str(completion.identity) for completion in completions}) == 1
    assert samples["specdec_coordinator_requests_total{outcome=OK}"] == len(completions)
    assert samples["specdec_coordinator_tokens_total"] == sum(c.num_tokens for c in completions)
    assert samples["specdec_coordinator_request_seconds_count"] == len(completions)
    # Each process sees the same replicas, which are not more for that.
    assert samples["specdec_coordinator_replicas{role=target,state=ready}"] == 1
    assert samples["specdec_coordinator_replicas{role=draft,state=ready}"] == 1
    assert samples["specdec_build_info"] == 1
    assert samples["specdec_coordinator_requests_running"] == 0


async def test_a_process_that_is_killed_takes_only_its_streams_with_it_and_comes_back(
    start: Callable[..., Any],
) -> None:
    metrics_port, health_port = free_port(), free_port()
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    resumed = Completion()
    with start(metrics_port=metrics_port, health_port=health_port) as cluster:
        await until_both_serve(metrics_port)
        async with clients_of_both(cluster) as clients, AsyncExitStack() as stack:
            whole = await clients[f"{NAME}-1"][0].complete(body)
            plain, resuming = clients[f"{NAME}-0"][:2]
            lost = await stack.enter_async_context(Reading(plain, body))
            kept = await stack.enter_async_context(Reading(clients[f"{NAME}-1"][0], body))
            await asyncio.gather(lost.until(NUM_BEFORE), kept.until(NUM_BEFORE))
            before: dict[str, float] | None = None
            async for chunk in generate_resuming(resuming, body):
                resumed.add(chunk)
                if resumed.num_tokens >= NUM_BEFORE and before is None:
                    before = scrape(metrics_port)
                    assert before["specdec_coordinator_requests_running"] == 3
                    os.kill(pid_of(cluster, 0), signal.SIGKILL)
            with pytest.raises(Unavailable):
                await lost.rest()
            assert (await kept.rest()).identity == whole.identity
        assert health_of(health_port) == health_pb2.HealthCheckResponse.SERVING
        await until_both_serve(metrics_port)
        after = scrape(metrics_port)
        assert before is not None
        fallen = {name for name, value in counted(before).items() if after.get(name, -1.0) < value}
        async with clients_of_both(cluster) as clients:
            assert (await clients[f"{NAME}-0"][0].complete(body)).identity == whole.identity
        ended = events(cluster.services["coordinator"].log_path, "process_ended")
        running = scrape(metrics_port)["specdec_coordinator_requests_running"]
    assert resumed.identity == whole.identity
    assert fallen == set()
    assert after["specdec_coordinator_process_restarts_total"] == 1
    assert running == 0
    assert [(line["process"], line["exit_code"]) for line in ended] == [(0, -signal.SIGKILL)]


async def test_all_processes_drain_on_sigterm(start: Callable[..., Any]) -> None:
    metrics_port, health_port = free_port(), free_port()
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    with start(metrics_port=metrics_port, health_port=health_port) as cluster:
        service = cluster.services["coordinator"]
        await until_both_serve(metrics_port)
        async with clients_of_both(cluster) as clients, AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(Reading(of_one[0], body)) for of_one in clients.values()]
            await asyncio.gather(*(stream.until(NUM_BEFORE) for stream in streams))
            service.terminate()

            async def drains() -> bool:
                return scrape(metrics_port)["specdec_coordinator_processes"] == 0

            await eventually(drains, "both processes drain")
            assert health_of(health_port) == health_pb2.HealthCheckResponse.NOT_SERVING
            for of_one in clients.values():
                with pytest.raises(Unavailable):
                    await of_one[1].complete(body)
            first, second = await asyncio.gather(*(stream.rest() for stream in streams))
        assert await asyncio.to_thread(service.wait, EXIT_S)
        assert service.exit_code == 0
    assert first.finished is not None
    assert first.identity == second.identity


async def test_processes_die_with_their_supervisor(start: Callable[..., Any]) -> None:
    with start() as cluster:
        port = int(cluster.address.rpartition(":")[2])
        cluster.kill("coordinator")

        async def is_free() -> bool:
            return port_is_free(port)

        await eventually(is_free, "nobody listens any more")
        cluster.restart("coordinator")


async def test_the_processes_agree_on_a_free_port(start: Callable[..., Any], tmp_path: Path) -> None:
    with coordinator("--num-processes=2", "--redis-url=redis://127.0.0.1:1", "--targets=127.0.0.1:1") as process:
        listening = next_event(process, "listening")
        assert listening["num_processes"] == 2
        starting = next_event(process, "starting")
        assert starting["service"] == "coordinator-0"
        assert starting["port"] == listening["port"] > 0
        process.terminate()
        process.communicate(timeout=EXIT_S)
        assert process.returncode == 0


async def test_a_port_that_other_processes_share_is_in_use(start: Callable[..., Any]) -> None:
    with start() as cluster:
        port = cluster.address.rpartition(":")[2]
        result = told_by(f"--port={port}", "--num-processes=2", "--redis-url=redis://127.0.0.1:1", "--targets=a:1")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1
    assert json.loads(line)["event"] == "startup_failed"
    assert f"host, port: cannot listen on 127.0.0.1:{port}" in json.loads(line)["reason"]


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


@contextmanager
def coordinator(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "coordinator", "--host=127.0.0.1", "--port=0", "--metrics-port=null", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told_by(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a coordinator that must end by itself."""
    command = [sys.executable, "-m", "coordinator", "--host=127.0.0.1", "--port=0", "--metrics-port=null", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=EXIT_S, check=False)


def next_event(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        record: dict[str, Any] = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"no {event}")
