"""Benchmark of a deployment: passes of each load, with and without speculation in turns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.client import ClientSettings
from specdec.commands.measuring.requests import Prompt, Sampling, make_request, new_tenant
from specdec.commands.measuring.streams import Stream, closed_loop, open_loop, poisson

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """A number of requests at once, or a rate of requests per second at random times (Poisson); the other is 0."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g} requests/s"


@dataclass(slots=True)
class LoadRun:
    """One run of a load."""

    load: Load
    speculate: bool
    repeat: int
    streams: list[Stream] = field(default_factory=list)
    elapsed_s: float | None = None
    """Seconds from its start to its last end; None: it was interrupted."""
    tells_steps: bool = False
    """Whether its requests ask for steps; such a pass is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Prompts, loads and repeats of a benchmark."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    loads: Sequence[Load]
    speculation: Sequence[bool]
    """Kinds of passes, True with speculation; both give the speed-up."""
    repeats: int = 3
    num_requests: int | None = None
    """Requests of a closed loop's pass; None: one per prompt, at least four per place."""
    seconds: float = 20.0
    """Seconds of arrivals in an open loop's pass."""
    late_s: float = 60.0
    """Seconds after the last arrival until an open loop's requests are cancelled."""
    tells_steps: bool = False
    """Whether an untimed pass of each load with speculation follows that asks for steps."""

    def requests_at_once(self, concurrency: int) -> int:
        """Number of requests of a closed loop's pass."""
        return self.num_requests or max(4 * concurrency, len(self.prompts))


async def warm_up(address: str, settings: ClientSettings, wishes: LoadPlan) -> None:
    """Ask once of each kind, for the first tokens of an answer.

    Raises the typed errors of `specdec.wire.errors`, because every later request would fail too.
    """
    async with new_tenant(address, settings) as client:
        for speculate in wishes.speculation:
            request = make_request(wishes.prompts[0], wishes.sampling, 0, speculate=speculate)
            num_tokens = 0
            async with contextlib.aclosing(client.generate(request)) as chunks:
                async for chunk in chunks:
                    num_tokens += len(chunk.delta.tokens)
                    if num_tokens >= WARM_UP_TOKENS:
                        break


async def measure(
    address: str,
    settings: ClientSettings,
    wishes: LoadPlan,
    passes: list[LoadRun],
    tell: Callable[[str], None] = lambda what: None,
) -> None:
    """Run the passes of every load; the order of those with and without speculation alternates.

    Each pass is added to `passes` when it begins, so a cancelled run leaves its results. Failed requests are counted.
    Raises the typed errors of `specdec.wire.errors` when the coordinator is gone.
    """
    for repeat, (number, load) in itertools.product(range(wishes.repeats), enumerate(wishes.loads)):
        order = wishes.speculation if (repeat + number) % 2 == 0 else wishes.speculation[::-1]
        for speculate in order:
            one = LoadRun(load, speculate, repeat)
            passes.append(one)
            await _run(address, settings, wishes, one, tell)
    if wishes.tells_steps and True in wishes.speculation:
        for load in wishes.loads:
            one = LoadRun(load, True, 0, tells_steps=True)
            passes.append(one)
            await _run(address, settings, wishes, one, tell)


async def _run(
    address: str, settings: ClientSettings, wishes: LoadPlan, one: LoadRun, tell: Callable[[str], None]
) -> None:
    load = one.load
    # Passes with and without speculation have equal arrivals, prompts and seeds.
    times_s = poisson(load.rate, wishes.seconds, seed=one.repeat) if load.rate else []
    count = len(times_s) if load.rate else wishes.requests_at_once(load.concurrency)
    requests = [
        make_request(prompt, wishes.sampling, seed, speculate=one.speculate)
        for seed, prompt in enumerate(itertools.islice(itertools.cycle(wishes.prompts), count))
    ]
    for request in requests:
        request.with_steps = one.tells_steps
    kind = "with speculation" if one.speculate else "plain"
    which = "with steps" if one.tells_steps else f"run {one.repeat + 1} of {wishes.repeats}"
    num_ended = 0

    def show() -> None:
        tell(f"{load}, {kind}, {which}: {num_ended} of {count} requests")

    def on_end() -> None:
        nonlocal num_ended
        num_ended += 1
        show()

    show()
    async with new_tenant(address, settings) as client:
        start_s = time.perf_counter()
        if load.rate:
            start_s = await open_loop(client, requests, times_s, wishes.late_s, one.streams, on_end)
        else:
            await closed_loop(client, requests, load.concurrency, one.streams, on_end)
    ends_s = [stream.ended_s for stream in one.streams if stream.ended_s is not None]
    one.elapsed_s = max(ends_s) - start_s if ends_s else time.perf_counter() - start_s
