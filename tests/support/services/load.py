"""Clients that send requests while services come and go, and streams that pause until the test continues them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.client import Client, ClientSettings, Completion, generate_resuming
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from tests.support.services.every_request import Answer
from tests.support.services.faults import eventually

NUM_BEFORE = 20
"""Tokens after which a stream pauses."""
PAUSE_S = 0.2
"""Seconds between two requests of a client, so that starting services get processor time."""


class LongStream:
    """A stream that pauses after `NUM_BEFORE` tokens until `go_on`, and is resumed after interruptions."""

    def __init__(self, client: Client, body: api.GenerateRequest) -> None:
        self._completion = Completion()
        self._has_begun = asyncio.Event()
        self._goes_on = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, body))

    async def has_begun(self) -> None:
        """Wait for `NUM_BEFORE` tokens. Raises AssertionError with the stream's error if it ends before."""
        begun = asyncio.create_task(self._has_begun.wait())
        await asyncio.wait({begun, self.task}, return_when=asyncio.FIRST_COMPLETED)
        assert begun.done(), self.task.exception()

    def go_on(self) -> None:
        """Read the rest."""
        self._goes_on.set()

    async def _read(self, client: Client, body: api.GenerateRequest) -> Completion:
        async for chunk in generate_resuming(client, body):
            self._completion.add(chunk)
            if self._completion.num_tokens >= NUM_BEFORE:
                self._has_begun.set()
                await self._goes_on.wait()
        return self._completion


async def collect(client: Client, body: api.GenerateRequest) -> Completion:
    """The whole answer to a request, resumed after interruptions."""
    completion = Completion()
    async for chunk in generate_resuming(client, body):
        completion.add(chunk)
    return completion


@dataclass(slots=True)
class SteadyLoad:
    """Clients that send one request after the other and compare the answers, until `is_over`."""

    address: str
    requests: Mapping[str, api.GenerateRequest]
    wanted: Mapping[str, Answer]
    num_clients: int
    during: str = "the start"
    """Present phase of the test, for messages."""
    failures: list[str] = field(default_factory=list)
    is_over: bool = False
    _num_done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._num_done = [0] * self.num_clients

    async def run(self) -> None:
        """Send requests until `is_over`."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.num_clients):
                group.create_task(self._ask(number))

    async def goes_on(self) -> None:
        """Wait until every client has the answer to a request that it sends from now on."""
        before = list(self._num_done)

        async def is_so() -> bool:
            return all(now >= then + 2 for now, then in zip(self._num_done, before, strict=True))

        await eventually(is_so, f"every client gets answers during {self.during}; {self.failures}")

    async def _ask(self, number: int) -> None:
        # Channels with equal arguments would share their connections.
        async with Client(self.address, ClientSettings(keepalive_s=60.0 + number)) as client:
            for name in itertools.islice(itertools.cycle(self.requests), number, None):
                began_during = self.during
                try:
                    answer = Answer.of(await collect(client, self.requests[name]))
                except SpecdecError as error:
                    difference = f"{type(error).__name__} {error.reason}: {error}"
                else:
                    difference = answer.difference(self.wanted[name]) or ""
                if difference:
                    self.failures.append(f"{name}, from {began_during} to {self.during}: {difference}")
                self._num_done[number] += 1
                if self.is_over:
                    return
                await asyncio.sleep(PAUSE_S)
