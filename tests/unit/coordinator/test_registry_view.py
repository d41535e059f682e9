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
    num_read = 0
    """Records that were returned."""

    async def registered(self, known: str) -> tuple[str, list[ReplicaRecord] | None]:
        if self.is_down:
            raise StoreUnavailable("down")
        version, records = await super().registered(known)
        self.num_read += len(records or ())
        return version, records


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


async def test_records_are_read_again_only_when_they_have_changed_and_once_a_minute() -> None:
    now_s = 0.0
    store = FailingStore()
    view = RegistryView(store, lambda: now_s)
    for number in range(100):
        await announce(store, "target", f"a:{number + 1}")
    assert len(await known(view)) == store.num_read == 100
    for load in range(3):
        info = pb.GetReplicaInfoResponse(load=pb.LoadReport(num_running=load))
        await store.announce(ReplicaRecord("target", "a:1", "one", "ready", info), TTL_S)
        assert len(await known(view)) == 100
    assert store.num_read == 100, "a load alone is no change"
    await announce(store, "target", "a:1", "draining")
    assert len(await known(view)) == 100
    await store.withdraw("target", "a:1")
    assert len(await known(view)) == 99
    await announce(store, "target", "b:1")
    assert len(await known(view)) == 100
    assert store.num_read == 100 + 100 + 99 + 100
    now_s = 61.0
    await known(view)
    assert store.num_read == 499


async def test_while_a_replica_loads_all_is_read_as_older_releases_set_no_version() -> None:
    store = FailingStore()
    view = RegistryView(store, lambda: 0.0)
    await announce(store, "target", "a:1", "loading")
    for _ in range(3):
        await known(view)
    assert store.num_read == 3


async def test_coordinators_that_drain_are_none() -> None:
    store = MemoryStore()
    view = RegistryView(store)
    for address, state in (("a:1", "ready"), ("b:1", "draining"), ("c:1", "loading")):
        await announce(store, "coordinator", address, state)
    await view.refresh()
    assert view.coordinators() == ["a:1", "c:1"]
