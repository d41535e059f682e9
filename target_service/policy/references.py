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
    _speculating_s: dict[int, float] = field(default_factory=dict)
    """Seconds of speculating steps since the last plain step, by load band."""

    def begins(self, clock: StepClock, num_sessions: int, step_s: float) -> bool:
        """Begin a reference if it is due after a speculating step of `step_s` seconds; returns whether it began.

        The first one of a load is due at once, unless a higher load is measured: there speculation costs more, so that
        load's measurements judge it on the safe side. Loads that last some steps, as where a group ends, get none.
        """
        band, plain_s = load_band(num_sessions), clock.plain_s(num_sessions)
        speculating_s = self._speculating_s.get(band, 0.0) + step_s
        self._speculating_s[band] = speculating_s
        if plain_s is None and not clock.has_measured_above(num_sessions):
            due_s = LEAST_STEPS * step_s
        else:
            due_s = (_SETTLING_S + _NUM_STEPS * (plain_s or step_s)) / SHARE
        if speculating_s < due_s:
            return False
        self.num_left = _NUM_STEPS
        return True

    def saw_plain(self, num_sessions: int) -> None:
        """Note a plain step."""
        self._speculating_s.pop(load_band(num_sessions), None)

    def ends(self, *, is_settled: bool) -> bool:
        """Count a step of the reference, unless drafts still settle; returns whether it was the last one."""
        self.num_left -= is_settled
        return not self.num_left
