"""A closed loop: a fixed number of requests run at any time; when one ends, the next begins.

Requests that begin together end one by one, so the last ones decode in ever smaller batches, for a time that depends on
their acceptance. A closed loop measures full batches only, prefills included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.client import Completion
from specdec.commands.measuring.requests import Prompt, Run, Sampling, make_request, new_tenant


@dataclass(slots=True)
class LoopClock:
    """Arrival times of tokens, and the time during which all places are taken."""

    at_once: int
    _arrived: list[tuple[float, int]] = field(default_factory=list)
    _num_begun: int = 0
    _full_s: float | None = None
    _last_begun_s: float = 0.0

    def begun(self, now_s: float) -> None:
        """A request was sent."""
        self._last_begun_s = now_s

    def arrived(self, num_tokens: int, now_s: float, *, is_first: bool) -> None:
        """`num_tokens` tokens of a request arrived; `is_first` if they are its first ones."""
        self._num_begun += is_first
        if self._full_s is None:
            if self._num_begun == self.at_once:
                self._full_s = now_s
            return
        self._arrived.append((now_s, num_tokens))

    @property
    def tokens_per_s(self) -> float:
        """Speed from when all places had tokens until the last request was sent. Raises ValueError if that is none."""
        if self._full_s is None or self._last_begun_s <= self._full_s:
            raise ValueError("the last request was sent before all places had tokens: there must be more of them")
        num_tokens = sum(number for when_s, number in self._arrived if when_s <= self._last_begun_s)
        return num_tokens / (self._last_begun_s - self._full_s)


async def run_loop(
    address: str, prompts: Sequence[Prompt], sampling: Sampling, *, at_once: int, speculate: bool
) -> Run:
    """Run requests, `at_once` at any time. Raises ValueError if there are too few of them for a loop."""
    requests = [make_request(prompt, sampling, seed, speculate=speculate) for seed, prompt in enumerate(prompts)]
    completions = [Completion() for _ in requests]
    waiting = iter(zip(requests, completions, strict=True))
    clock = LoopClock(at_once)

    async with new_tenant(address) as client:

        async def place() -> None:
            for request, completion in waiting:
                clock.begun(time.perf_counter())
                async for chunk in client.generate(request):
                    before = completion.num_tokens
                    completion.add(chunk)
                    if completion.num_tokens > before:
                        new = completion.num_tokens - before
                        clock.arrived(new, time.perf_counter(), is_first=not before)

        async with asyncio.TaskGroup() as places:
            for _ in range(at_once):
                places.create_task(place())
    return Run(clock.tokens_per_s, completions)
