"""The store that coordinators share: registry of replicas, prefix map, journal of requests, quotas; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from specdec.v1.common_pb2 import GetReplicaInfoResponse


class StoreError(Exception):
    """Base of a store's errors."""


class StoreUnavailable(StoreError):
    """The store is gone, too slow, or refuses to work. The operation may have taken effect or not."""


class RequestHeld(StoreError):
    """Another owner holds a live lease on the request."""

    def __init__(self, owner_id: str) -> None:
        super().__init__(f"the request is held by {owner_id}")
        self.owner_id = owner_id


class TooManyConcurrent(StoreError):
    """The tenant has reached its limit of running requests."""

    def __init__(self, num_running: int) -> None:
        super().__init__(f"{num_running} requests of this tenant are running")
        self.num_running = num_running


class LimitExceeded(StoreError, ValueError):
    """An argument exceeds a bound of StoreLimits. Nothing was written."""


class StoreUrlError(StoreError, ValueError):
    """The setting `redis_url`, or one that goes with it, is wrong. Never holds a password."""


class RequestKey(NamedTuple):
    """Names a request. Any strings: they are escaped, and hashed when long."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on stored data. A call beyond one raises LimitExceeded, except where a comment says otherwise."""

    # Replicas in the registry; the first to expire makes room.
    max_replicas: int = 65_536
    # Replicas remembered per prefix; the first to expire makes room.
    max_holders: int = 16
    # Digests in one call.
    max_digests: int = 4096
    # Bytes of a request's parameters, with its prompt.
    max_params_bytes: int = 16 << 20
    # Choices of one request.
    max_choices: int = 128
    # Tokens of one choice.
    max_tokens: int = 1 << 20
    # Ended requests that a store in memory keeps; the first that ended makes room. Redis has its own limit.
    max_ended: int = 1024
    # Seconds that a request without an end is kept after its lease has run out.
    abandoned_keep_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica of a service, as of its last announcement."""

    # target, draft or coordinator.
    role: str
    # HOST:PORT at which others reach the replica. With the role it identifies the replica.
    address: str
    # Id of the process: it changes with each start.
    instance_id: str
    # State in the announcer's words, for example ready or draining.
    state: str
    info: GetReplicaInfoResponse


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that an owner wants to journal."""

    owner_id: str
    seed: int
    # Opaque to the store; the next owner reads them.
    params: bytes
    num_choices: int
    # Seconds of the lease, from each append or renewal on.
    lease_s: float
    # Most other requests of the tenant with a live lease; at more the request is refused. None: no limit.
    max_concurrent: int | None = None
    # Take the request from an owner whose lease is live.
    take_over: bool = False
    # Replace the journalled request, even one that has ended, by an empty one.
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
    # An abort was asked for; see Store.abort.
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class BegunRequest:
    """A request that the caller now owns, or that has ended before (`record.is_ended`) and has no owner."""

    generation: int
    # The journalled request; None when it is new.
    record: JournalRecord | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The proof of ownership with which a request's owner renews its lease."""

    key: RequestKey
    owner_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class JournalWrite:
    """Committed tokens of one choice."""

    key: RequestKey
    owner_id: str
    generation: int
    choice: int
    # Index of the first token in the choice's output.
    start: int
    token_ids: Sequence[int]
    # One per token, 0 to 255.
    origins: Sequence[int]


class Appended(IntEnum):
    """The result of a JournalWrite. True as a bool iff the writer is still the owner."""

    # Nothing was written: the request has another owner, has ended, was aborted, or is unknown (expired or lost).
    NOT_OWNER = 0
    # Written, and the lease renewed.
    STORED = 1
    # The lease is renewed, but tokens before `start` are missing, so nothing was written: send the output from 0.
    GAP = 2


class Store(Protocol):
    """A small store that coordinators and replicas share. All of it may be lost at any time.

    Every method but `close` raises StoreUnavailable when the store is gone or slow. The operation may still have taken
    effect; all operations but `take_tokens` can be repeated. Times are the store's own, durations are in seconds. All
    records expire. Methods may be called concurrently, from one event loop.
    """

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        """Register a replica, or renew it, for `ttl_s`. A new record replaces the one of the same role and address."""
        ...

    async def withdraw(self, role: str, address: str) -> None:
        """Remove a replica from the registry, if it is there."""
        ...

    async def replicas(self) -> list[ReplicaRecord]:
        """Return the replicas that have not expired, sorted by role and address."""
        ...

    async def registered(self, known: str) -> tuple[str, list[ReplicaRecord] | None]:
        """Return the registry's version, and what `replicas` returns unless the version is `known`.

        Equal versions: the same replicas in the same states with the same identities. Their loads may differ, and so
        may replicas of releases before 0.2, which set no version, as long as their number is the same.
        """
        ...

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        """Remember for `ttl_s` that a replica caches the blocks with these digests; `replica` is any name for it."""
        ...

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        """Return, for each digest, the replicas that cache it by `add_prefixes`."""
        ...

    async def begin(self, key: RequestKey, request: NewRequest) -> BegunRequest:
        """Become the owner of a request: of a new one, of one whose lease has run out, or, to take it over, of any.

        Of several callers that begin the same request, one wins. The generation is above that of every earlier owner.
        Since it is not below the store's clock in milliseconds, it is also above the generations from before a loss of
        the store's data. A journalled request stays: `seed`, `params` and `num_choices` of a later NewRequest are
        ignored, and a request that has ended is returned unchanged, without a lease. `restart` replaces it by an empty
        record.

        Raises:
            RequestHeld: another owner's lease is live.
            TooManyConcurrent: the tenant has `max_concurrent` other requests with a live lease.
            LimitExceeded: see StoreLimits.
        """
        ...

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        """Journal committed tokens, in order and in one round trip, and renew the leases. One result per write.

        Writing the same tokens again changes nothing. Writes are independent: a refused one does not undo others.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Renew leases; return for each whether the caller is still the owner and the request was not aborted."""
        ...

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        """End a request and keep its record for `keep_s` (0 deletes it); False: the caller is not its owner."""
        ...

    async def abort(self, key: RequestKey) -> bool:
        """Ask the owner of a request to end it; False: no owner has a live lease.

        The owner keeps the request. Before it writes again it must begin the request again, which withdraws the abort.
        """
        ...

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """Return the journalled request, of any owner; None where there is none."""
        ...

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        """Take tokens from a tenant's bucket, which refills at `rate_per_s` up to `burst` and is full at first.

        Returns 0 when the tokens were taken, otherwise the seconds until they can be. With `force` they are always
        taken, into debt if need be, and a negative amount gives tokens back. A full bucket grants an amount above
        `burst`, into debt.
        """
        ...

    async def ping(self) -> None:
        """Return once the store answers."""
        ...

    async def close(self) -> None:
        """Release connections. The store may not be used afterwards. Never raises StoreUnavailable."""
        ...
