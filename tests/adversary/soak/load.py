"""Load with churn: requests at a rate, of all lengths, by clients that leave early, reconnect, and of new tenants."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

from specdec.client import Client, Completion, generate_resuming
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Overloaded, SpecdecError
from tests.adversary.fleet import Fleet
from tests.adversary.soak.connections import Connections, Name
from tests.adversary.soak.tenants import Tenants
from tests.adversary.workload import Sizes, difference, make_requests

CUT_OFF_SHARE = 0.08
PROBE_SHARE = 0.05
"""Requests that are compared with their undisturbed runs."""
RECONNECT_SHARE = 0.02
NUM_PROBES = 12
MOST_AT_ONCE = 200
"""More would show that the load is above what is served; they are counted, not sent."""


@dataclass(slots=True)
class Latencies:
    """What clients felt since the last `take`, in seconds."""

    first_token_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    """Between two chunks of one choice."""

    def take(self) -> Latencies:
        """What there is, and begin anew."""
        taken = Latencies(self.first_token_s, self.between_s)
        self.first_token_s, self.between_s = [], []
        return taken


class Load:
    """Sends requests, and counts what becomes of them."""

    def __init__(self, fleet: Fleet, tenants: Tenants, sizes: Sizes, seed: int) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._sizes = sizes
        self._rng = random.Random(seed)
        self._connections = Connections(fleet.address_for)
        self._running: set[asyncio.Task[None]] = set()
        self._probes: list[tuple[api.GenerateRequest, Completion]] = []
        self.latencies = Latencies()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    @property
    def num_connections(self) -> int:
        """How many there have been."""
        return self._connections.num_opened

    async def prepare(self) -> None:
        """Get the answers that probes are compared with."""
        async with self._connections.use(("client-0", self._tenants.operator)) as client:
            for body in make_requests(NUM_PROBES, self._sizes, seed=1):
                self._probes.append((body, await client.complete(body)))

    async def closed_loop(self, num_clients: int, seconds: float) -> float:
        """Requests per second that so many clients get answered, each asking again at once."""
        ends_s = time.monotonic() + seconds
        num_before, began_s = self.counts["ended"], time.monotonic()

        async def ask() -> None:
            while time.monotonic() < ends_s:
                await self._one()

        await asyncio.gather(*(ask() for _ in range(num_clients)))
        return (self.counts["ended"] - num_before) / (time.monotonic() - began_s)

    async def open_loop(self, per_second: float, seconds: float) -> None:
        """Send requests at this rate, at random moments, whatever becomes of them."""
        ends_s = time.monotonic() + seconds
        due_s = time.monotonic()
        while due_s < ends_s:
            due_s += self._rng.expovariate(per_second)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if len(self._running) >= MOST_AT_ONCE:
                self.counts["not sent"] += 1
                continue
            task = asyncio.create_task(self._one())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._connections.close()

    async def _one(self) -> None:
        rng = self._rng
        reference = None
        if rng.random() < PROBE_SHARE:
            body, reference = rng.choice(self._probes)
        else:
            [body] = make_requests(1, self._sizes, seed=rng.randrange(2**62))
            # Every fourth of a set is text; here all are sets of one.
            body.sampling.temperature = rng.choice((0.0, 0.7, 1.0))
        cut_after = rng.randrange(1, 100) if reference is None and rng.random() < CUT_OFF_SHARE else None
        completion = Completion()
        try:
            async with self._connections.use(await self._name()) as client:
                await self._read(client, body, completion, cut_after)
        except Overloaded:
            self.counts["refused"] += 1
        except SpecdecError as error:
            self.counts["failed"] += 1
            self.failures.append(f"{type(error).__name__} {error.reason}: {error}")
        else:
            self.counts["cut off" if completion.finished is None else "finished"] += 1
            self.counts["tokens"] += completion.num_tokens
            if reference is not None and (found := difference(completion, reference)) is not None:
                self.failures.append(f"unequal: {found}")
        self.counts["ended"] += 1

    async def _read(
        self, client: Client, body: api.GenerateRequest, completion: Completion, cut_after: int | None
    ) -> None:
        began_s = time.monotonic()
        last_s: dict[int, float] = {}
        async with aclosing(generate_resuming(client, body)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                completion.add(chunk)
                if chunk.WhichOneof("chunk") != "delta":
                    continue
                now, index = time.monotonic(), chunk.delta.index
                if not last_s:
                    self.latencies.first_token_s.append(now - began_s)
                if index in last_s:
                    self.latencies.between_s.append(now - last_s[index])
                last_s[index] = now
                if cut_after is not None and completion.num_tokens >= cut_after:
                    return

    async def _name(self) -> Name:
        """Who asks next: a client of a tenant that is there, now and then over a new connection."""
        keys = self._tenants.current
        await self._connections.give_up_all_but([*keys, self._tenants.operator])
        name = self._rng.choice(self._fleet.topology.clients), self._tenants.pick(self._rng)
        if self._rng.random() < RECONNECT_SHARE:
            await self._connections.give_up(name)
        return name
