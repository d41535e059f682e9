"""The shipped pair, for all tests of this folder that a worker runs."""

from __future__ import annotations

import pytest

from tests.support.engine.local_pair import LocalPair


@pytest.fixture(scope="package")
def loaded_pair() -> LocalPair:
    return LocalPair()


@pytest.fixture
def pair(loaded_pair: LocalPair) -> LocalPair:
    loaded_pair.reset()
    return loaded_pair
