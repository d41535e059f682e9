"""Fixtures of real clusters: three processes on loopback, real sockets and real models.

def test_something(tiny_cluster):                 # one cluster for the whole run; do not kill its services
def test_something(make_cluster):                 # a cluster of its own, with settings, to kill and restart
    cluster = make_cluster(num_targets=2, target_settings={"max_draft_tokens": 4})
    cluster.kill("target"); cluster.restart("target")
async def test_something(tiny_client):            # a client of tiny_cluster

A plugin of tests/conftest.py, so that all folders share the clusters of a run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specdec.client import Client
from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.plan import shipped_model
from tests.support.services.clusters import MakeCluster, start_cluster
from tests.support.services.model_pair import ModelPair

_shared: list[Cluster] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell with a failure which services of shared clusters have ended."""
    report = yield
    if report.failed:
        for cluster in _shared:
            try:
                cluster.check_running()
            except ClusterFailed as error:
                report.sections.append(("a shared cluster's service has ended", str(error)))
    return report


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """A random target and a draft that often agrees with it."""
    from tests.support.services.tiny_pair import make_tiny_pair  # imports torch, which most tests do not need

    return make_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def shipped_pair() -> ModelPair:
    """The pair in models/."""
    return ModelPair(Path(shipped_model("target")), Path(shipped_model("draft")))


@pytest.fixture(scope="session")
def tiny_metrics_ports() -> dict[str, int]:
    """Metrics ports of `tiny_cluster`, by role."""
    return {role: free_port() for role in ("target", "draft", "coordinator")}


@pytest.fixture(scope="session")
def tiny_cluster(
    tiny_pair: ModelPair, tiny_metrics_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A running cluster of the tiny pair, shared by the run."""
    settings = {f"{role}_settings": {"metrics_port": port} for role, port in tiny_metrics_ports.items()}
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("tiny_cluster"), **settings) as cluster:
        _shared.append(cluster)
        yield cluster


@pytest.fixture(scope="session")
def shipped_cluster(shipped_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster of the shipped pair, shared by the run."""
    with start_cluster(shipped_pair, tmp_path_factory.mktemp("shipped_cluster")) as cluster:
        _shared.append(cluster)
        yield cluster


@pytest.fixture
def make_cluster(tiny_pair: ModelPair, tmp_path: Path) -> Iterator[MakeCluster]:
    """Starts clusters of the tiny pair, or of `pair=`, that are stopped when the test ends."""
    with ExitStack() as stack:

        def make(pair: ModelPair = tiny_pair, **plan: Any) -> Cluster:
            number = len(list(tmp_path.glob("cluster-*")))
            return stack.enter_context(start_cluster(pair, tmp_path / f"cluster-{number}", **plan))

        yield make


@pytest.fixture
async def tiny_client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    """A client of the shared tiny cluster."""
    async with Client(tiny_cluster.address) as client:
        yield client


@pytest.fixture
async def shipped_client(shipped_cluster: Cluster) -> AsyncIterator[Client]:
    """A client of the shared cluster of the shipped pair."""
    async with Client(shipped_cluster.address) as client:
        yield client
