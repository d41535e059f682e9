"""References: steps in which no session speculates, so that plain ones are measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.target_service.policy.budget import SHARE
from specdec.target_service.policy.step_clock import LEAST_STEPS, StepClock, load_band

_NUM_STEPS = 8
"""Steps of a reference."""
_SETTLING_S = 0.005
"""Seconds that drafts may work on after they were told to stop. A reference within these would find plain steps as long
as any, and speculation free."""


@dataclass(slots=True)
class Settling:
    """Time after drafts were stopped or started in which steps say nothing of what speculation costs."""

    until_s: float = float("-inf")
    """Monotonic time by which drafts have noticed."""

    def begin(self, now_s: float) -> None:
        """Drafts were stopped or started at `now_s`."""
        self.until_s = now_s + _SETTLING_S

    def covers(self, began_s: float) -> bool:
        """Whether it went on when the step began."""
        return began_s < self.until_s


@dataclass(slots=True)
class References:
    """One reference at a time; for each band of numbers of sessions as often as the budget allows."""

    num_left: int = 0
    """Steps left of the reference that is under way."""
    _due_s: dict[int, float] = field(default_factory=dict)
    """Monotonic time of the first reference, by band."""

    def begins(self, clock: StepClock, num_sessions: int, step_s: float, now_s: float) -> bool:
        """Begin a reference if it is due. A step of `num_sessions` sessions has speculated."""
        plain_s = clock.plain_s(num_sessions)
        if plain_s is None:
            due_s = self._due_s.setdefault(load_band(num_sessions), now_s + LEAST_STEPS * step_s)
        else:
            due_s = clock.plain_seen_s(num_sessions) + (_SETTLING_S + _NUM_STEPS * plain_s) / SHARE
        if now_s < due_s:
            return False
        self.num_left = _NUM_STEPS
        return True

    def ends(self, *, is_settled: bool) -> bool:
        """A step of the reference is over; whether it was the last. Steps before drafts have settled do not count."""
        self.num_left -= is_settled
        return not self.num_left
