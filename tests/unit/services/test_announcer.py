"""A process in the registry: from loading to gone, whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specdec.service.server import advertised_address
from specdec.service.settings import ServiceSettings
from specdec.store.announcer import AnnouncedState, Announcer
from specdec.store.interface import ReplicaRecord, StoreUnavailable
from specdec.store.memory import MemoryStore
from specdec.v1 import common_pb2 as pb

ADDRESS = "10.0.0.1:50052"


class WatchedStore(MemoryStore):
    """A store that can be down, or slow, and tells of announcements."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_tries = 0
        self.tried = asyncio.Condition()

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        self.num_tries += 1
        async with self.tried:
            self.tried.notify_all()
        await self.may_answer.wait()
        if self.is_down:
            raise StoreUnavailable("down")
        await super().announce(replica, ttl_s)

    async def withdraw(self, role: str, address: str) -> None:
        if self.is_down:
            raise StoreUnavailable("down")
        await super().withdraw(role, address)

    async def until_tried(self, num: int) -> None:
        async with asyncio.timeout(20), self.tried:
            await self.tried.wait_for(lambda: self.num_tries >= num)

    async def states(self) -> list[str]:
        return [replica.state for replica in await self.replicas()]


@asynccontextmanager
async def announced(
    store: WatchedStore, ttl_s: float = 600.0, failures: list[None] | None = None
) -> AsyncIterator[Announcer]:
    failed = [] if failures is None else failures
    loads = iter(range(1000))

    def describe() -> pb.GetReplicaInfoResponse:
        return pb.GetReplicaInfoResponse(load=pb.LoadReport(num_running=next(loads)), instance_id="one")

    announcer = Announcer(store, ttl_s, "target", "one", describe, lambda: failed.append(None))
    announcer.start(ADDRESS)
    try:
        yield announcer
    finally:
        await announcer.stop()


async def test_a_process_is_announced_as_loading_ready_and_draining_at_once_and_withdrawn_at_the_end() -> None:
    store = WatchedStore()
    async with announced(store) as announcer:
        await store.until_tried(1)
        assert await store.states() == ["loading"]
        announcer.set_state(AnnouncedState.READY)
        await store.until_tried(2)
        assert await store.states() == ["ready"]
        announcer.set_state(AnnouncedState.DRAINING)
        await store.until_tried(3)
        [record] = await store.replicas()
        assert (record.role, record.address, record.instance_id) == ("target", ADDRESS, "one")
        assert record.state == "draining"
    assert await store.states() == []


async def test_a_registration_is_renewed_before_it_expires_with_the_load_of_that_moment() -> None:
    store = WatchedStore()
    async with announced(store, ttl_s=0.3):
        loads = set()
        for num in range(2, 12):
            await store.until_tried(num)
            loads.update(record.info.load.num_running for record in await store.replicas())
    assert len(loads) >= 3


async def test_a_state_that_changes_while_a_renewal_is_under_way_is_announced_after_it() -> None:
    store = WatchedStore()
    store.may_answer.clear()
    async with announced(store) as announcer:
        await store.until_tried(1)
        announcer.set_state(AnnouncedState.READY)
        store.may_answer.set()
        await store.until_tried(2)
        await asyncio.sleep(0)
        assert await store.states() == ["ready"]


async def test_a_store_that_is_down_is_asked_again_and_delays_neither_start_nor_stop() -> None:
    store = WatchedStore()
    store.is_down = True
    failures: list[None] = []
    async with announced(store, failures=failures):
        await store.until_tried(2)
        assert failures
        store.is_down = False
        await store.until_tried(3)
        await asyncio.sleep(0)
        assert await store.states() == ["loading"]
        store.is_down = True
    assert await store.states() == ["loading"]  # it expires


async def test_a_renewal_that_is_under_way_does_not_outlive_the_withdrawal() -> None:
    store = WatchedStore()
    async with announced(store) as announcer:
        await store.until_tried(1)
        store.may_answer.clear()
        announcer.set_state(AnnouncedState.READY)
        await store.until_tried(2)
        stopping = asyncio.create_task(announcer.stop())
        await asyncio.sleep(0)
        store.may_answer.set()
        await stopping
        assert await store.states() == []


async def test_an_announcer_that_was_never_started_has_nothing_to_withdraw() -> None:
    store = WatchedStore()
    await Announcer(store, 15.0, "draft", "one", pb.GetReplicaInfoResponse).stop()
    assert store.num_tries == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "::"])
def test_a_process_that_listens_everywhere_is_announced_by_its_host_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine-1")
    assert advertised_address(ServiceSettings(host=host), 4711) == "machine-1:4711"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "target.example"])
def test_a_process_that_listens_somewhere_is_announced_there_with_the_port_it_got(host: str) -> None:
    assert advertised_address(ServiceSettings(host=host, port=0), 4711) == f"{host}:4711"


def test_an_address_that_is_set_is_announced_as_it_is() -> None:
    settings = ServiceSettings(advertise_address="target-0.targets:50052")
    assert advertised_address(settings, 4711) == "target-0.targets:50052"
