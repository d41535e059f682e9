"""Faults in real processes, and the alerts that tell of them, evaluated by a real Prometheus.

The rules are those of deploy/prometheus, but for three things: they do not wait (`for` is left out), their windows are
seconds (`WINDOWS`), and what is absent is looked for in a namespace, as the chart does it. promtool's tests hold the
rules as they are, with made-up series, and SpecdecDraftFallbacks and SpecdecTargetSaturated, for which there is no
fault here that holds on every machine.

Part of `make test-long`: how long a queue stays depends on the speed of the machine, so a load that saturates one may
leave a gap in a short window on another.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import yaml

from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.commands.up.service_process import ServiceProcess
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.servers.prometheus_server import NAMESPACE, RULES, PrometheusServer, prometheus_server
from tests.support.servers.redis_server import RedisServer, redis_client
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import eventually
from tests.support.services.model_pair import ModelPair, with_another_tokenizer
from tests.support.services.peer import WIRES, Peer, open_session
from tests.support.services.secured import secure
from tests.support.services.tiny_pair import make_tiny_pair

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

WINDOW = "10s"
# Restarts are counted over longer than it takes to start a process a few times.
WINDOWS = {"15m": "60s"}
# Patient scrapes: one that times out leaves a gap, and here every sample counts.
INTERVAL = "1s"
REFUSED_S = 0.25
BAD_NOISE = 0.5
MAX_RUNNING = 6
MAX_WAITING = 4
NUM_WORKERS = 4 * (MAX_RUNNING + MAX_WAITING)  # twice what both processes hold
LONG = timedelta(days=90)
JOBS = ("coordinator", "target", "draft", "stranger")
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


def hurried(text: str) -> str:
    """Rules with windows of seconds that do not wait."""
    text = re.sub(r"\[(\d+[mhd])\]", lambda match: f"[{WINDOWS.get(match[1], WINDOW)}]", text)
    text = text.replace(
        "absent(specdec_coordinator_requests_running)",
        f'absent(specdec_coordinator_requests_running{{namespace="{NAMESPACE}"}})',
    )
    return re.sub(r"(?m)^ +for: \w+\n", "", text)


@dataclass(frozen=True)
class Fleet:
    """A target, a draft and a coordinator of two processes, their Redis, and the Prometheus that scrapes them."""

    cluster: Cluster
    redis: RedisServer
    prometheus: PrometheusServer
    ports: dict[str, int]
    authority: Authority
    shown: SecretVolume
    """What all services show to Redis."""

    def fires(self, name: str, role: str) -> None:
        """Wait until a service's alert fires, and check what it tells: every label that its texts name is there."""
        instance = {"instance": f"127.0.0.1:{self.ports[role]}"} if role else {}
        alert = self.prometheus.wait_for_alert(name, namespace=NAMESPACE, **instance)
        rule = ALERTS[name]
        for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert alert["labels"].get(label), f"{name} has no {label}"
        assert alert["labels"]["severity"] == rule["labels"]["severity"]
        assert not re.search(r"<no value>|{{|%!|NaN", " ".join(alert["annotations"].values())), alert["annotations"]

    def silent(self, *names: str) -> None:
        """Wait until these alerts are silent."""
        self.prometheus.wait_for_silence(*names)


@pytest.fixture(scope="module")
def fleet(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("alerts")
    rules = folder / "rules"
    rules.mkdir()
    for name in ("recording.yml", "alerts.yml"):
        (rules / name).write_text(hurried((RULES / name).read_text()))
    pair = ModelPair(tiny_pair.target, make_tiny_pair(folder / "tiny_bad_pair", noise=BAD_NOISE).draft)
    ports = {job: free_port() for job in JOBS}
    secured = secure(folder / "tls")
    authority = secured.authority.certificate
    # Its own volume: what the fleet shows is spoilt, what Redis shows is not.
    shown = SecretVolume(folder / "shown", secured.authority.issue("fleet", valid_for=LONG), authority)
    tls = redis_client(shown)
    with (
        RedisServer(folder, tls=secured.volume) as redis,
        start_cluster(
            pair,
            folder / "cluster",
            redis_url=redis.url,
            target_settings={
                "metrics_port": ports["target"],
                # Less than those that decode at once fill, however far each is; some wait all the same.
                "num_blocks": 20,
                "max_batch_seqs": 4,
                **tls,
            },
            draft_settings={"metrics_port": ports["draft"], **tls},
            coordinator_settings={
                "metrics_port": ports["coordinator"],
                "num_processes": 2,
                "max_running": MAX_RUNNING,
                "max_waiting": MAX_WAITING,
                "target_timeout_s": 0.5,
                **tls,
            },
        ) as cluster,
        prometheus_server(folder / "prometheus", ports, rules, interval=INTERVAL) as prometheus,
    ):
        prometheus.wait_for('count(up{job!="stranger"} == 1) == 3')
        yield Fleet(cluster, redis, prometheus, ports, secured.authority, shown)


def body(max_tokens: int, speculate: bool) -> coordinator_pb2.GenerateRequest:
    message = coordinator_pb2.GenerateRequest(prompt="Once upon a time, far away, there was a king")
    message.sampling.temperature = 1.0
    message.sampling.max_tokens = max_tokens
    message.sampling.ignore_eos = True
    message.speculation.enabled = speculate
    return message


@asynccontextmanager
async def load(fleet: Fleet, num_workers: int, *, max_tokens: int = 64, speculate: bool = True) -> AsyncIterator[None]:
    """Workers that send one request after another, whatever becomes of them, without the retries of our client."""

    async def work(number: int) -> None:
        # With an argument of its own, so that connections, and with them requests, spread over the processes.
        options = [("grpc.keepalive_time_ms", 60_000 + number)]
        async with grpc.aio.insecure_channel(fleet.cluster.address, options) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while True:
                try:
                    async for _ in stub.Generate(body(max_tokens, speculate), wait_for_ready=True):
                        pass
                except grpc.RpcError:
                    await asyncio.sleep(REFUSED_S)

    workers = [asyncio.create_task(work(number)) for number in range(num_workers)]
    try:
        yield
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@contextmanager
def killed(fleet: Fleet, name: str) -> Iterator[None]:
    """A service is dead within, and back after."""
    fleet.cluster.kill(name)
    try:
        yield
    finally:
        fleet.cluster.restart(name)


async def told(fleet: Fleet, *alerts: tuple[str, str]) -> None:
    """Wait until these alerts fire, each of a role, or of all ("")."""
    for name, role in alerts:
        await asyncio.to_thread(fleet.fires, name, role)


async def test_nothing_fires_while_all_is_well(fleet: Fleet) -> None:
    async with load(fleet, 2, speculate=False):
        # A whole window of good requests is known to the rules.
        good = f'count_over_time((specdec:requests:rate5m{{outcome="OK"}} > 0)[{WINDOW}:1s]) >= 5'
        await asyncio.to_thread(fleet.prometheus.wait_for, good)
        assert fleet.prometheus.alerts() == []
        rules = [rule for rule in fleet.prometheus.rules() if rule["type"] == "alerting"]
    assert {(rule["name"], rule["health"]) for rule in rules} == {(name, "ok") for name in ALERTS}


async def test_a_draft_that_guesses_badly_and_slows_its_target_down(fleet: Fleet) -> None:
    async with load(fleet, 1):
        await told(fleet, ("SpecdecLowAcceptance", ""), ("SpecdecSpeculationNotPaying", "target"))


async def test_more_load_than_fits(fleet: Fleet) -> None:
    async with load(fleet, NUM_WORKERS, max_tokens=150, speculate=False):
        await told(
            fleet,
            ("SpecdecAdmissionRejects", ""),
            ("SpecdecRequestsWait", "coordinator"),
            ("SpecdecKvPressure", "target"),
        )
    await asyncio.to_thread(fleet.silent, "SpecdecRequestsWait", "SpecdecKvPressure")


async def test_a_target_that_is_gone_fails_requests(fleet: Fleet) -> None:
    async with load(fleet, 2 * MAX_RUNNING):
        with killed(fleet, "target"):
            await told(
                fleet,
                ("SpecdecTargetTierDown", "coordinator"),
                ("SpecdecErrorBudgetBurnFast", ""),
                ("SpecdecErrorBudgetBurnSlow", ""),
            )
        await asyncio.to_thread(fleet.silent, "SpecdecTargetTierDown", "SpecdecErrorBudgetBurnFast")


async def test_a_draft_that_is_gone(fleet: Fleet) -> None:
    async with load(fleet, 2):
        with killed(fleet, "draft"):
            await told(fleet, ("SpecdecDraftTierDown", "coordinator"))
        await asyncio.to_thread(fleet.silent, "SpecdecDraftTierDown")


async def test_a_draft_of_another_version_with_another_tokenizer(
    fleet: Fleet, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    settings = {
        "model": with_another_tokenizer(tiny_pair.draft, tmp_path / "model"),
        "metrics_port": fleet.ports["stranger"],
        "redis_url": fleet.redis.url,
        **redis_client(fleet.shown),
        "device": "cpu",
    }
    spec = service_spec("draft", "stranger", free_port(), RoleSettings(overrides=settings), environment={})
    stranger = ServiceProcess(replace(spec, module="tests.support.services.older_draft"), tmp_path / "stranger.log")
    stranger.start()
    try:
        await told(fleet, ("SpecdecReplicaIncompatible", "coordinator"), ("SpecdecVersionSkew", ""))
    finally:
        stranger.kill()
    await asyncio.to_thread(fleet.silent, "SpecdecVersionSkew")


async def test_a_redis_that_is_gone(fleet: Fleet) -> None:
    async with load(fleet, 1):
        fleet.redis.stop()
        try:
            await told(
                fleet,
                ("SpecdecJournalFailing", "coordinator"),
                ("SpecdecReplicaCannotRegister", "target"),
                ("SpecdecReplicaCannotRegister", "draft"),
            )
        finally:
            fleet.redis.start()
        await asyncio.to_thread(fleet.silent, "SpecdecReplicaCannotRegister")


async def test_a_certificate_that_expires_soon_and_one_that_is_not_its_keys(fleet: Fleet) -> None:
    issue, authority = fleet.authority.issue, fleet.authority.certificate
    try:
        soon = issue("fleet", valid_for=timedelta(hours=1))
        fleet.shown.write(soon, authority)
        await told(fleet, *(("SpecdecCertificateExpiresSoon", role) for role in ("coordinator", "target", "draft")))
        fleet.shown.write(Certificate(issue("fleet").key, soon.chain), authority)
        await told(fleet, *(("SpecdecCertificateRefused", role) for role in ("coordinator", "target", "draft")))
    finally:
        fleet.shown.write(issue("fleet", valid_for=LONG), authority)
    await asyncio.to_thread(fleet.silent, "SpecdecCertificateExpiresSoon", "SpecdecCertificateRefused")


async def test_a_coordinator_that_contradicts_itself(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(fleet.cluster.services["draft"].spec.address) as channel:
        peer = Peer(channel, WIRES["draft"], "contradicts-itself")
        await peer.attach()
        await peer.send(open=open_session())
        await peer.send(commit=pb.Commit(start_position=10**6, token_ids=[1]))
        await told(fleet, ("SpecdecTokenMismatches", "draft"))


async def test_a_coordinator_whose_processes_end_again_and_again(fleet: Fleet) -> None:
    restarts = "specdec_coordinator_process_restarts_total"
    for number in range(1, 5):
        os.kill(await a_process_of(fleet.cluster), signal.SIGKILL)
        await asyncio.to_thread(fleet.prometheus.wait_for, f"{restarts} >= {number}")
    await told(fleet, ("SpecdecCoordinatorProcessesRestart", "coordinator"))


async def a_process_of(cluster: Cluster) -> int:
    """The number of a process that the coordinator's supervisor has started."""
    supervisor = cluster.services["coordinator"].pid
    found: list[int] = []

    async def is_there() -> bool:
        found[:] = children_of(supervisor)
        return bool(found)

    await eventually(is_there, "a process runs")
    return found[0]


def children_of(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_coordinator_that_is_gone(fleet: Fleet) -> None:
    with killed(fleet, "coordinator"):
        await told(fleet, ("SpecdecCoordinatorDown", ""))
    await asyncio.to_thread(fleet.silent, "SpecdecCoordinatorDown")
