"""Real clusters: three processes on loopback, real sockets, real models.

def test_something(tiny_cluster):                 # one cluster for the whole run; do not kill its services
def test_something(make_cluster):                 # a cluster of its own, with settings, to kill and restart
    cluster = make_cluster(num_targets=2, target_settings={"max_draft_tokens": 4})
    cluster.kill("target"); cluster.restart("target")
async def test_something(tiny_client):            # a client of tiny_cluster
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.local.cluster import Cluster, ClusterTimeouts
from specdec.cli.local.plan import LocalPlan, plan_services, shipped_model
from specdec.client import Client
from tests.support.servers.redis_server import RedisServer
from tests.support.services.tiny_pair import ModelPair, make_tiny_pair

TIMEOUTS = ClusterTimeouts(start_s=200.0, connect_s=100.0, stop_s=10.0)
TINY_HOLD_OFF_MS = 50
MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """A random target and a draft that often agrees with it."""
    return make_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def shipped_pair() -> ModelPair:
    """The pair in models/."""
    return ModelPair(Path(shipped_model("target")), Path(shipped_model("draft")))


def start_cluster(pair: ModelPair, log_dir: Path, **plan: Any) -> Cluster:
    """Start a cluster on free ports; the fields of LocalPlan may be set by keyword. Raises ClusterFailed.

    A step of a tiny target costs less than a draft's answer takes, so its cost model would rightly not wait for one.
    A fixed hold-off makes it verify proposals all the same.
    """
    target_settings = {**plan.pop("target_settings", {})}
    if "tiny" in str(pair.target):
        target_settings.setdefault("hold_off_ms", TINY_HOLD_OFF_MS)
    settings = LocalPlan(
        target_model=str(pair.target),
        draft_model=str(pair.draft),
        device=plan.pop("device", "cpu"),
        free_ports=True,
        target_settings=target_settings,
        **plan,
    )
    cluster = Cluster(plan_services(settings, environment={}), log_dir=log_dir, timeouts=TIMEOUTS)
    cluster.start()
    return cluster


@pytest.fixture(scope="session")
def tiny_cluster(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster of the tiny pair, shared by the run."""
    with start_cluster(tiny_pair, tmp_path_factory.mktemp("tiny_cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shipped_cluster(shipped_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster of the shipped pair, shared by the run."""
    with start_cluster(shipped_pair, tmp_path_factory.mktemp("shipped_cluster")) as cluster:
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


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, to pause, stop and start."""
    with RedisServer(tmp_path) as server:
        yield server
