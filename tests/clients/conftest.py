"""A gateway process before the pair that ships, and a reader of the page about clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from tests.support.clients.page import Reader
from tests.support.services.clusters import TIMEOUTS


@pytest.fixture(scope="session")
def url(shipped_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the gateway."""
    settings = RoleSettings(overrides={"coordinators": [shipped_cluster.address], "tool_parser": "hermes"})
    spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
    with Cluster([spec], log_dir=tmp_path_factory.mktemp("gateway"), timeouts=TIMEOUTS) as process:
        process.start()
        yield f"http://{spec.address}"


@pytest.fixture
def reader(url: str, tmp_path: Path) -> Reader:
    """One in a folder of its own."""
    return Reader(url, tmp_path)
