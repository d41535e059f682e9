"""The same random operations have the same results in memory and on Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from specdec.store.interface import (
    BegunRequest,
    JournalRecord,
    JournalWrite,
    Lease,
    NewRequest,
    ReplicaRecord,
    RequestKey,
    Store,
    StoreError,
    StoreLimits,
)
from specdec.store.memory import MemoryStore
from specdec.store.urls import RedisOptions, connect
from specdec.v1.common_pb2 import GetReplicaInfoResponse
from tests.support.servers.redis_server import RedisServer

LIMITS = StoreLimits(max_replicas=3, max_holders=2, max_tokens=12)
PATIENT = RedisOptions(timeout_s=20)
# Nothing expires while a test runs, and what was stored later expires later.
LONG_S = 3600.0

keys = st.builds(RequestKey, st.sampled_from(["", "t:{}", "ü"]), st.sampled_from(["r", "%72", "x" * 300]))
owners = st.sampled_from(["a", "b"])
names = st.sampled_from(["n:1", "n:2", "n:3", "n:4"])
digests = st.lists(st.sampled_from([b"\0", b"\1", b"\2"]), max_size=4)
tokens = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255)), max_size=5)


class Equivalence(RuleBasedStateMachine):
    """Drives both stores. A generation is a store's own clock, so each is shown the one that it gave out."""

    # Key, owner and the generation in each store of what was begun, or was refused.
    leases = Bundle("leases")

    def __init__(self, url: str) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stores: tuple[Store, Store] = (MemoryStore(LIMITS), connect(url, PATIENT, LIMITS))
        self._ttl_s = LONG_S

    def teardown(self) -> None:
        self._runner.run(self._stores[1].close())
        self._runner.close()

    @rule(
        target=leases,
        key=keys,
        owner=owners,
        seed=st.integers(0, 2**64 - 1),
        params=st.binary(max_size=8),
        num_choices=st.integers(1, 3),
        max_concurrent=st.none() | st.integers(0, 3),
        take_over=st.booleans(),
    )
    def begin(self, key: RequestKey, owner: str, **fields: Any) -> tuple[Lease, Lease]:
        request = NewRequest(owner, lease_s=LONG_S, **fields)
        begun = self._both(lambda store, _: store.begin(key, request))
        generations = [one.generation if isinstance(one, BegunRequest) else 0 for one in begun]
        return Lease(key, owner, generations[0]), Lease(key, owner, generations[1])

    @rule(lease=leases, choice=st.integers(0, 3), start=st.integers(0, 7), new=tokens)
    def append(self, lease: tuple[Lease, Lease], choice: int, start: int, new: list[tuple[int, int]]) -> None:
        ids, origins = [token for token, _ in new], [origin for _, origin in new]

        def write(one: Lease, at: int) -> JournalWrite:
            return JournalWrite(one.key, one.owner_id, one.generation, choice, at, ids, origins)

        self._both(lambda store, index: store.append([write(lease[index], 0), write(lease[index], start)]))

    @rule(lease=leases)
    def renew(self, lease: tuple[Lease, Lease]) -> None:
        self._both(lambda store, index: store.renew([lease[index]]))

    @rule(lease=leases, keep_s=st.sampled_from([0.0, LONG_S]))
    def end(self, lease: tuple[Lease, Lease], keep_s: float) -> None:
        self._both(
            lambda store, index: store.end(lease[index].key, lease[index].owner_id, lease[index].generation, keep_s)
        )

    @rule(key=keys)
    def abort(self, key: RequestKey) -> None:
        self._both(lambda store, _: store.abort(key))

    @rule(key=keys)
    def load(self, key: RequestKey) -> None:
        self._both(lambda store, _: store.load(key))

    @rule(role=st.sampled_from(["target", "draft"]), address=names, state=st.sampled_from(["ready", "draining"]))
    def announce(self, role: str, address: str, state: str) -> None:
        self._ttl_s += 1
        record = ReplicaRecord(role, address, "i", state, GetReplicaInfoResponse(version=state))
        self._both(lambda store, _: store.announce(record, self._ttl_s))

    @rule(role=st.sampled_from(["target", "draft"]), address=names)
    def withdraw(self, role: str, address: str) -> None:
        self._both(lambda store, _: store.withdraw(role, address))

    @rule()
    def replicas(self) -> None:
        self._both(lambda store, _: store.replicas())

    @rule(replica=names, digests=digests)
    def add_prefixes(self, replica: str, digests: list[bytes]) -> None:
        self._ttl_s += 1
        self._both(lambda store, _: store.add_prefixes(replica, digests, self._ttl_s))

    @rule(digests=digests)
    def prefix_holders(self, digests: list[bytes]) -> None:
        self._both(lambda store, _: store.prefix_holders(digests))

    @rule(bucket=names, amount=st.integers(0, 20), burst=st.integers(1, 20), force=st.booleans())
    def take_tokens(self, bucket: str, amount: int, burst: int, force: bool) -> None:
        # A rate at which nothing is refilled while the test runs.
        self._both(lambda store, _: store.take_tokens(bucket, amount, 1e-9, burst, force))

    def _both(self, run: Callable[[Store, int], Awaitable[Any]]) -> tuple[Any, Any]:
        """Do it in both stores; both results, or errors, must be the same."""

        async def outcome(index: int) -> Any:
            try:
                return await run(self._stores[index], index)
            except StoreError as error:
                return f"{type(error).__name__}: {error}"

        memory, real = (self._runner.run(outcome(index)) for index in range(2))
        assert _comparable(memory) == _comparable(real)
        return memory, real


def _comparable(result: Any) -> Any:
    if isinstance(result, BegunRequest):
        return ("begun", _comparable(result.record))
    if isinstance(result, JournalRecord):
        return dataclasses.replace(result, generation=0)
    if isinstance(result, float):
        return f"{result:.3g}"
    return result


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def test_memory_and_redis_answer_alike(server: RedisServer) -> None:
    def fresh() -> Equivalence:
        with server.client() as client:
            client.flushall()
        return Equivalence(server.url)

    run_state_machine_as_test(
        fresh,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            # Shrinking takes minutes; the steps are printed all the same.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
