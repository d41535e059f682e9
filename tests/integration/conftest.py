"""What tests of one service, or of two, share. Clusters: tests/support/services/cluster_fixtures.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, to pause, stop and start."""
    with RedisServer(tmp_path) as server:
        yield server
