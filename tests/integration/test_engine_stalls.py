"""The engine process of a replica is stopped while its servicer lives: streams go on in time, and it is replaced."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from specdec.commands.up.cluster import Cluster
from tests.support.services.clusters import MakeCluster
from tests.support.services.engine_processes import engine_of
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    addresses_of,
    another,
    eventually,
    held_back,
    make_request,
    plain,
    target_in_use,
)

WITHIN_S = 20.0
"""Ten by default, and as many for a slow machine: without a watch it takes minutes."""
BEFORE = 20
NUM_TOKENS = 300
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def is_replaced(cluster: Cluster, name: str, stopped: psutil.Process) -> None:
    """Returns when another engine serves, in the same service."""
    service = cluster.services[name].pid

    async def has_another() -> bool:
        return not stopped.is_running() and cluster.is_healthy(name)

    await eventually(has_another, f"{name} serves with another engine")
    assert cluster.services[name].pid == service
    assert engine_of(cluster, name).pid != stopped.pid


async def test_a_stream_goes_on_elsewhere_when_the_engine_of_its_target_is_stopped(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(num_targets=2, num_drafts=0)
    body = plain(make_request(max_tokens=NUM_TOKENS, temperature=1.0))
    with another("coordinator", tmp_path, **addresses_of(cluster), credit_window_tokens=CREDIT_WINDOW) as coordinator:
        coordinator.wait_connected(num_ready=2)
        async with held_back(coordinator.address) as client:
            undisturbed = await client.complete(body)
            async with Reading(client, body) as stream:
                await stream.until(BEFORE)
                frozen = await target_in_use(cluster)
                engine = engine_of(cluster, frozen)
                engine.send_signal(signal.SIGSTOP)
                began_s = time.monotonic()
                completion = await stream.rest()
                took_s = time.monotonic() - began_s
            assert completion.identity == undisturbed.identity
            assert took_s < WITHIN_S
            await is_replaced(cluster, frozen, engine)


@pytest.mark.long
async def test_a_stream_goes_on_when_the_engine_of_its_draft_is_stopped(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster()
    body = make_request(max_tokens=NUM_TOKENS, temperature=1.0)
    with another("coordinator", tmp_path, **addresses_of(cluster), credit_window_tokens=CREDIT_WINDOW) as coordinator:
        coordinator.wait_connected(num_ready=2)
        async with held_back(coordinator.address) as client:
            undisturbed = await client.complete(body)
            async with Reading(client, body) as stream:
                await stream.until(BEFORE)
                engine = engine_of(cluster, "draft")
                engine.send_signal(signal.SIGSTOP)
                began_s = time.monotonic()
                completion = await stream.rest()
                took_s = time.monotonic() - began_s
            assert completion.identity == undisturbed.identity
            assert took_s < WITHIN_S
            await is_replaced(cluster, "draft", engine)
