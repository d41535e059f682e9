"""Clusters to break: one whose services stay up, and one whose services are killed and started again.

A test that kills something of `battered_cluster` leaves it whole: `whole` waits for that before every test.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator

import pytest

from specdec.commands.up.cluster import Cluster, free_port
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import CREDIT_WINDOW, HOLD_OFF_MS, ROLES, start_again, thaw
from tests.support.services.model_pair import ModelPair

NEVER_S = 600.0
DRAIN_S = 120.0
"""Longer than any stream takes; a replica without sessions ends at once."""


@pytest.fixture(scope="session")
def metrics_ports() -> dict[str, int]:
    """Where `steady_cluster` serves its metrics, by role."""
    return {role: free_port() for role in ROLES}


@pytest.fixture(scope="session")
def steady_cluster(
    tiny_pair: ModelPair, metrics_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of which nothing is killed; other coordinators may use its replicas."""
    settings: dict[str, dict[str, object]] = {
        f"{role}_settings": {"metrics_port": port} for role, port in metrics_ports.items()
    }
    settings["coordinator_settings"]["credit_window_tokens"] = CREDIT_WINDOW
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("steady"), **settings) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def proposal_path() -> str:
    """Way of the proposals in `battered_cluster`, drawn from CHAOS_SEED or at random; failed tests show both."""
    seed = os.environ.get("CHAOS_SEED") or str(secrets.randbelow(1000))
    path = random.Random(seed).choice(("auto", "relayed"))
    sys.stdout.write(f"CHAOS_SEED={seed}: proposal_path {path}\n")
    return path


@pytest.fixture(scope="session")
def battered_cluster(
    shipped_pair: ModelPair, proposal_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of the shipped pair to kill services of. Steps wait for the draft.

    Connections to replicas that are frozen are kept, and streams wait for a target however long it takes to start.
    """
    cluster = start_cluster(
        shipped_pair,
        tmp_path_factory.mktemp("battered"),
        target_settings={"hold_off_ms": HOLD_OFF_MS, "keepalive_time_s": NEVER_S, "drain_s": DRAIN_S},
        draft_settings={"keepalive_time_s": NEVER_S, "drain_s": DRAIN_S},
        coordinator_settings={
            "keepalive_time_s": NEVER_S,
            "target_timeout_s": NEVER_S,
            "credit_window_tokens": CREDIT_WINDOW,
            "metrics_port": free_port(),
            "proposal_path": proposal_path,
        },
    )
    with cluster:
        try:
            yield cluster
        finally:
            for name in cluster.services:
                thaw(cluster, name)


@pytest.fixture
def whole(battered_cluster: Cluster) -> Iterator[Cluster]:
    """`battered_cluster` with everything running, whatever the last test did."""
    for name in battered_cluster.services:
        thaw(battered_cluster, name)
    start_again(battered_cluster, *(name for name, s in battered_cluster.services.items() if not s.is_running))
    battered_cluster.wait_connected()
    yield battered_cluster
    for name in battered_cluster.services:
        thaw(battered_cluster, name)
