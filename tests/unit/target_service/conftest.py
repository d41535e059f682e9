"""A target that four sessions may have, and its client, for all tests of this folder that a worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.free_rows import FreeRows
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.targets import continued, target_client
from tests.support.engine.worker_client import WorkerClient


@pytest.fixture(scope="package")
def loaded_pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0, max_sessions=4)


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    with target_client(loaded_pair, FreeRows()) as client:
        yield client


@pytest.fixture(scope="package")
def truth(loaded_pair: LocalPair) -> list[int]:
    """Prompt and greedy continuation."""
    return continued(loaded_pair, 60)
