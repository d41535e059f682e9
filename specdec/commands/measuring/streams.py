"""Timed requests, in a closed or an open loop.

A closed loop keeps a number of requests running; an open loop sends each when it is due, however busy the server is.
TTFT is the time from a request's due time to its first tokens. ITL, for each token of a chunk, is the time since the
chunk before, divided by the number of tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from specdec.client import Client
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError


@dataclass(slots=True)
class Stream:
    """Tokens and times of one request. `due_s` and `ended_s` are readings of time.perf_counter()."""

    first_s: float | None = None
    """Seconds from its due time to its first tokens."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds per token, for each token after the first chunk."""
    token_ids: list[int] = field(default_factory=list)
    due_s: float = 0.0
    ended_s: float | None = None
    """None: it failed, or was cancelled."""
    lag_s: float = 0.0
    """Seconds by which this client sent it late."""
    failure: str = ""
    """Code and reason; empty: no failure is known."""
    finished: api.GenerateFinished | None = None
    """Usage and statistics."""
    steps: list[api.DecodingStep] = field(default_factory=list)
    """Its steps, if the request asks for them."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens until now."""
        return len(self.token_ids)

    @property
    def whole_s(self) -> float | None:
        """Seconds from its due time to its end."""
        return None if self.ended_s is None else self.ended_s - self.due_s


async def run_stream(client: Client, request: api.GenerateRequest, due_s: float, stream: Stream) -> None:
    """Send a request when it is due, and record the times of its tokens, or its failure."""
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    stream.due_s, stream.lag_s = due_s, time.perf_counter() - due_s
    last_s = 0.0
    try:
        async for chunk in client.generate(request):
            if chunk.HasField("finished"):
                stream.finished = chunk.finished
            stream.steps += chunk.delta.steps
            num_tokens = len(chunk.delta.tokens)
            if num_tokens == 0:
                continue
            now_s = time.perf_counter()
            if stream.first_s is None:
                stream.first_s = now_s - due_s
            else:
                stream.gaps_s += [(now_s - last_s) / num_tokens] * num_tokens
            stream.token_ids += [token.id for token in chunk.delta.tokens]
            last_s = now_s
    except SpecdecError as error:
        reason = "" if error.reason == error.code.name else f" ({error.reason})"
        stream.failure = f"{error.code.name}{reason}"
    else:
        if stream.finished is None:
            stream.failure = "the stream ended without its last chunk"
        else:
            stream.ended_s = time.perf_counter()


async def closed_loop(
    client: Client,
    requests: Sequence[api.GenerateRequest],
    concurrency: int,
    streams: list[Stream],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Send requests in order, each when one of `concurrency` places is free.

    A stream is added to `streams` when its request is sent, so a cancelled loop leaves its results.
    """
    waiting = iter(requests)

    async def place() -> None:
        for request in waiting:
            stream = Stream()
            streams.append(stream)
            await run_stream(client, request, time.perf_counter(), stream)
            on_end()

    await _all([place() for _ in range(min(concurrency, len(requests)))])


async def open_loop(
    client: Client,
    requests: Sequence[api.GenerateRequest],
    times_s: Sequence[float],
    late_s: float,
    streams: list[Stream],
    on_end: Callable[[], None] = lambda: None,
) -> float:
    """Send each request at its time, in seconds from now; return the clock's reading of now.

    Requests that have not ended `late_s` after the last one is due are cancelled; their streams have neither an end nor
    a failure.
    """
    start_s = time.perf_counter() + 0.05
    streams += [Stream(due_s=start_s + at_s) for at_s in times_s]

    async def one(request: api.GenerateRequest, stream: Stream) -> None:
        await run_stream(client, request, stream.due_s, stream)
        on_end()

    runs = [one(request, stream) for request, stream in zip(requests, streams, strict=True)]
    try:
        async with asyncio.timeout(times_s[-1] + late_s):
            await _all(runs)
    except TimeoutError:
        pass
    return start_s


async def _all(runs: Sequence[Coroutine[object, object, None]]) -> None:
    """Run coroutines together; a cancellation cancels all."""
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(run)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times in seconds from 0; at least one."""
    rng = random.Random(seed)
    times = [0.0]
    while (following := times[-1] + rng.expovariate(rate)) < seconds:
        times.append(following)
    return times
