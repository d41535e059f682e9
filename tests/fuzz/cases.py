"""Cases by number: link, seed and number say all of a case, so that one that failed can be run again alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field

from tests.fuzz.judge import Complaints, Fault, listening, require
from tests.support.cost import Allocated, Spent, counting_allocated, counting_calls

_MOST_CPU_S = 3.0
"""Processor seconds of a case, with both ends and what starts again; most take some hundredths."""
_MOST_BYTES = 512 * 2**20
"""Memory of a case at its highest, beyond that before it."""
_MOST_CALLS = 1_000_000
"""Calls of functions in a case's event loop; tiny engines take up to 150,000."""
_MOST_ALLOCATED = 16 * 2**20
"""Bytes that Python allocates in a case at its highest, with both ends, beside `_ALLOCATED_PER_BYTE`."""
_ALLOCATED_PER_BYTE = 4
"""The same for each byte that is sent."""
_COUNTED = 4
"""Calls are counted in every fourth case, and what is allocated in another fourth: counting makes it several times
slower."""
_MOST_FINDINGS = 10
"""More tell nobody anything new."""


@dataclass
class Case:
    """One thing that is tried. `what` is added to while it is made, for people."""

    link: str
    seed: int
    number: int
    what: list[str] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes that were sent in place of right ones."""

    def sent(self, data: bytes) -> bytes:
        """Note what is sent; returns it."""
        self.num_bytes += len(data)
        return data

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
    most_allocated: int = _MOST_ALLOCATED


async def run_cases(link: Link, seed: int, numbers: Iterable[int], *, until_s: float | None = None) -> list[str]:
    """Run cases one after the other; returns what was found, each with how to run it again.

    With `until_s`, of time.monotonic, no case begins later.
    """
    found: list[str] = []
    with listening(expected=link.expected) as complaints:
        async with link.open(complaints) as run:
            async for case in _cases(link, seed, numbers, until_s):
                spent = Spent()
                calls, allocated = Counter[str](), Allocated()
                try:
                    with ExitStack() as counted:
                        if case.number % _COUNTED == 0:
                            calls = counted.enter_context(counting_calls())
                        elif case.number % _COUNTED == 2:
                            allocated = counted.enter_context(counting_allocated())
                        await run(case)
                    complaints.check()
                    num_calls, most = calls.total(), link.most_allocated + _ALLOCATED_PER_BYTE * case.num_bytes
                    require(num_calls <= link.most_calls, f"took {num_calls} calls")
                    told = f"allocated {allocated.peak_bytes >> 10} KiB for {case.num_bytes} bytes"
                    require(allocated.peak_bytes <= most, told)
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
