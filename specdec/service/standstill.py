"""When a process that gives no sign of life is hung, and when it only lacks a processor or memory.

A stopped or deadlocked process wants no processor. One that waits for a processor, or the machine for memory, would be
no better after a restart, which costs more of both.
"""

from __future__ import annotations

import os
from pathlib import Path

HUNG_S = 4.0
"""Seconds without a sign of life after which a service counts as hung."""
_MOST_TICK_S = 2.0
"""Seconds between two looks that count, at most: a longer gap is the watcher's own sleep."""
_LEAST_SHARE = 0.1
"""Fraction of the time without a processor that counts nevertheless, so that a hung process on a full machine ends."""
_MEMORY = Path("/proc/pressure/memory")


class Starvation:
    """Time for which a process waited for a processor, or all processes of the machine for memory."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: tuple[dict[str, int], float] | None = None

    def reset(self) -> None:
        """Begin anew at the next call of `take_s`."""
        self._seen = None

    def take_s(self) -> float:
        """Seconds since the last call, of the thread that waited longest; 0.0 at the first call, and if not known."""
        former, self._seen = self._seen, (_waits_ns(self._pid), _memory_s())
        if former is None:
            return 0.0
        waits_ns = (ns - former[0][thread] for thread, ns in self._seen[0].items() if thread in former[0])
        return max(max(waits_ns, default=0) * 1e-9, self._seen[1] - former[1])


class Standstill:
    """Judges one process by its answers. Times are those of one monotonic clock, in seconds."""

    def __init__(self, limit_s: float = HUNG_S) -> None:
        self._limit_s = limit_s
        self._starvation: Starvation | None = None
        self._looked_at_s = 0.0
        self.silent_s = 0.0
        """Seconds without an answer that count."""

    @property
    def is_silent(self) -> bool:
        """Whether the last look found no sign of life."""
        return self._starvation is not None

    def answered(self) -> None:
        """The process gave a sign of life."""
        self.silent_s, self._starvation = 0.0, None

    def is_hung(self, pid: int, now_s: float) -> bool:
        """Note that the process gave none since the last look; returns whether it must be ended."""
        if self._starvation is None:
            self._starvation = Starvation(pid)
            self._starvation.take_s()
        else:
            self.silent_s += counted_s(min(now_s - self._looked_at_s, _MOST_TICK_S), self._starvation.take_s())
        self._looked_at_s = now_s
        return self.silent_s >= self._limit_s


def counted_s(elapsed_s: float, starved_s: float) -> float:
    """The part of a silence that counts against a process."""
    return max(elapsed_s - starved_s, elapsed_s * _LEAST_SHARE)


def _waits_ns(pid: int) -> dict[str, int]:
    """Nanoseconds for which each thread has waited for a processor since its start; empty if they are not known."""
    waits: dict[str, int] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return waits
    for thread in threads:
        try:
            waits[thread] = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return waits


def _memory_s() -> float:
    """Seconds for which all processes of the machine waited for memory; 0.0 if the kernel does not tell."""
    try:
        full = _MEMORY.read_text(encoding="ascii").splitlines()[1]
        return int(full.rpartition("total=")[2]) * 1e-6
    except (OSError, ValueError, IndexError):
        return 0.0
