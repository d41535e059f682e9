"""A draft and its client, for all tests of this folder that a worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.drafting_client import MAX_AHEAD, drafting_client
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.worker_client import WorkerClient


@pytest.fixture(scope="package")
def loaded_pair() -> LocalPair:
    return LocalPair(draft_options={"max_ahead_tokens": MAX_AHEAD, "max_sessions": 4})


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    with drafting_client(loaded_pair) as client:
        yield client
