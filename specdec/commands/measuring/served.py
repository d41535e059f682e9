"""The benchmark of a deployment: loads, with and without speculation in turns, and what is kept of each pass."""

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
    """So many requests at once, or so many per second at random times (Poisson): one of both."""

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
    """From its start to its last end; None: it was interrupted."""
    tells_steps: bool = False
    """Its requests ask for their steps: for what became of proposals, and not for times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to measure."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    loads: Sequence[Load]
    speculation: Sequence[bool]
    """True: with; both in turns give the speed-up."""
    repeats: int = 3
    num_requests: int | None = None
    """Of a pass of a closed loop; None: four for each place, and each prompt once."""
    seconds: float = 20.0
    """How long requests arrive, in a pass of an open loop."""
    late_s: float = 60.0
    """How long after its last arrival requests of an open loop are waited for."""
    tells_steps: bool = False
    """With speculation: after all others, one more run of each load tells its steps."""

    def requests_at_once(self, concurrency: int) -> int:
        """Of a pass."""
        return self.num_requests or max(4 * concurrency, len(self.prompts))


async def warm_up(address: str, settings: ClientSettings, wishes: LoadPlan) -> None:
    """Ask once of each kind, for the first tokens of an answer.

    Raises the typed errors of `specdec.wire.errors`: what fails here would fail always.
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
    """Run every load as often as wished, with and without speculation in an order that flips.

    `passes` gets each as it begins, and so has what there is when this is cancelled. Requests that fail are counted,
    and end nothing. Raises the typed errors of `specdec.wire.errors` when the coordinator is not there any more.
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
    # Every pass of a load, with and without speculation, has the same arrivals, prompts and seeds.
    times_s = poisson(load.rate, wishes.seconds, seed=one.repeat) if load.rate else []
    count = len(times_s) if load.rate else wishes.requests_at_once(load.concurrency)
    requests = [
        make_request(prompt, wishes.sampling, seed, speculate=one.speculate)
        for seed, prompt in enumerate(itertools.islice(itertools.cycle(wishes.prompts), count))
    ]
    for request in requests:
        request.with_steps = one.tells_steps
    kind = "with speculation" if one.speculate else "plain"
    which = "telling its steps" if one.tells_steps else f"run {one.repeat + 1} of {wishes.repeats}"
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
