"""When nobody speculates for some steps, to find out what plain ones take."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.target_service.policy.step_costs import StepCosts, band_of

_NUM_STEPS, _LEAD = 8, 2
"""Of a reference; the first ones still meet drafts at work."""
_SETTLING_S = 0.005
"""Drafts that were told to stop may work on for so long: where steps are short, many meet them at it. A reference among
them would find that plain steps take as long as any, and speculation to cost nothing."""
_FIRST = 4
"""Steps that speculate before the first reference of a load."""
_INTERVAL_S, _MOST_INTERVAL_S = 2.0, 30.0
"""Between two; the time doubles while speculation clearly pays."""
_SHARE = 1 / 100
"""Of steps at most."""
_CLEARLY = 1.3


@dataclass(slots=True)
class Settling:
    """Drafts that were told otherwise: steps until they have noticed say nothing of what any cost."""

    _num_left: int = 0
    until_s: float = float("-inf")
    """When they have noticed, at the latest."""

    def begin(self, now_s: float) -> None:
        """They were told at `now_s`."""
        self._num_left, self.until_s = _LEAD, now_s + _SETTLING_S

    def covers(self, began_s: float) -> bool:
        """Whether it goes on in the step that is over, which began then."""
        if not self._num_left and began_s >= self.until_s:
            return False
        self._num_left = max(0, self._num_left - 1)
        return True


@dataclass(slots=True)
class References:
    """One at a time, and for each number of sessions, as `band_of` has them, as often as it pays to know."""

    num_left: int = 0
    """Steps of the one that is under way."""
    _due_s: dict[int, float] = field(default_factory=dict)
    """The first one, by number of sessions."""
    _every_s: dict[int, float] = field(default_factory=dict)

    def begins(self, costs: StepCosts, num_sessions: int, num_tokens: int, step_s: float, now_s: float) -> bool:
        """Begin one if it is due. A step of so many sessions that committed so many tokens has speculated."""
        band, plain_s = band_of(num_sessions), costs.plain_s(num_sessions)
        if plain_s is None:
            if now_s < self._due_s.setdefault(band, now_s + _FIRST * step_s):
                return False
        else:
            every_s = self._every_s.get(band, _INTERVAL_S)
            least_s = (_SETTLING_S + _NUM_STEPS * plain_s) / _SHARE
            if now_s < costs.plain_seen_s(num_sessions) + max(least_s, every_s):
                return False
            is_clear = num_tokens / num_sessions * plain_s >= _CLEARLY * step_s
            self._every_s[band] = min(_MOST_INTERVAL_S, 2 * every_s) if is_clear else _INTERVAL_S
        self.num_left = _NUM_STEPS
        return True

    def ends(self, *, is_settled: bool) -> bool:
        """A step of it is over; whether it was the last. Those before drafts have settled do not count."""
        self.num_left -= is_settled
        return not self.num_left
