"""What coordinators tell each other about prefixes: few keys, in batches, and nothing when the store is down."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.replicas.router import block_digests
from specdec.store.interface import StoreUnavailable
from specdec.store.memory import MemoryStore

TTL_S = 60.0


class WatchedStore(MemoryStore):
    """Notes the sizes of calls, and can be down."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[str, int]] = []
        self.asked: list[int] = []
        self.is_down = False
        self.changed = asyncio.Condition()

    async def until_added(self, num: int) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: len(self.added) >= num)

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        self.added.append((replica, len(digests)))
        async with self.changed:
            self.changed.notify_all()
        if self.is_down:
            raise StoreUnavailable("down")
        await super().add_prefixes(replica, digests, ttl_s)

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        self.asked.append(len(digests))
        if self.is_down:
            raise StoreUnavailable("down")
        return await super().prefix_holders(digests)


def chain(num_blocks: int, first: int = 0) -> list[bytes]:
    return block_digests(range(first, first + num_blocks * 32), b"")


async def test_a_long_prompt_costs_few_keys_and_its_length_is_known_to_an_eighth() -> None:
    store = WatchedStore()
    shared = SharedPrefixes(store, TTL_S)
    long = chain(3125)
    shared.add("a", long)
    await shared.flush()
    assert store.added == [("a", 76)]
    for num_common in (1, 16, 17, 100, 999, 3125):
        prompt = [*long[:num_common], *chain(50, first=10**6)]
        known = await shared.lengths(prompt)
        assert num_common * 7 / 8 <= known["a"] <= num_common
    assert max(store.asked) == 76


async def test_a_replica_of_which_nothing_is_cached_is_not_named() -> None:
    shared = SharedPrefixes(WatchedStore(), TTL_S)
    shared.add("a", chain(4))
    await shared.flush()
    assert await shared.lengths(chain(4, first=7)) == {}


async def test_what_is_added_soon_after_each_other_is_written_together_and_once() -> None:
    store = WatchedStore()
    shared = SharedPrefixes(store, TTL_S)
    writing = asyncio.create_task(shared.run())
    for _ in range(3):
        shared.add("a", chain(4))
    shared.add("b", chain(2))
    await store.until_added(2)
    shared.add("a", chain(4))
    await store.until_added(3)
    writing.cancel()
    assert store.added == [("a", 4), ("b", 2), ("a", 4)]


async def test_many_digests_are_written_in_bounded_batches_and_too_many_are_dropped() -> None:
    store = WatchedStore()
    shared = SharedPrefixes(store, TTL_S)
    for number in range(600):
        shared.add("a", chain(40, first=number * 10_000))
    await shared.flush()
    assert max(size for _, size in store.added) <= 256
    assert 10_000 < sum(size for _, size in store.added) <= 16_384


async def test_while_the_store_is_down_nothing_is_known_and_nothing_piles_up() -> None:
    store = WatchedStore()
    shared = SharedPrefixes(store, TTL_S)
    store.is_down = True
    shared.add("a", chain(4))
    shared.add("b", chain(4))
    await shared.flush()
    assert await shared.lengths(chain(4)) == {}
    assert store.added == [("a", 4)]  # one failure is enough to know
    store.is_down = False
    await shared.flush()
    assert store.added == [("a", 4)]
    shared.add("a", chain(4))
    await shared.flush()
    assert await shared.lengths(chain(4)) == {"a": 4}
