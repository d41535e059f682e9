"""Tells an engine process that is frozen or stuck from one that is at work, by its pulse."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from specdec.replica.bridge.pulse import BEAT_INTERVAL_S, PulseReading

SILENCE_S = 4.0
"""Seconds without a beat after which an engine is killed: a busy host delays a beat by a second or two."""
_LEAST_STALL_S = 6.0
_STALL_TURNS = 20.0
_STALL_EXPECTED = 4.0
_MOST_TICK_S = 2 * BEAT_INTERVAL_S
"""More than this of the time between two looks is the watcher's own sleep: whoever stopped it has stopped the engine,
too, perhaps, and both get the time that they would have had."""


class EndCause(StrEnum):
    """Why there is no engine any more."""

    EXITED = "exited"
    """It ended by itself: an error, or a fault that the kernel ended it for."""
    KILLED = "killed"
    """Others killed it: an operator, or the kernel for want of memory."""
    SILENT = "silent"
    """It did not beat: stopped, swapped out, or stuck with the interpreter held."""
    STUCK = "stuck"
    """A turn of its loop did not end."""


END_REASONS = {
    EndCause.EXITED: "ENGINE_GONE",
    EndCause.STUCK: "ENGINE_STALLED",
    EndCause.KILLED: "ENGINE_LOST",
    EndCause.SILENT: "ENGINE_LOST",
}
"""What coordinators are told; in the first two cases it may have been a request that did it."""


class Stall(NamedTuple):
    """Why an engine is given up."""

    cause: EndCause
    reason: str
    """For people."""


class EngineWatch:
    """Looks at a pulse now and then. Times count what the watcher itself lived through, whatever the clock says."""

    def __init__(self, silence_s: float, stall_s: float | None, clock: Callable[[], float]) -> None:
        """Bounds of silence and of one turn; None: six seconds, or more where turns have been seen to take long."""
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._clock = clock
        self._looked_at_s = clock()
        self._last: PulseReading | None = None
        self._turn_s = 0.0
        self.silent_s = 0.0
        """Since the last beat was seen."""

    def look(self, pulse: PulseReading) -> Stall | None:
        """Take note of what a pulse shows; a Stall when the engine is to be given up."""
        now_s = self._clock()
        elapsed_s, self._looked_at_s = min(now_s - self._looked_at_s, _MOST_TICK_S), now_s
        last, self._last = self._last, pulse
        is_silent = last is not None and last.num_beats == pulse.num_beats
        is_same_turn = last is not None and last.turn == pulse.turn and pulse.turn % 2 == 1
        self.silent_s = self.silent_s + elapsed_s if is_silent else 0.0
        self._turn_s = self._turn_s + elapsed_s if is_same_turn else 0.0
        if self.silent_s >= self._silence_s:
            return Stall(EndCause.SILENT, f"the engine process has not beaten for {self.silent_s:.1f} s")
        if self._turn_s >= self._limit_s(pulse):
            return Stall(EndCause.STUCK, f"the engine has been in one turn for {self._turn_s:.1f} s")
        return None

    def _limit_s(self, pulse: PulseReading) -> float:
        if self._stall_s is not None:
            return self._stall_s
        return max(_LEAST_STALL_S, _STALL_TURNS * pulse.longest_turn_s, _STALL_EXPECTED * pulse.expected_turn_s)
