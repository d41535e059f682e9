"""References: steps in which no session speculates, so that plain steps are measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.target_service.policy.budget import SHARE
from specdec.target_service.policy.step_clock import LEAST_STEPS, StepClock, load_band

_NUM_STEPS = 8
"""Number of steps of a reference."""
_SETTLING_S = 0.005
"""Seconds that drafts may go on after their suspension. A reference in this time would measure plain steps slowed by
drafts, and speculation would seem free."""


@dataclass(slots=True)
class Settling:
    """Time after drafts were stopped or started in which steps do not measure the cost of speculation."""

    until_s: float = float("-inf")
    """Monotonic time, in seconds, by which drafts have stopped or started."""

    def begin(self, now_s: float) -> None:
        """Note that drafts were stopped or started at `now_s`."""
        self.until_s = now_s + _SETTLING_S

    def covers(self, began_s: float) -> bool:
        """Whether a step that began at `began_s` began while drafts settled."""
        return began_s < self.until_s


@dataclass(slots=True)
class References:
    """One reference at a time; each load band gets them as often as the budget allows."""

    num_left: int = 0
    """Steps left of the present reference; 0: none is under way."""
    _due_s: dict[int, float] = field(default_factory=dict)
    """Monotonic time, in seconds, of the first reference, by load band."""

    def begins(self, clock: StepClock, num_sessions: int, step_s: float, now_s: float) -> bool:
        """Begin a reference if it is due after a speculating step of `step_s` seconds; returns whether it began."""
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
        """Count a step of the reference, unless drafts still settle; returns whether it was the last one."""
        self.num_left -= is_settled
        return not self.num_left
