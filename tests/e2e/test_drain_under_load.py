"""Two targets, two drafts and two coordinators under load: one of each leaves and comes back, and no stream notices.

And with nobody leaving, a conversation goes where its tokens are.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import Cluster, free_port
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import (
    CREDIT_WINDOW,
    POLL_S,
    Reading,
    addresses_of,
    another,
    eventually,
    held_back,
    sampled_request,
    scrape,
)
from tests.support.services.load import NUM_BEFORE, LongStream, collect
from tests.support.services.tiny_pair import make_tiny_pair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SECRET = "a secret that two coordinators share"
NUM_LOADERS = 6
NUM_BODIES = 10
NUM_PROMPT_TOKENS = 16
"""Too few to be sent where they are cached: the load alone decides, also when a replica comes back with nothing."""
NUM_TOKENS = 80
NUM_LONG = 4
NUM_LONG_TOKENS = 300
NUM_PLAIN = 4
NUM_PLAIN_TOKENS = 300
CONTEXT = 1536
REPLICA_DRAIN_S = 5.0
SETTLED_S = 1.0
"""By then a replica has opened what was on its way when a coordinator learnt that it drains."""
COORDINATOR_DRAIN_S = 1.0
LONG_DRAIN_S = 120.0
EXIT_S = 60.0
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Identity = list[tuple[int, list[int], str]]


def make_body(seed: int, max_tokens: int = NUM_TOKENS) -> api.GenerateRequest:
    body = api.GenerateRequest()
    body.prompt_token_ids.token_ids.extend(10 + (seed * 7 + i * 3) % 200 for i in range(NUM_PROMPT_TOKENS))
    body.sampling.temperature, body.sampling.seed, body.sampling.ignore_eos = 1.0, seed, True
    body.sampling.max_tokens = max_tokens
    return body


@dataclass(frozen=True, slots=True)
class Service:
    """A service that can leave and come back; its metrics are read where its last start put them."""

    cluster: Cluster
    name: str

    @property
    def address(self) -> str:
        return self.cluster.services[self.name].spec.address

    @property
    def is_running(self) -> bool:
        return self.cluster.services[self.name].is_running

    def count(self, metric: str) -> float:
        ports = re.findall(r"metrics_port=(\d+)", self.cluster.services[self.name].log_path.read_text())
        return scrape(int(ports[-1])).get(f"specdec_{metric}", 0.0)

    def num_reopens(self, role: str) -> float:
        """Of a coordinator: sessions that went to another replica."""
        return self.count(f"coordinator_session_reopens_total{{role={role}}}")

    @asynccontextmanager
    async def draining(self) -> AsyncIterator[None]:
        """Tell it to leave: entered when it says that it no longer serves, left when it has ended in order."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(  # type: ignore[no-untyped-call]
                health_pb2.HealthCheckRequest()
            )
            await watch.read()
            self.cluster.services[self.name].terminate()
            while (await watch.read()).status != NOT_SERVING:
                pass
        yield
        service = self.cluster.services[self.name]
        assert await asyncio.to_thread(service.wait, EXIT_S), f"{self.name} did not end"
        assert service.exit_code == 0

    async def come_back(self) -> None:
        """Start it on the same port; returns when it is healthy."""
        self.cluster.services[self.name].start()
        await asyncio.to_thread(self.cluster.wait_healthy, self.name)


@dataclass(slots=True)
class Load:
    """Clients that send one request after the other, over both coordinators, until they are told to stop."""

    addresses: str
    wanted: list[Identity]
    num_done: int = 0
    is_over: bool = False
    differing: list[int] = field(default_factory=list)

    async def run(self, number: int) -> None:
        # Channels with equal arguments would share their connections.
        async with Client(self.addresses, ClientSettings(keepalive_s=60.0 + number)) as client:
            for index in itertools.cycle(range(NUM_BODIES)):
                completion = await collect(client, make_body(index))
                if completion.identity != self.wanted[index] or completion.finished is None:
                    self.differing.append(index)
                self.num_done += 1
                if self.is_over:
                    return


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two of each, and a coordinator."""
    folder = tmp_path_factory.mktemp("tiny_two_of_each")
    with start_cluster(
        make_tiny_pair(folder, max_model_len=CONTEXT),
        folder / "logs",
        num_targets=2,
        num_drafts=2,
        target_settings={"drain_s": REPLICA_DRAIN_S, "metrics_port": 0},
        draft_settings={"drain_s": REPLICA_DRAIN_S, "metrics_port": 0},
        coordinator_settings=COORDINATOR | {"metrics_port": free_port()},
    ) as cluster:
        yield cluster


COORDINATOR: dict[str, object] = {
    "resume_secret": SECRET,
    "credit_window_tokens": CREDIT_WINDOW,
    "drain_s": COORDINATOR_DRAIN_S,
    "reconnect_backoff_max_s": 0.5,
}


@contextmanager
def one_more_coordinator(replicas: Cluster, folder: Path, **settings: object) -> Iterator[Service]:
    settings = {**addresses_of(replicas), **COORDINATOR, "metrics_port": free_port(), **settings}
    with another("coordinator", folder, **settings) as cluster:
        yield Service(cluster, "coordinator")


async def gets_work(work: list[tuple[Service, str]]) -> None:
    """Wait until each service has begun some, by the metric that counts it."""
    for service, metric in work:

        async def has_some(service: Service = service, metric: str = metric) -> bool:
            return service.count(metric) > 0

        await eventually(has_some, f"{service.name} gets work")


async def replica_leaves(replica: Service, role: str, seen_by: Service) -> None:
    """A replica drains; once the coordinator knows, it gets no more sessions, and then it is gone.

    A draft's sessions move at once, and it may have left before anybody looked; a target keeps the long streams.
    """
    num_opened = set()
    async with replica.draining():
        await wait_for_state(seen_by, replica.address, {"draining", "down"})
        settled_at_s = time.monotonic() + SETTLED_S
        while replica.is_running:
            with suppress(OSError, HTTPException):
                count = replica.count(f"{role}_sessions_opened_total")
                if time.monotonic() > settled_at_s:
                    num_opened.add(count)
            await asyncio.sleep(POLL_S)
    await wait_for_state(seen_by, replica.address, {"down"})
    assert len(num_opened) == 1 or (role == "draft" and not num_opened)


async def wait_for_state(coordinator: Service, address: str, states: set[str]) -> None:
    async with Client(coordinator.address) as client:

        async def is_so() -> bool:
            return {r.state for r in (await client.status()).replicas if r.address == address} <= states

        await eventually(is_so, f"{address} is {' or '.join(sorted(states))}")


async def until_connected_to_both(client: Client) -> None:
    """From now on consecutive calls go to one coordinator and the other in turn."""
    owners: set[str] = set()

    async def are_both() -> bool:
        owners.add((await client.status()).owner_id)
        return len(owners) == 2

    await eventually(are_both, "both coordinators answer")


async def test_the_second_turn_of_a_conversation_finds_the_first_ones_tokens_cached(
    replicas: Cluster,
) -> None:
    async with Client(replicas.address) as client:
        bodies = [sampled_request(seed, max_tokens=100) for seed in range(6)]
        # All first turns at once, so that both targets get some.
        firsts = await asyncio.gather(*(client.complete(first_body) for first_body in bodies))
        for seed, (first_body, first) in enumerate(zip(bodies, firsts, strict=True)):
            output = [token.id for token in first.choices[0].tokens]
            prompt = [*first_body.prompt_token_ids.token_ids, *output, 40, 41, 42]
            second = await client.complete(sampled_request(seed, prompt, max_tokens=4))
            assert second.require_finished().usage.cached_tokens > len(first_body.prompt_token_ids.token_ids)


async def test_no_stream_notices_that_one_of_each_leaves_and_comes_back(replicas: Cluster, tmp_path: Path) -> None:
    bodies = [make_body(index) for index in range(NUM_BODIES)]
    long_bodies = [make_body(100 + index, NUM_LONG_TOKENS) for index in range(NUM_LONG)]
    target, draft, staying = (Service(replicas, name) for name in ("target", "draft", "coordinator"))
    work = [(Service(replicas, name), "target_sessions_opened_total") for name in ("target", "target-1")]
    work += [(Service(replicas, name), "draft_sessions_opened_total") for name in ("draft", "draft-1")]
    with one_more_coordinator(replicas, tmp_path / "leaving") as leaving, capture_logs() as logs:
        work += [(coordinator, "coordinator_requests_total{outcome=OK}") for coordinator in (staying, leaving)]
        both = f"ipv4:{staying.address},{leaving.address}"
        async with Client(staying.address) as direct, held_back(both) as client:
            undisturbed = await asyncio.gather(*(direct.complete(body) for body in [*bodies, *long_bodies]))
            wanted = [completion.identity for completion in undisturbed]
            load = Load(both, wanted)
            await until_connected_to_both(client)
            # Two in a row to each coordinator, one after the other and with nothing else, so that each has one on each
            # target and draft. In turns they might not: the first one's is reported to the other at some moment only.
            streams = []
            for index, body in enumerate(long_bodies):
                if index % 2:
                    await client.status()
                streams.append(LongStream(client, body))
                await streams[-1].has_begun()
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_LOADERS):
                    group.create_task(load.run(number))
                await gets_work(work)

                before_leaving = {role: staying.num_reopens(role) for role in ("target", "draft")}
                async with leaving.draining():
                    await asyncio.gather(
                        replica_leaves(target, "target", staying), replica_leaves(draft, "draft", staying)
                    )
                for stream in streams:
                    stream.go_on()
                ends = await asyncio.gather(*(stream.task for stream in streams))
                await asyncio.gather(target.come_back(), draft.come_back(), leaving.come_back())
                await gets_work(work)
                load.is_over = True
            moved = {role: staying.num_reopens(role) for role in before_leaving}
    assert all(moved[role] > num for role, num in before_leaving.items()), (before_leaving, moved)
    assert load.differing == []
    assert [completion.identity for completion in ends] == wanted[NUM_BODIES:]
    assert all(completion.finished is not None for completion in ends)
    assert any(line["event"] == "stream_interrupted" for line in logs)


async def test_streams_of_plain_clients_end_within_the_time_that_their_coordinator_drains(
    replicas: Cluster, tmp_path: Path
) -> None:
    body = make_body(7, NUM_PLAIN_TOKENS)
    with one_more_coordinator(replicas, tmp_path / "plain", drain_s=LONG_DRAIN_S) as leaving:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(held_back(leaving.address))
            whole = await client.complete(body)
            streams = [await stack.enter_async_context(Reading(client, body)) for _ in range(NUM_PLAIN)]
            await asyncio.gather(*(stream.until(NUM_BEFORE) for stream in streams))
            async with leaving.draining():
                with pytest.raises(Unavailable):
                    await client.complete(body)
                ends = await asyncio.gather(*(stream.rest() for stream in streams))
    assert [completion.identity for completion in ends] == [whole.identity] * NUM_PLAIN
    assert all(completion.finished is not None for completion in ends)
