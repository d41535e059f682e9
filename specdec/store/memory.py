"""The store in this process's memory, for a single coordinator without Redis."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.store import checks
from specdec.store.interface import (
    Appended,
    BegunRequest,
    JournalRecord,
    JournalWrite,
    Lease,
    NewRequest,
    ReplicaRecord,
    RequestHeld,
    RequestKey,
    StoreLimits,
    TooManyConcurrent,
)
from specdec.store.records import encode_lasting

SWEEP_INTERVAL_S = 30.0
"""Seconds between two sweeps, which drop all that has expired."""


@dataclass(slots=True)
class _Request:
    owner_id: str
    generation: int
    seed: int
    params: bytes
    # Compact: many ended requests are kept.
    token_ids: list[array[int]]
    origins: list[bytearray]
    lease_s: float = 0.0
    lease_until_s: float = 0.0
    expires_s: float = 0.0
    is_ended: bool = False
    is_aborted: bool = False

    def record(self) -> JournalRecord:
        return JournalRecord(
            owner_id=self.owner_id,
            generation=self.generation,
            seed=self.seed,
            params=self.params,
            token_ids=tuple(map(tuple, self.token_ids)),
            origins=tuple(map(tuple, self.origins)),
            is_ended=self.is_ended,
            is_aborted=self.is_aborted,
        )


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float
    full_s: float


@dataclass(slots=True)
class _State:
    """The store's records, with their times of expiry."""

    replicas: dict[tuple[str, str], tuple[float, ReplicaRecord]] = field(default_factory=dict)
    # Announcements of replicas that are new, or differ from their last one in more than the load.
    num_changes: int = 0
    holders: dict[bytes, dict[str, float]] = field(default_factory=dict)
    requests: dict[RequestKey, _Request] = field(default_factory=dict)
    # Requests that have ended, in the order of their ends.
    ended: dict[RequestKey, None] = field(default_factory=dict)
    # Requests with a present or former lease, per tenant.
    live: dict[str, set[RequestKey]] = field(default_factory=dict)
    buckets: dict[str, _Bucket] = field(default_factory=dict)


class MemoryStore:
    """A Store that never fails and is lost with the process. Use it from one event loop."""

    def __init__(self, limits: StoreLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty store. `clock` returns seconds and never goes back."""
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._state = _State()
        self._next_sweep_s = clock() + SWEEP_INTERVAL_S

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        """See Store."""
        checks.check_name("role", replica.role)
        checks.check_name("address", replica.address)
        checks.check_duration("ttl_s", ttl_s)
        now = self._now()
        replicas, name = self._state.replicas, (replica.role, replica.address)
        before = replicas.get(name)
        if before is None or before[0] <= now or encode_lasting(before[1]) != encode_lasting(replica):
            self._state.num_changes += 1
        replicas[name] = (now + ttl_s, replica)
        while len(replicas) > self._limits.max_replicas:
            del replicas[min(replicas, key=lambda name: replicas[name][0])]

    async def withdraw(self, role: str, address: str) -> None:
        """See Store."""
        self._state.replicas.pop((role, address), None)

    async def replicas(self) -> list[ReplicaRecord]:
        """See Store."""
        now = self._now()
        return [replica for _, (expires_s, replica) in sorted(self._state.replicas.items()) if expires_s > now]

    async def registered(self, known: str) -> tuple[str, list[ReplicaRecord] | None]:
        """See Store."""
        records = await self.replicas()
        version = f"{len(records)} {self._state.num_changes}"
        return version, None if version == known else records

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        """See Store."""
        checks.check_name("replica", replica)
        checks.check_duration("ttl_s", ttl_s)
        checks.check_digests(digests, self._limits)
        now = self._now()
        for digest in digests:
            holders = {
                name: expires_s for name, expires_s in self._state.holders.get(digest, {}).items() if expires_s > now
            }
            holders[replica] = now + ttl_s
            while len(holders) > self._limits.max_holders:
                del holders[min(holders, key=holders.__getitem__)]
            self._state.holders[digest] = holders

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        """See Store."""
        checks.check_digests(digests, self._limits)
        now = self._now()
        return [
            frozenset(name for name, expires_s in self._state.holders.get(digest, {}).items() if expires_s > now)
            for digest in digests
        ]

    async def begin(self, key: RequestKey, request: NewRequest) -> BegunRequest:
        """See Store."""
        checks.check_request(request, self._limits)
        now = self._now()
        held = self._request(key, now)
        if held is not None and held.is_ended and not request.restart:
            return BegunRequest(held.generation, held.record())
        if (
            held is not None
            and held.owner_id != request.owner_id
            and held.lease_until_s > now
            and not request.take_over
        ):
            raise RequestHeld(held.owner_id)
        num_others = self._num_live(key, now)
        if request.max_concurrent is not None and num_others >= request.max_concurrent:
            raise TooManyConcurrent(num_others)
        record = None if held is None or request.restart else held.record()
        generation = max(0 if held is None else held.generation + 1, int(now * 1000))
        if held is None or request.restart:
            held = _Request(
                owner_id=request.owner_id,
                generation=generation,
                seed=request.seed,
                params=request.params,
                token_ids=[array("I") for _ in range(request.num_choices)],
                origins=[bytearray() for _ in range(request.num_choices)],
            )
            self._state.requests[key] = held
            self._state.ended.pop(key, None)
        held.owner_id = request.owner_id
        held.generation = generation
        held.is_aborted = False
        held.lease_s = request.lease_s
        self._hold(key, held, now)
        return BegunRequest(generation, record)

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        """See Store."""
        checks.check_writes(writes, self._limits)
        now = self._now()
        return [self._append(write, now) for write in writes]

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """See Store."""
        now = self._now()
        owned = [self._writable(lease.key, lease.owner_id, lease.generation, now) for lease in leases]
        for lease, request in zip(leases, owned, strict=True):
            if request is not None:
                self._hold(lease.key, request, now)
        return [request is not None for request in owned]

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        """See Store."""
        checks.check_keep(keep_s)
        now = self._now()
        request = self._owned(key, owner_id, generation, now)
        if request is None:
            return False
        request.is_ended = True
        request.lease_until_s = 0.0
        request.expires_s = now + keep_s
        ended = self._state.ended
        ended[key] = None
        while len(ended) > self._limits.max_ended:
            oldest = next(iter(ended))
            del ended[oldest], self._state.requests[oldest]
        return True

    async def abort(self, key: RequestKey) -> bool:
        """See Store."""
        now = self._now()
        request = self._request(key, now)
        if request is None or request.is_ended or request.lease_until_s <= now:
            return False
        request.is_aborted = True
        return True

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """See Store."""
        request = self._request(key, self._now())
        return None if request is None else request.record()

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        """See Store."""
        checks.check_bucket(amount, rate_per_s, burst, force)
        now = self._now()
        level = burst
        if (old := self._state.buckets.get(bucket)) is not None:
            level = min(burst, old.level + max(0.0, now - old.at_s) * rate_per_s)
        needed = min(amount, burst)
        wait_s = 0.0
        if force or level >= needed:
            level = min(burst, level - amount)
        else:
            wait_s = (needed - level) / rate_per_s
        self._state.buckets[bucket] = _Bucket(level, now, now + (burst - level) / rate_per_s)
        return wait_s

    async def ping(self) -> None:
        """See Store."""

    async def close(self) -> None:
        """See Store."""

    def _append(self, write: JournalWrite, now: float) -> Appended:
        request = self._writable(write.key, write.owner_id, write.generation, now)
        if request is None or write.choice >= len(request.token_ids):
            return Appended.NOT_OWNER
        self._hold(write.key, request, now)
        token_ids = request.token_ids[write.choice]
        if write.start > len(token_ids):
            return Appended.GAP
        end = write.start + len(write.token_ids)
        token_ids[write.start : end] = array("I", write.token_ids)
        request.origins[write.choice][write.start : end] = bytes(write.origins)
        return Appended.STORED

    def _request(self, key: RequestKey, now: float) -> _Request | None:
        request = self._state.requests.get(key)
        return request if request is not None and request.expires_s > now else None

    def _owned(self, key: RequestKey, owner_id: str, generation: int, now: float) -> _Request | None:
        request = self._request(key, now)
        if request is None or request.is_ended or (request.owner_id, request.generation) != (owner_id, generation):
            return None
        return request

    def _writable(self, key: RequestKey, owner_id: str, generation: int, now: float) -> _Request | None:
        request = self._owned(key, owner_id, generation, now)
        return None if request is None or request.is_aborted else request

    def _hold(self, key: RequestKey, request: _Request, now: float) -> None:
        request.lease_until_s = now + request.lease_s
        request.expires_s = request.lease_until_s + self._limits.abandoned_keep_s
        self._state.live.setdefault(key.tenant, set()).add(key)

    def _num_live(self, key: RequestKey, now: float) -> int:
        """Return the number of the tenant's other requests with a live lease; drop requests without one."""
        requests = self._state.requests
        live = {
            other
            for other in self._state.live.get(key.tenant, ())
            if other in requests and requests[other].lease_until_s > now
        }
        self._state.live[key.tenant] = live
        return len(live - {key})

    def _now(self) -> float:
        now = self._clock()
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + SWEEP_INTERVAL_S
            self._sweep(now)
        return now

    def _sweep(self, now: float) -> None:
        state = self._state
        state.replicas = {name: entry for name, entry in state.replicas.items() if entry[0] > now}
        state.holders = {digest: holders for digest, holders in state.holders.items() if max(holders.values()) > now}
        state.requests = {key: request for key, request in state.requests.items() if request.expires_s > now}
        state.ended = {key: None for key in state.ended if key in state.requests}
        live = {tenant: {key for key in keys if key in state.requests} for tenant, keys in state.live.items()}
        state.live = {tenant: keys for tenant, keys in live.items() if keys}
        state.buckets = {name: bucket for name, bucket in state.buckets.items() if bucket.full_s > now}
