"""A journal on a store that can go away."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from specdec.coordinator.journal import Journal
from specdec.coordinator.sessions.session import Request
from specdec.store.guarded import GuardedStore
from tests.support.services.departing_store import DepartingStore, guarded
from tests.support.services.journals import make_journal


@pytest.fixture
def store() -> DepartingStore:
    return DepartingStore()


@pytest.fixture
def shared(store: DepartingStore) -> GuardedStore:
    return guarded(store)


@pytest.fixture
def taken_over() -> list[Request]:
    """What `journal` says was taken over."""
    return []


@pytest.fixture
def aborted() -> list[Request]:
    """What `journal` says was aborted elsewhere."""
    return []


@pytest.fixture
async def journal(shared: GuardedStore, taken_over: list[Request], aborted: list[Request]) -> AsyncIterator[Journal]:
    journal = make_journal(shared, taken_over, aborted)
    journal.start()
    yield journal
    await journal.close()
