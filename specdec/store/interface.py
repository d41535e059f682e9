"""What coordinators share: the registry of replicas, who caches which prefix, journals, quotas; and the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from specdec.v1.common_pb2 import GetReplicaInfoResponse


class StoreError(Exception):
    """Base of all that a store raises."""


class StoreUnavailable(StoreError):
    """The store is gone, too slow, or refuses its work. Nothing is known about whether the operation took effect."""


class RequestHeld(StoreError):
    """Another owner holds a live lease on the request."""

    def __init__(self, owner_id: str) -> None:
        super().__init__(f"the request is held by {owner_id}")
        self.owner_id = owner_id


class TooManyConcurrent(StoreError):
    """The tenant has as many running requests as it may."""

    def __init__(self, num_running: int) -> None:
        super().__init__(f"{num_running} requests of this tenant are running")
        self.num_running = num_running


class LimitExceeded(StoreError, ValueError):
    """An argument is larger than the store takes (see StoreLimits). Nothing was written."""


class StoreUrlError(StoreError, ValueError):
    """The setting `redis_url`, or one that goes with it, is wrong. Never holds a password."""


class RequestKey(NamedTuple):
    """Names a request. Any strings: they are escaped, and hashed when long."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on what is stored. A call beyond one raises LimitExceeded, unless said otherwise."""

    # Replicas in the registry; the ones that expire first make room.
    max_replicas: int = 4096
    # Replicas remembered per prefix; the ones that expire first make room.
    max_holders: int = 16
    # Digests in one call.
    max_digests: int = 4096
    # Bytes of a request's parameters, with its prompt.
    max_params_bytes: int = 16 << 20
    # Choices of one request.
    max_choices: int = 128
    # Tokens of one choice.
    max_tokens: int = 1 << 20
    # Ended requests that a store in memory keeps; the ones that ended first make room. Redis has its own limit.
    max_ended: int = 1024
    # How long a request that was not ended stays after its lease ran out, in seconds.
    abandoned_keep_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica of a service, as it last announced itself."""

    # target, draft or coordinator.
    role: str
    # HOST:PORT, as others reach it. With the role it identifies the replica.
    address: str
    # Of the process: changes with each start.
    instance_id: str
    # In the words of the one who announces, for example ready or draining.
    state: str
    info: GetReplicaInfoResponse


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What an owner wants to journal."""

    owner_id: str
    seed: int
    # Opaque; read back by whoever takes the request over.
    params: bytes
    num_choices: int
    # The request is the owner's for this long after each append or renewal, in seconds.
    lease_s: float
    # Refuse when the tenant has this many requests with a live lease, this one not counted. None: no limit.
    max_concurrent: int | None = None
    # Take the request from an owner whose lease is live.
    take_over: bool = False
    # Forget what is journalled of the request, even of one that has ended, and begin it anew.
    restart: bool = False


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A request as journalled."""

    owner_id: str
    generation: int
    seed: int
    params: bytes
    # Per choice: committed output tokens from the first on, and the origin of each (specdec.v1.Origin).
    token_ids: tuple[tuple[int, ...], ...]
    origins: tuple[tuple[int, ...], ...]
    is_ended: bool
    # Somebody wants it to end; see Store.abort.
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that is now the caller's, or that has ended before (`record.is_ended`) and is nobody's."""

    generation: int
    # What was journalled before; None when the request is new.
    record: JournalRecord | None


@dataclass(frozen=True, slots=True)
class Lease:
    """What a request's owner shows to keep it."""

    key: RequestKey
    owner_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class JournalWrite:
    """Tokens that were committed."""

    key: RequestKey
    owner_id: str
    generation: int
    choice: int
    # Index of the first in the choice's output.
    start: int
    token_ids: Sequence[int]
    # One per token, 0 to 255.
    origins: Sequence[int]


class Appended(IntEnum):
    """What became of a JournalWrite. True as a bool iff the writer is still the owner."""

    # The request is another's, has ended, was aborted, or is not known (it expired, or the store lost it). Nothing was
    # written.
    NOT_OWNER = 0
    # Written, and the lease renewed.
    STORED = 1
    # The lease is renewed, but tokens before `start` are missing, so nothing was written: send the output from 0.
    GAP = 2


class Store(Protocol):
    """A small store that coordinators and replicas share. All of it may be lost at any time: nothing depends on it.

    Every method but `close` raises StoreUnavailable when the store is gone or slow; it may have taken effect all the
    same, and all but `take_tokens` can be repeated. Times are the store's own, durations are in seconds. Everything
    stored expires. Methods may be called concurrently, from one event loop.
    """

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        """Register a replica, or renew it, for `ttl_s`. The last record of a role and address stands."""
        ...

    async def withdraw(self, role: str, address: str) -> None:
        """Remove a replica from the registry, if it is there."""
        ...

    async def replicas(self) -> list[ReplicaRecord]:
        """Return the replicas that have not expired, sorted by role and address."""
        ...

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        """Remember for `ttl_s` that a replica caches the blocks with these digests; `replica` is any name for it."""
        ...

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        """Return, for each digest, the replicas that were said to cache it."""
        ...

    async def begin(self, key: RequestKey, request: NewRequest) -> Begun:
        """Become the owner of a request: of a new one, of one whose lease has run out, or, to take it over, of any.

        Of several that begin the same request, one wins. The generation is above that of every earlier owner, and,
        because it is not below the store's clock in milliseconds, also above those that a store which has lost its
        data gave out. What is journalled already stands: `seed`, `params` and `num_choices` of a later NewRequest are
        ignored, and a request that has ended is returned as it is, without a lease. With `restart` it is all replaced,
        by an empty record.

        Raises:
            RequestHeld: another owner's lease is live.
            TooManyConcurrent: the tenant has `max_concurrent` other requests with a live lease.
            LimitExceeded: see StoreLimits.
        """
        ...

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        """Journal committed tokens, in order and in one round trip, and renew the leases. One result per write.

        Writing the same tokens again changes nothing. Writes are independent: one that is refused does not undo others.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Renew leases; for each, return whether the caller is still the owner, and the request was not aborted."""
        ...

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        """End a request and keep its record for `keep_s` (0 deletes it); False: it is not the caller's."""
        ...

    async def abort(self, key: RequestKey) -> bool:
        """Ask the owner of a request to end it; False: there is none whose lease is live.

        The owner keeps the request, but may write to it only after it has begun it again, which withdraws the abort.
        """
        ...

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """Return a request as journalled, whoever owns it, or None."""
        ...

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        """Take tokens from a tenant's bucket, which refills at `rate_per_s` up to `burst` and is full at first.

        Returns 0 when they were taken, else the seconds until they can be; nothing was taken then. With `force` they
        are always taken, into debt if need be, and a negative amount gives tokens back. An amount above `burst` is
        granted by a full bucket, also into debt.
        """
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def close(self) -> None:
        """Release connections. The store is not used afterwards. Never raises StoreUnavailable."""
        ...
