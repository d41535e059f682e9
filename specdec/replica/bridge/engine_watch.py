"""Detect a frozen or stuck engine process by its pulse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from specdec.replica.bridge.pulse import BEAT_INTERVAL_S, PulseReading
from specdec.service.standstill import counted_s

SILENCE_S = 4.0
"""Seconds without a beat after which an engine is killed; its waits for a processor do not count."""
_LEAST_STALL_S = 6.0
_STALL_TURNS = 20.0
_STALL_EXPECTED = 4.0
_SUSPICIOUS_S = 1.0
"""Seconds of a turn from which the engine's waits for a processor are read."""
_MOST_TICK_S = 2 * BEAT_INTERVAL_S
"""Seconds between two looks that count, at most: a longer gap is the watcher's own sleep. Whatever stopped the watcher
may have stopped the engine, too."""


class EndCause(StrEnum):
    """Cause of an engine's end."""

    EXITED = "exited"
    """It ended by itself: an error or a crash."""
    KILLED = "killed"
    """It was killed: by an operator, or by the kernel for lack of memory."""
    SILENT = "silent"
    """Its pulse stopped: frozen, swapped out, or stuck while holding the interpreter."""
    STUCK = "stuck"
    """A turn of its loop did not end."""


END_REASONS = {
    EndCause.EXITED: "ENGINE_GONE",
    EndCause.STUCK: "ENGINE_STALLED",
    EndCause.KILLED: "ENGINE_LOST",
    EndCause.SILENT: "ENGINE_LOST",
}
"""Reasons for coordinators; a request may have caused the first two."""


class Stall(NamedTuple):
    """The cause for which an engine is given up."""

    cause: EndCause
    reason: str
    """The cause in words."""


class EngineWatch:
    """Checks a pulse at intervals. Only time in which the watcher itself ran, and the engine could run, counts."""

    def __init__(self, silence_s: float, stall_s: float | None, clock: Callable[[], float]) -> None:
        """`silence_s`, `stall_s`: longest silence and turn. `stall_s` None: six seconds, or more if turns take long."""
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._clock = clock
        self._looked_at_s = clock()
        self._last: PulseReading | None = None
        self._turn_s = 0.0
        self.silent_s = 0.0
        """Seconds since the last beat."""

    @property
    def is_suspicious(self) -> bool:
        """Whether the last beat or the end of a turn is overdue."""
        return self.silent_s > 0 or self._turn_s > _SUSPICIOUS_S

    def look(self, pulse: PulseReading, starved_s: float = 0.0) -> Stall | None:
        """Check a pulse; returns a Stall if the engine must be given up.

        `starved_s`: seconds since the last look for which the engine waited for a processor or for memory.
        """
        now_s = self._clock()
        elapsed_s, self._looked_at_s = min(now_s - self._looked_at_s, _MOST_TICK_S), now_s
        elapsed_s = counted_s(elapsed_s, starved_s)
        last, self._last = self._last, pulse
        is_silent = last is not None and last.num_beats == pulse.num_beats
        is_same_turn = last is not None and last.turn == pulse.turn and pulse.turn % 2 == 1
        self.silent_s = self.silent_s + elapsed_s if is_silent else 0.0
        self._turn_s = self._turn_s + elapsed_s if is_same_turn else 0.0
        if self.silent_s >= self._silence_s:
            return Stall(EndCause.SILENT, f"the engine process gave no sign of life for {self.silent_s:.1f} s")
        if self._turn_s >= self._limit_s(pulse):
            ranks = _standing(pulse.rank_marks)
            return Stall(
                EndCause.STUCK, f"the engine has been in one step for {self._turn_s:.1f} s (engine_stall_s){ranks}"
            )
        return None

    def _limit_s(self, pulse: PulseReading) -> float:
        if self._stall_s is not None:
            return self._stall_s
        return max(_LEAST_STALL_S, _STALL_TURNS * pulse.longest_turn_s, _STALL_EXPECTED * pulse.expected_turn_s)


def _standing(marks: Sequence[int]) -> str:
    """Which rank keeps the others waiting in which step, as the end of a sentence; empty for one rank."""
    step = (max(marks, default=0) + 1) // 2
    if not step:
        return ""
    late = [f"rank {rank}" for rank, mark in enumerate(marks) if mark < 2 * step - 1]
    inside = [f"rank {rank}" for rank, mark in enumerate(marks) if mark == 2 * step - 1]
    if late:
        return f": step {step} waits for {', '.join(late)}, which did not begin it"
    if inside:
        return f": step {step} is not launched by {', '.join(inside)}"
    return f": all ranks have launched step {step}, and a device does not finish it"
