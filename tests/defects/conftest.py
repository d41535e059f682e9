"""Defects of revision 6227d38, each reproduced through real processes; all are mended.

`make defects` holds this version against them, `make defects REVISION=6227d38` any revision's services: there every
test fails. What runs in `make test-all` looks at each of them closer (docs/operations.md, "What is survived").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from specdec.commands.up.cluster import Cluster
from tests.support.releases import Build, checked_out, this_version
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import another
from tests.support.services.model_pair import ModelPair

StartCluster = Callable[..., Cluster]
"""The fixture `start`."""
StartService = Callable[..., Cluster]
"""The fixture `beside`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--revision", default=None, help="whose services to start; without it, those of this checkout")


@pytest.fixture(scope="session")
def build(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Whose services are started."""
    revision = pytestconfig.getoption("--revision", default=None)
    return this_version() if revision is None else checked_out(revision, tmp_path_factory.mktemp("revision"))


@pytest.fixture
def start(build: Build, tiny_pair: ModelPair, tmp_path: Path) -> Iterator[StartCluster]:
    """Starts clusters of the build, which are stopped when the test ends."""
    with ExitStack() as stack:

        def one_more(**plan: Any) -> Cluster:
            folder = tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}"
            chosen = {"build": build, **plan}
            return stack.enter_context(start_cluster(chosen.pop("pair", tiny_pair), folder, **chosen))

        yield one_more


@pytest.fixture
def beside(build: Build, tmp_path: Path) -> Iterator[StartService]:
    """Starts single services of the build."""
    with ExitStack() as stack:

        def one_more(role: str, **settings: Any) -> Cluster:
            folder = tmp_path / f"service-{len(list(tmp_path.iterdir()))}"
            return stack.enter_context(another(role, folder, **{"build": build, **settings}))

        yield one_more


@pytest.fixture
def engines() -> Callable[[Cluster], dict[str, psutil.Process]]:
    """The engine process of each replica of a cluster that has one."""

    def find(cluster: Cluster) -> dict[str, psutil.Process]:
        return {
            name: child
            for name, service in cluster.services.items()
            if service.is_running and service.spec.role != "coordinator"
            for child in psutil.Process(service.pid).children()
            if any("engine_child" in part for part in child.cmdline())
        }

    return find
