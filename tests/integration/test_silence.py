"""A peer that is silent, and does not close its connection, is noticed in time on every link; a pause is no silence."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from specdec.client import Client, ClientSettings, Completion, generate_resuming
from specdec.commands.up.cluster import Cluster, free_port
from specdec.wire.errors import Unavailable
from tests.support.services.black_hole import black_hole
from tests.support.services.clusters import MakeCluster
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    SmallBuffers,
    addresses_of,
    another,
    eventually,
    freeze,
    held_back,
    make_request,
    plain,
    scrape,
    target_in_use,
    thaw,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WITHIN_S = 20.0
"""Ten by default, and as many for a slow machine: without a watch it takes minutes."""
SOON_S = 5.5
SHORT = {"keepalive_time_s": 1.0, "keepalive_timeout_s": 1.0}
"""With these it is within SOON_S, which defaults take longer than."""
BEFORE = 20
NUM_ATTEMPTS = 3
"""A busy machine may stop all services for longer."""
RECONNECTS = "specdec_coordinator_stream_reconnects_total"
NUM_TOKENS = 300


def stop_servicer(cluster: Cluster, name: str) -> None:
    """Freeze the process that has the connections, and not its engine."""
    cluster.signal(name, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("settings", "within_s"),
    [({}, WITHIN_S), pytest.param(SHORT, SOON_S, marks=pytest.mark.long)],
    ids=["defaults", "short"],
)
async def test_a_stream_goes_on_elsewhere_when_its_target_is_frozen(
    make_cluster: MakeCluster, tmp_path: Path, settings: dict[str, object], within_s: float
) -> None:
    cluster = make_cluster(num_targets=2, num_drafts=0)
    body = plain(make_request(max_tokens=NUM_TOKENS, temperature=1.0))
    ours = {**addresses_of(cluster), "credit_window_tokens": CREDIT_WINDOW, **settings}
    with another("coordinator", tmp_path, **ours) as coordinator:
        coordinator.wait_connected(num_ready=2)
        async with held_back(coordinator.address) as client:
            undisturbed = await client.complete(body)
            async with Reading(client, body) as stream:
                await stream.until(BEFORE)
                frozen = await target_in_use(cluster)
                stop_servicer(cluster, frozen)
                began_s = time.monotonic()
                completion = await stream.rest()
                took_s = time.monotonic() - began_s
            assert completion.identity == undisturbed.identity
            assert took_s < within_s
        thaw(cluster, frozen)


@pytest.mark.parametrize("link", ["target", pytest.param("draft", marks=pytest.mark.long)])
async def test_a_stream_goes_on_when_a_link_of_its_coordinator_swallows_everything(
    make_cluster: MakeCluster, tmp_path: Path, link: str
) -> None:
    cluster = make_cluster(num_targets=2)
    addresses = addresses_of(cluster)
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    async with AsyncExitStack() as stack:
        behind = addresses[f"{link}s"]
        holes = [await stack.enter_async_context(black_hole(address)) for address in behind]
        addresses[f"{link}s"] = [hole.address for hole in holes]
        settings = {**addresses, "credit_window_tokens": CREDIT_WINDOW}
        context = another("coordinator", tmp_path, **settings)
        coordinator = await asyncio.to_thread(context.__enter__)  # in a thread: its link is served in this one
        try:
            await asyncio.to_thread(coordinator.wait_connected, 3)
            async with held_back(coordinator.address) as client:
                undisturbed = await client.complete(body)
                async with Reading(client, body) as stream:
                    await stream.until(BEFORE)
                    name = await target_in_use(cluster) if link == "target" else "draft"
                    hole = holes[behind.index(cluster.services[name].spec.address)]
                    hole.swallow()
                    began_s = time.monotonic()
                    completion = await stream.rest()
                    took_s = time.monotonic() - began_s

                async def is_down() -> bool:
                    states = {r.address: r.state for r in (await client.status()).replicas}
                    return states[hole.address] == "down"

                await eventually(is_down, "the coordinator knows that the replica is gone", WITHIN_S)
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    assert completion.identity == undisturbed.identity
    assert took_s < WITHIN_S
    assert link == "draft" or took_s > 1.0, "the stream needed its link"


@pytest.mark.parametrize(
    ("client_settings", "within_s"),
    [
        pytest.param(SmallBuffers(), WITHIN_S, marks=pytest.mark.long),
        (SmallBuffers(keepalive_s=1.0, keepalive_timeout_s=0.5), SOON_S),
    ],
    ids=["defaults", "short"],
)
async def test_a_client_of_a_frozen_coordinator_resumes_at_another(
    tiny_cluster: Cluster, tmp_path: Path, client_settings: ClientSettings, within_s: float
) -> None:
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0, n=2)
    settings = {
        **addresses_of(tiny_cluster),
        "resume_secret": "a secret that both have",
        "credit_window_tokens": CREDIT_WINDOW,
    }
    with ExitStack() as stack:
        clusters = [stack.enter_context(another("coordinator", tmp_path / str(i), **settings)) for i in range(2)]
        first, second = (cluster.address for cluster in clusters)
        async with Client(first) as client:
            undisturbed = await client.complete(body)
        async with Client(f"ipv4:{first},{second}", client_settings) as client:
            await client.status()
            serving: list[Cluster] = []

            async def find_serving() -> None:
                for cluster in clusters:
                    async with Client(cluster.address) as asking:
                        if (await asking.status()).num_running:
                            serving.append(cluster)

            completion, last_s, longest_s = Completion(), 0.0, 0.0
            async for chunk in generate_resuming(client, body):
                if serving:
                    longest_s = max(longest_s, time.monotonic() - last_s)
                completion.add(chunk)
                if completion.num_tokens >= BEFORE and not serving:
                    await find_serving()
                    freeze(serving[0], "coordinator")
                last_s = time.monotonic()
            thaw(serving[0], "coordinator")
    assert completion.identity == undisturbed.identity
    assert all(choice.finished is not None for choice in completion.choices.values())
    assert longest_s < within_s


async def test_a_call_to_an_address_that_takes_connections_and_never_answers_ends() -> None:
    async with black_hole() as hole, Client(hole.address, ClientSettings(connect_timeout_s=1.0)) as client:
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            await client.status()
        assert time.monotonic() - began_s < SOON_S
        assert hole.num_accepted >= 1


async def test_a_target_ends_the_stream_of_a_coordinator_that_is_frozen(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    metrics_port = free_port()
    cluster = make_cluster(num_drafts=0, target_settings={"metrics_port": metrics_port})
    with another("coordinator", tmp_path, **addresses_of(cluster)) as frozen:

        async def num_streams() -> float:
            return (await asyncio.to_thread(scrape, metrics_port))["specdec_target_open_streams"]

        assert await num_streams() == 2
        freeze(frozen, "coordinator")

        async def is_ended() -> bool:
            return await num_streams() == 1

        await eventually(is_ended, "the target has one stream", WITHIN_S)
        thaw(frozen, "coordinator")


async def test_a_coordinator_ends_the_request_of_a_client_that_is_silent(tiny_cluster: Cluster, tmp_path: Path) -> None:
    body = make_request(max_tokens=2000, temperature=1.0)
    settings = {
        **addresses_of(tiny_cluster),
        "credit_window_tokens": CREDIT_WINDOW,
        "client_keepalive_time_s": 1.0,
        "client_keepalive_timeout_s": 1.0,
    }
    with another("coordinator", tmp_path, **settings) as coordinator:
        async with (
            black_hole(coordinator.address) as hole,
            held_back(hole.address) as client,
            Client(coordinator.address) as other,
            Reading(client, body) as stream,
        ):
            await stream.until(BEFORE)
            hole.swallow()

            async def is_over() -> bool:
                return (await other.status()).num_running == 0

            await eventually(is_over, "the request is over", WITHIN_S)  # by default it takes 30


@pytest.mark.parametrize(
    "name", ["target", *(pytest.param(name, marks=pytest.mark.long) for name in ("draft", "coordinator"))]
)
async def test_a_service_that_is_stopped_for_a_second_keeps_its_connections(
    make_cluster: MakeCluster, name: str
) -> None:
    metrics_port = free_port()
    cluster = make_cluster(coordinator_settings={"credit_window_tokens": CREDIT_WINDOW, "metrics_port": metrics_port})
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    num_reconnects = 0.0
    async with held_back(cluster.address) as client:
        undisturbed = await client.complete(body)
        for _ in range(NUM_ATTEMPTS):
            async with Reading(client, body) as stream:
                await stream.until(BEFORE)
                for _ in range(3):
                    freeze(cluster, name)
                    await asyncio.sleep(1.0)
                    thaw(cluster, name)
                completion = await stream.rest()
            assert completion.identity == undisturbed.identity
            num_before = num_reconnects
            num_reconnects = (await asyncio.to_thread(scrape, metrics_port)).get(RECONNECTS, 0.0)
            if num_reconnects == num_before:
                break
    assert num_reconnects == num_before, "streams are opened again in each attempt"
