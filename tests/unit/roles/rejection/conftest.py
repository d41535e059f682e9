"""The shipped pair, and schedules that are the same on every run, for all tests of this folder that a worker runs."""

from __future__ import annotations

import pytest

from tests.support.engine.local_pair import LocalPair


@pytest.fixture(scope="package")
def loaded_pair() -> LocalPair:
    return LocalPair()


@pytest.fixture(autouse=True)
def _turns_take_all_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine may open some sessions a turn later, whose prefill makes the others step without a draft."""
    monkeypatch.setattr("specdec.worker.loop._MOST_TAKING_S", 1e9)


@pytest.fixture
def pair(loaded_pair: LocalPair) -> LocalPair:
    loaded_pair.reset()
    return loaded_pair
