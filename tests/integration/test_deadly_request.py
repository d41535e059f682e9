"""A request that ends every engine that steps it, among many others, with real engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.deadly_target import DEADLY
from tests.support.services.faults import another, eventually, sampled_request
from tests.support.services.model_pair import ModelPair

WITHIN_S = 10.0
"""By default."""
NUM_TOKENS = 200
NUM_BEFORE = 8
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@contextmanager
def deadly_targets(pair: ModelPair, log_dir: Path, count: int) -> Iterator[Cluster]:
    """Targets whose engines end in any step that computes one token."""
    settings = RoleSettings(
        defaults={"metrics_port": None, "log_format": "json", "device": "cpu", "num_threads": 1, "engine_cores": "off"},
        overrides={"model": pair.target, "hold_off_ms": 0},
    )
    specs = [
        replace(
            service_spec("target", f"target-{number}", free_port(), settings, environment={}),
            module="tests.support.services.deadly_target",
        )
        for number in range(count)
    ]
    with Cluster(specs, log_dir=log_dir, timeouts=TIMEOUTS) as cluster:
        for service in cluster.services.values():
            service.start()
        for name in cluster.services:
            cluster.wait_healthy(name)
        yield cluster


def innocent(seed: int) -> api.GenerateRequest:
    body = sampled_request(seed, max_tokens=NUM_TOKENS)
    body.sampling.logit_bias[DEADLY] = -100
    return body


def guilty() -> api.GenerateRequest:
    return sampled_request(1, prompt=[20, 21, DEADLY, 23], max_tokens=NUM_TOKENS)


class Watched:
    """A stream, and the longest time for which nothing of it came."""

    def __init__(self) -> None:
        self.completion = Completion()
        self.longest_s = 0.0
        self.has_begun = asyncio.Event()

    async def read(self, client: Client, body: api.GenerateRequest) -> None:
        last_s = time.monotonic()
        async for chunk in client.generate(body):
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
            self.completion.add(chunk)
            if self.completion.num_tokens >= NUM_BEFORE:
                self.has_begun.set()


def events_of(cluster: Cluster, name: str) -> list[datetime]:
    """When something was logged, by all services."""
    lines = [line for service in cluster.services.values() for line in service.log_path.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return sorted(datetime.fromisoformat(event["timestamp"]) for event in events if event["event"] == name)


def without_engine_s(cluster: Cluster) -> float:
    """How long no engine was there, as a second one had ended before the first was loaded again, and was waited for."""
    deaths, again = events_of(cluster, "engine_exited"), events_of(cluster, "engine_ready_again")
    is_one_left = len(cluster.services) > len(deaths)
    return 0.0 if is_one_left or not again else max(0.0, (again[0] - deaths[-1]).total_seconds())


@pytest.mark.parametrize(("num_innocent", "num_targets"), [(16, 2), pytest.param(64, 3, marks=pytest.mark.long)])
async def test_a_deadly_request_ends_two_engines_and_all_others_go_on_exactly_within_ten_seconds(
    num_innocent: int, num_targets: int, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    """Ten seconds, and where both engines there were have ended, until one is loaded again."""
    with ExitStack() as stack:
        targets = stack.enter_context(deadly_targets(tiny_pair, tmp_path / "targets", num_targets))
        addresses = [service.spec.address for service in targets.services.values()]
        settings = {"targets": addresses, "target_timeout_s": 120.0}
        coordinator = stack.enter_context(another("coordinator", tmp_path / "coordinator", **settings))
        coordinator.wait_connected(num_ready=num_targets)
        bodies = [innocent(seed) for seed in range(num_innocent)]
        async with Client(coordinator.address) as client:
            undisturbed = await asyncio.gather(*(client.complete(body) for body in bodies))
            streams = [Watched() for _ in bodies]
            async with asyncio.TaskGroup() as reading:
                for stream, body in zip(streams, bodies, strict=True):
                    reading.create_task(stream.read(client, body))
                for stream in streams:
                    await stream.has_begun.wait()
                with pytest.raises(SpecdecError) as caught:
                    await client.complete(guilty())
        assert caught.value.reason == "REQUEST_QUARANTINED"

        async def are_two_told() -> bool:
            return len(events_of(targets, "engine_exited")) == 2

        # The coordinator knows of an end before its replica has logged it; streams may go on, and end, meanwhile.
        await eventually(are_two_told, "two engines have ended")
        for stream, expected in zip(streams, undisturbed, strict=True):
            assert stream.completion.identity == expected.identity
        assert max(stream.longest_s for stream in streams) < WITHIN_S + without_engine_s(targets)
