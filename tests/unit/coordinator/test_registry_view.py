"""The registry as a coordinator knows it."""

from __future__ import annotations

from specdec.coordinator.replicas.registry_view import RegistryView
from specdec.store.interface import ReplicaRecord, StoreUnavailable
from specdec.store.memory import MemoryStore
from specdec.v1 import common_pb2 as pb
from specdec.wire.discovery import ReplicaAddress

TTL_S = 60.0


class FailingStore(MemoryStore):
    is_down = False

    async def replicas(self) -> list[ReplicaRecord]:
        if self.is_down:
            raise StoreUnavailable("down")
        return await super().replicas()


async def announce(store: MemoryStore, role: str, address: str, state: str = "ready") -> None:
    await store.announce(ReplicaRecord(role, address, "one", state, pb.GetReplicaInfoResponse()), TTL_S)


async def known(view: RegistryView, role: str = "target") -> list[str]:
    await view.refresh()
    assert all(endpoint.is_registered and endpoint.server_name is None for endpoint in view.endpoints(role))
    return [endpoint.address for endpoint in view.endpoints(role)]


async def test_each_role_has_its_own_replicas() -> None:
    store = MemoryStore()
    view = RegistryView(store)
    assert view.endpoints("target") == []
    await announce(store, "target", "b:2")
    await announce(store, "target", "a:1", "draining")
    await announce(store, "draft", "c:3")
    await announce(store, "coordinator", "d:4")
    assert await known(view) == ["a:1", "b:2"]
    assert view.endpoints("draft") == [ReplicaAddress("c:3", is_registered=True)]
    assert [record.address for record in view.records("coordinator")] == ["d:4"]


async def test_a_replica_that_loads_is_left_alone_until_it_is_ready() -> None:
    store = MemoryStore()
    view = RegistryView(store)
    await announce(store, "target", "a:1", "loading")
    assert await known(view) == []
    assert [record.state for record in view.records("target")] == ["loading"]
    await announce(store, "target", "a:1", "ready")
    assert await known(view) == ["a:1"]


async def test_a_replica_that_loads_again_after_a_restart_is_kept() -> None:
    store = MemoryStore()
    view = RegistryView(store)
    await announce(store, "target", "a:1")
    assert await known(view) == ["a:1"]
    for _ in range(2):
        await announce(store, "target", "a:1", "loading")
        assert await known(view) == ["a:1"]
    await store.withdraw("target", "a:1")
    assert await known(view) == []
    await announce(store, "target", "a:1", "loading")
    assert await known(view) == []


async def test_a_store_that_is_down_takes_no_replica_away() -> None:
    store = FailingStore()
    view = RegistryView(store)
    await announce(store, "target", "a:1")
    assert await known(view) == ["a:1"]
    store.is_down = True
    assert await known(view) == ["a:1"]
    await store.withdraw("target", "a:1")
    store.is_down = False
    assert await known(view) == []


async def test_what_is_no_address_is_ignored() -> None:
    store = MemoryStore()
    await announce(store, "target", "somewhere")
    await announce(store, "target", "a:1")
    assert await known(RegistryView(store)) == ["a:1"]
