"""The store on Redis: a single server, a master found through sentinels, or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, ReadOnlyError

from specdec.store import checks, scripts
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
    StoreUnavailable,
    TooManyConcurrent,
)
from specdec.store.keys import StoreKeys, escape
from specdec.store.records import (
    TOKEN_BYTES,
    decode_record,
    decode_replica,
    encode_lasting,
    encode_replica,
    pack_tokens,
)
from specdec.store.scripts import Script
from specdec.wire.tls_files import TlsFiles

MAX_CONCURRENT_OPERATIONS = 32
"""Operations under way at once, hence also connections (to each node of a cluster); other operations wait."""
_MOST_WAITS = 8
"""Time limits that an operation may wait for its turn. Many at once (a fleet's requests that end together) take longer
than one may, and Redis is not down for that."""
# Keys and arguments of one run of a script.
_Argument = str | bytes | int | float
_Call = tuple[Sequence[str], Sequence[_Argument]]


class RedisStore:
    """A Store whose operations are Lua scripts, each of them atomic."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        keys: StoreKeys,
        timeout_s: float,
        limits: StoreLimits | None = None,
        close_others: Callable[[], Awaitable[None]] | None = None,
        tls_files: TlsFiles | None = None,
    ) -> None:
        """Use a client, which need not be connected yet and is closed with the store.

        Args:
            client: a client that returns bytes.
            keys: names of the keys.
            timeout_s: longest time of an operation in seconds; a longer one raises StoreUnavailable.
            limits: bounds, the same in all processes that share a Redis.
            close_others: closes connections that the client does not close itself.
            tls_files: the files that the client follows, if any.
        """
        self.tls_files = tls_files
        self._client = client
        self._keys = keys
        self._timeout_s = timeout_s
        self._limits = limits or StoreLimits()
        self._close_others = close_others
        self._announced: dict[str, bytes] = {}
        """What this process has announced, without loads."""
        self._concurrency = asyncio.Semaphore(MAX_CONCURRENT_OPERATIONS)
        self._num_running = 0
        self._num_failures = 0
        self._is_topology_stale = False

    async def announce(self, replica: ReplicaRecord, ttl_s: float) -> None:
        """See Store."""
        checks.check_name("role", replica.role)
        checks.check_name("address", replica.address)
        checks.check_duration("ttl_s", ttl_s)
        member, lasting = _member(replica.role, replica.address), encode_lasting(replica)
        is_changed = self._announced.pop(member, None) != lasting
        await self._run(
            scripts.ANNOUNCE,
            self._keys.registry(),
            [member, encode_replica(replica), _ms(ttl_s), self._limits.max_replicas, int(is_changed)],
        )
        self._announced[member] = lasting

    async def withdraw(self, role: str, address: str) -> None:
        """See Store."""
        self._announced.pop(_member(role, address), None)
        await self._run(scripts.WITHDRAW, self._keys.replicas(), [_member(role, address)])

    async def replicas(self) -> list[ReplicaRecord]:
        """See Store. Records that do not parse, as another version may write them, are left out."""
        _, records = await self.registered("")
        return records or []

    async def registered(self, known: str) -> tuple[str, list[ReplicaRecord] | None]:
        """See Store."""
        version, *encoded = await self._run(scripts.REGISTERED, self._keys.registry(), [known])
        with _readable():
            told = version.decode(errors="replace")
        if told == known:
            return known, None
        # In a thread, as there may be thousands, and streams go on meanwhile.
        return told, await asyncio.to_thread(_decoded, encoded)

    async def add_prefixes(self, replica: str, digests: Sequence[bytes], ttl_s: float) -> None:
        """See Store."""
        checks.check_name("replica", replica)
        checks.check_duration("ttl_s", ttl_s)
        checks.check_digests(digests, self._limits)
        arguments: list[_Argument] = [replica, _ms(ttl_s), self._limits.max_holders]
        await self._run_all(scripts.ADD_PREFIX, [(self._keys.prefix_holders(digest), arguments) for digest in digests])

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        """See Store."""
        checks.check_digests(digests, self._limits)
        calls: list[_Call] = [(self._keys.prefix_holders(digest), []) for digest in digests]
        answers = await self._run_all(scripts.PREFIX_HOLDERS, calls)
        with _readable():
            return [frozenset(holder.decode(errors="replace") for holder in answer) for answer in answers]

    async def begin(self, key: RequestKey, request: NewRequest) -> BegunRequest:
        """See Store."""
        checks.check_request(request, self._limits)
        max_concurrent = -1 if request.max_concurrent is None else request.max_concurrent
        outcome, *details = await self._run(
            scripts.BEGIN,
            self._keys.request(key),
            [
                *(_request_member(key), request.owner_id, request.seed, request.params, request.num_choices),
                *(_ms(request.lease_s), self._keep_ms, max_concurrent, int(request.take_over)),
                int(request.restart),
            ],
        )
        with _readable():
            if outcome == b"held":
                raise RequestHeld(details[0].decode())
            if outcome == b"many":
                raise TooManyConcurrent(int(details[0]))
            return BegunRequest(
                generation=int(details[0]), record=None if details[1] is None else decode_record(details[1])
            )

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        """See Store."""
        checks.check_writes(writes, self._limits)
        calls: list[_Call] = [
            (
                self._keys.request(write.key),
                [
                    *(_request_member(write.key), write.owner_id, write.generation, self._keep_ms, write.choice),
                    *(write.start * TOKEN_BYTES, pack_tokens(write.token_ids, write.origins)),
                ],
            )
            for write in writes
        ]
        return [Appended(answer) for answer in await self._run_all(scripts.APPEND, calls)]

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """See Store."""
        calls: list[_Call] = [
            (
                self._keys.request(lease.key),
                [_request_member(lease.key), lease.owner_id, lease.generation, self._keep_ms],
            )
            for lease in leases
        ]
        return [bool(answer) for answer in await self._run_all(scripts.RENEW, calls)]

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        """See Store."""
        checks.check_keep(keep_s)
        arguments: list[_Argument] = [_request_member(key), owner_id, generation, _ms(keep_s)]
        return bool(await self._run(scripts.END, self._keys.request(key), arguments))

    async def abort(self, key: RequestKey) -> bool:
        """See Store."""
        return bool(await self._run(scripts.ABORT, self._keys.request(key)[:1], []))

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """See Store."""
        answer = await self._run(scripts.LOAD, self._keys.request(key)[:1], [])
        with _readable():
            return None if answer is None else decode_record(answer)

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        """See Store."""
        checks.check_bucket(amount, rate_per_s, burst, force)
        return float(await self._run(scripts.TAKE, self._keys.quota(bucket), [amount, rate_per_s, burst, int(force)]))

    async def ping(self) -> None:
        """See Store."""
        async with self._operation():
            # Not PING: a cluster's client sends that to all nodes, and the cluster may work without some of them.
            await self._client.exists(self._keys.replicas()[0])

    async def close(self) -> None:
        """See Store."""
        # A connection that fails to close is closed.
        with suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()
                if self._close_others is not None:
                    await self._close_others()

    @property
    def _keep_ms(self) -> int:
        return _ms(self._limits.abandoned_keep_s)

    async def _run(self, script: Script, keys: Sequence[str], arguments: Sequence[_Argument]) -> Any:
        async with self._operation():
            try:
                return await self._client.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self._client.execute_command("EVAL", script.source, len(keys), *keys, *arguments)

    async def _run_all(self, script: Script, calls: Sequence[_Call]) -> list[Any]:
        """Run a script many times in one round trip (on a cluster: one per node, all at once)."""
        if not calls:
            return []
        async with self._operation():
            answers = await self._pipeline("EVALSHA", script.sha, calls)
            # A server that was restarted, or has just become master, does not have the script. EVAL loads it on that
            # server only: loading it on all servers of a cluster would fail while one of them is down.
            unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:
                repeated = await self._pipeline("EVAL", script.source, [calls[index] for index in unknown])
                for index, answer in zip(unknown, repeated, strict=True):
                    answers[index] = answer
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

    async def _pipeline(self, command: str, script: str, calls: Sequence[_Call]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                # Not evalsha(), which redis-py refuses in a cluster's pipeline; the command is routed by its keys.
                pipeline.execute_command(command, script, len(keys), *keys, *arguments)
            return await pipeline.execute(raise_on_error=False)

    @asynccontextmanager
    async def _operation(self) -> AsyncIterator[None]:
        """Bound the time and number of operations. Any failure inside becomes StoreUnavailable."""
        await self._wait_for_turn()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._num_running += 1
                try:
                    if isinstance(self._client, RedisCluster):
                        await self._prepare(self._client)
                    yield
                finally:
                    self._num_running -= 1
        except TimeoutError as error:
            self._failed()
            raise StoreUnavailable(f"Redis did not answer within {self._timeout_s:g} s") from error
        except Exception as error:
            # Not only RedisError: redis-py raises others, such as AttributeError where it closes a cluster's
            # connections while they are in use.
            self._failed()
            if isinstance(error, ReadOnlyError):
                await self._leave_former_master()
            raise StoreUnavailable(f"Redis failed: {type(error).__name__}: {error}") from error
        finally:
            self._concurrency.release()

    async def _leave_former_master(self) -> None:
        # The former master and redis-py keep their connections: where one address leads to the present master, only a
        # new connection reaches it. A cluster reports the new master itself.
        if isinstance(self._client, RedisCluster):
            return
        with suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self._client.connection_pool.disconnect(inuse_connections=False)

    def _failed(self) -> None:
        self._num_failures += 1
        self._is_topology_stale = True

    async def _wait_for_turn(self) -> None:
        """Take a place, which the caller releases. A failing operation fails the ones that wait."""
        num_failures, wait_s = self._num_failures, self._timeout_s * _MOST_WAITS
        try:
            async with asyncio.timeout(wait_s):
                await self._concurrency.acquire()
        except TimeoutError as error:
            raise StoreUnavailable(f"too many Redis operations at once: no turn within {wait_s:g} s") from error
        if self._num_failures != num_failures:
            self._concurrency.release()
            raise StoreUnavailable("Redis failed while the operation waited for its turn")

    async def _prepare(self, client: RedisCluster) -> None:
        # redis-py looks the masters up anew after most errors, but not after a pipeline's or our own time-out. Here it
        # does so when no other operation uses its connections.
        if self._is_topology_stale and self._num_running == 1:
            await client.aclose()
            self._is_topology_stale = False
        # Without this, several first commands at once would each go to an arbitrary node.
        await client.initialize()


@contextmanager
def _readable() -> Iterator[None]:
    """Turn errors of malformed records into StoreUnavailable: requests go on without the store."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreUnavailable(f"a record in Redis does not parse: {error}") from error


def _decoded(encoded: Sequence[bytes]) -> list[ReplicaRecord]:
    records = [record for record in map(decode_replica, encoded) if record is not None]
    return sorted(records, key=lambda record: (record.role, record.address))


def _ms(duration_s: float) -> int:
    return round(duration_s * 1000)


def _member(role: str, address: str) -> str:
    return f"{role}\0{address}"


def _request_member(key: RequestKey) -> str:
    # Its length is bounded, unlike the id's.
    return escape(key.request_id)
