"""Cases by number: link, seed and number say all of a case, so that one that failed can be run again alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from tests.fuzz.judge import Complaints, Fault, listening, require
from tests.support.cost import Spent, counting_calls

_MOST_CPU_S = 3.0
"""Processor seconds of a case, with both ends and what starts again; most take some hundredths."""
_MOST_BYTES = 512 * 2**20
"""Memory of a case at its highest, beyond that before it."""
_MOST_CALLS = 1_000_000
"""Calls of functions in a case's event loop; tiny engines take up to 150,000."""
_COUNTED = 4
"""Calls are counted in every fourth case: counting makes it several times slower."""
_MOST_FINDINGS = 10
"""More tell nobody anything new."""


@dataclass
class Case:
    """One thing that is tried. `what` is added to while it is made, for people."""

    link: str
    seed: int
    number: int
    what: list[str] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        """Its own randomness, the same whenever it is asked for."""
        return random.Random(f"{self.link}/{self.seed}/{self.number}")

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --link {self.link} --seed {self.seed} --case {self.number}"
        return f"{'; '.join(self.what)} ({again})"


Run = Callable[[Case], Awaitable[None]]
"""Tries one case. Raises Fault; whatever else it raises is a finding, too."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one connection."""

    name: str
    open: Callable[[Complaints], AbstractAsyncContextManager[Run]]
    """What is attacked, started; given what it complains of."""
    expected: frozenset[str] = frozenset()
    """Events of our log at level error that are right here."""
    most_cpu_s: float = _MOST_CPU_S
    most_bytes: int = _MOST_BYTES
    most_calls: int = _MOST_CALLS


async def run_cases(link: Link, seed: int, numbers: Iterable[int], *, until_s: float | None = None) -> list[str]:
    """Run cases one after the other; returns what was found, each with how to run it again.

    With `until_s`, of time.monotonic, no case begins later.
    """
    found: list[str] = []
    with listening(expected=link.expected) as complaints:
        async with link.open(complaints) as run:
            async for case in _cases(link, seed, numbers, until_s):
                spent = Spent()
                counted = counting_calls() if case.number % _COUNTED == 0 else nullcontext(Counter[str]())
                try:
                    with counted as calls:
                        await run(case)
                    complaints.check()
                    num_calls = calls.total()
                    require(num_calls <= link.most_calls, f"took {num_calls} calls")
                    _, cpu_s, num_bytes = spent.until_now()
                    require(cpu_s <= link.most_cpu_s, f"took {cpu_s:.1f} s of processors")
                    require(num_bytes <= link.most_bytes, f"took {num_bytes >> 20} MiB")
                except Exception as error:
                    is_fault = isinstance(error, Fault)
                    found.append(f"{case}: {error if is_fault else repr(error)} {'; '.join(complaints.take())}")
                    if len(found) >= _MOST_FINDINGS:
                        break
        try:
            complaints.check()
        except Fault as fault:
            found.append(f"after the last case of {link.name}, seed {seed}: {fault}")
    return found


async def _cases(link: Link, seed: int, numbers: Iterable[int], until_s: float | None) -> AsyncIterator[Case]:
    for number in numbers:
        if until_s is not None and time.monotonic() >= until_s:
            return
        yield Case(link.name, seed, number)
