"""A circuit breaker for a store: it costs next to nothing while the store is down."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

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
    Store,
    StoreUnavailable,
    TooManyConcurrent,
)
from specdec.wire.backoff import Backoff
from specdec.wire.tls_files import TlsFiles

_Result = TypeVar("_Result")
_BACKOFF = Backoff(first_s=0.25, longest_s=10.0, spread=(0.5, 1.0))
_QUIET_S = 10.0
"""Seconds between two lines of a store that goes down: a full one answers reads, and is down and up twice a second."""
# Called after each operation that reached the store, with its name, its seconds, and whether the store answered.
OperationObserver = Callable[[str, float, bool], None]
# Called when the store goes down or comes back, with whether it is up.
StateObserver = Callable[[bool], None]


class GuardedStore:
    """A Store in front of another one; after a failure it does not call that one for a while (a circuit breaker).

    After a failure each operation raises StoreUnavailable at once until the back-off is over. Then one operation at a
    time is let through as a probe: its success heals the store, its failure begins a longer back-off. Changes
    between up and down are lines in the log, at most two in ten seconds.
    """

    def __init__(
        self,
        store: Store,
        observe: OperationObserver | None = None,
        on_change: StateObserver | None = None,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard a store, which is closed with this one.

        Args:
            store: the store.
            observe: called after each operation that reached the store. Must not raise.
            on_change: called with whether the store is up, when that changes. Must not raise.
            backoff: waits before the store is tried again.
            clock: monotonic seconds.
        """
        self.tls_files: TlsFiles | None = None
        """TLS files of connections to the store, for metrics."""
        self._store = store
        self._observe = observe
        self._on_change = on_change
        self._backoff = backoff or _BACKOFF
        self._clock = clock
        self._log = structlog.get_logger("specdec.store")
        self._num_failures = 0
        self._down_since_s: float | None = None
        self._retry_at_s = 0.0
        self._is_probing = False
        self._is_told = False
        """Whether the log's last line says that the store is down."""
        self._tell_at_s = 0.0
        """Time from which a line may say so again."""

    @property
    def is_up(self) -> bool:
        """Whether the last operation that reached the store was answered."""
        return self._down_since_s is None

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        """See Store."""
        await self._call("announce", lambda: self._store.announce(replica, ttl_s))

    async def withdraw(self, role: str, address: str) -> None:
        """See Store."""
        await self._call("withdraw", lambda: self._store.withdraw(role, address))

    async def replicas(self) -> list[ReplicaRecord]:
        """See Store."""
        return await self._call("replicas", self._store.replicas)

    async def registered(self, known: str) -> tuple[str, list[ReplicaRecord] | None]:
        """See Store."""
        return await self._call("replicas", lambda: self._store.registered(known))

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        """See Store."""
        await self._call("add_prefixes", lambda: self._store.add_prefixes(replica, digests, ttl_s))

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        """See Store."""
        return await self._call("prefix_holders", lambda: self._store.prefix_holders(digests))

    async def begin(self, key: RequestKey, request: NewRequest) -> BegunRequest:
        """See Store."""
        return await self._call("begin", lambda: self._store.begin(key, request))

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        """See Store."""
        return await self._call("append", lambda: self._store.append(writes))

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """See Store."""
        return await self._call("renew", lambda: self._store.renew(leases))

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        """See Store."""
        return await self._call("end", lambda: self._store.end(key, owner_id, generation, keep_s))

    async def abort(self, key: RequestKey) -> bool:
        """See Store."""
        return await self._call("abort", lambda: self._store.abort(key))

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """See Store."""
        return await self._call("load", lambda: self._store.load(key))

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        """See Store."""
        return await self._call(
            "take_tokens", lambda: self._store.take_tokens(bucket, amount, rate_per_s, burst, force)
        )

    async def ping(self) -> None:
        """See Store. As any operation, it heals the store when it is let through and answered."""
        await self._call("ping", self._store.ping)

    async def close(self) -> None:
        """See Store."""
        await self._store.close()

    async def _call(self, operation: str, run: Callable[[], Awaitable[_Result]]) -> _Result:
        is_probe = not self.is_up
        if is_probe:
            if self._is_probing or self._clock() < self._retry_at_s:
                raise StoreUnavailable("the store is down; it is left alone for a while")
            self._is_probing = True
        started_s = self._clock()
        try:
            result = await run()
        except StoreUnavailable as error:
            self._finish(operation, started_s, error)
            raise
        except (RequestHeld, TooManyConcurrent):
            # A refusal is an answer.
            self._finish(operation, started_s, None)
            raise
        except Exception:
            # An argument beyond a limit: the store was not called.
            if is_probe:
                self._retry_at_s = self._clock()
            else:
                self._finish(operation, started_s, None)
            raise
        finally:
            if is_probe:
                self._is_probing = False
        self._finish(operation, started_s, None)
        return result

    def _finish(self, operation: str, started_s: float, error: StoreUnavailable | None) -> None:
        now = self._clock()
        if self._observe is not None:
            self._observe(operation, now - started_s, error is None)
        if error is not None:
            self._failed(operation, started_s, now, error)
        elif self._down_since_s is not None and started_s >= self._down_since_s:
            if self._is_told:
                self._log.info("store_up", operation=operation, down_s=round(now - self._down_since_s, 3))
                self._is_told = False
            self._down_since_s = None
            self._num_failures = 0
            if self._on_change is not None:
                self._on_change(True)

    def _failed(self, operation: str, started_s: float, now: float, error: StoreUnavailable) -> None:
        if self._down_since_s is not None and started_s < self._down_since_s:
            # One of several operations that were under way when the first one failed: the failure is known.
            return
        self._num_failures += 1
        self._retry_at_s = now + self._backoff.wait_s(self._num_failures)
        if not self._is_told and now >= self._tell_at_s:
            self._is_told, self._tell_at_s = True, now + _QUIET_S
            self._log.warning("store_down", operation=operation, error=str(error))
        if self._down_since_s is None:
            self._down_since_s = now
            if self._on_change is not None:
                self._on_change(False)
