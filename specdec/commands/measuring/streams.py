"""One request and when its tokens come; many of them, at once or when they come.

A closed loop keeps a number of requests under way; an open loop sends each when it is due, whatever the server manages.
TTFT is the time from when a request was due to its first tokens; an ITL is a gap between two chunks over the tokens of
the later one, once for each of them.
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
    """What came of one request. Times in seconds."""

    first_s: float | None = None
    """After it was due."""
    gaps_s: list[float] = field(default_factory=list)
    """One for each token after the first chunk."""
    token_ids: list[int] = field(default_factory=list)
    due_s: float = 0.0
    """Of the clock."""
    ended_s: float | None = None
    """Of the clock; None: it failed, or was not waited for."""
    lag_s: float = 0.0
    """How late this client sent it."""
    failure: str = ""
    """Code and reason; empty: none is known."""
    finished: api.GenerateFinished | None = None
    """Usage and statistics."""
    steps: list[api.DecodingStep] = field(default_factory=list)
    """Where the request asks for them."""

    @property
    def num_tokens(self) -> int:
        """That have come."""
        return len(self.token_ids)

    @property
    def whole_s(self) -> float | None:
        """From when it was due to its end."""
        return None if self.ended_s is None else self.ended_s - self.due_s


async def run_stream(client: Client, request: api.GenerateRequest, due_s: float, stream: Stream) -> None:
    """Send a request when it is due, and note when its tokens come, or how it failed."""
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
    """Send requests in their order, each when one of `concurrency` places is free.

    `streams` gets one of each as it is sent, and so has what there is when this is cancelled.
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
    """Send each request at its time, in seconds from now; returns when now was, by the clock.

    What has not ended `late_s` after the last is due is cancelled, and its stream has neither an end nor a failure.
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
    """Run them together; whatever ends this one ends them."""
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(run)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times from 0 on; at least one."""
    rng = random.Random(seed)
    times = [0.0]
    while (following := times[-1] + rng.expovariate(rate)) < seconds:
        times.append(following)
    return times
