"""One clock: the time of a step by its rows (a fitted line), and by its sessions and speculating share (measured).

Merging proposals, verdicts, relaying, and a draft that takes cores or memory bandwidth from the target make steps
longer, but a model of the forward pass sees only rows. So the clock also keeps the time from step to step by the number
of sessions. The cost of speculation is the difference from steps in which no session speculates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.target_service.policy.means import WEIGHT, Mean
from specdec.target_service.policy.step_time import StepTimeModel

LEAST_STEPS = 3
"""Number of plain steps before their mean is used."""


@dataclass(slots=True)
class _Band:
    """Step times of one load band."""

    plain_s: Mean = field(default_factory=Mean)
    speculating_s: Mean = field(default_factory=Mean)
    squares: float = 0.0
    """Decayed sum, over speculating steps, of the squared share of sessions that speculated."""
    shares: float = 0.0
    """Decayed sum of the shares."""
    products_s: float = 0.0
    """Decayed sum of the shares, each times its step's seconds."""

    def observe_speculating(self, share: float, step_s: float) -> float:
        believed_s = self.speculating_s.observe(step_s)
        kept = 1 - WEIGHT
        self.squares = kept * self.squares + share * share
        self.shares = kept * self.shares + share
        self.products_s = kept * self.products_s + share * believed_s
        return believed_s

    def min_gain_tokens(self) -> float:
        """Slope of a step's extra time, in plain steps, over the speculating share: least squares through the origin.

        The prior is a step of weight `WEIGHT` in which all sessions speculated at no cost: without it the error of one
        step would be divided by a small share.
        """
        cost = self.products_s / self.plain_s.value - self.shares
        return max(0.0, cost / (self.squares + WEIGHT))


@dataclass(slots=True)
class StepClock:
    """Step times by rows and by load. Memory: eight numbers for each load band."""

    rows: StepTimeModel = field(default_factory=StepTimeModel)
    _bands: dict[int, _Band] = field(default_factory=dict)

    def observe_turn(self, num_sessions: int, share: float, turn_s: float) -> float:
        """Learn that a step of `num_sessions`, a share of which speculated, ended `turn_s` after the one before.

        Returns the time, cut off as by `Mean.observe`.
        """
        band = self._bands.setdefault(load_band(num_sessions), _Band())
        if share > 0:
            return band.observe_speculating(share, turn_s)
        return band.plain_s.observe(turn_s)

    def plain_s(self, num_sessions: int) -> float | None:
        """Seconds of a step of `num_sessions` in which no session speculates; None: not measured."""
        band = self._measured(load_band(num_sessions))
        return None if band is None else band.plain_s.value

    def has_measured_above(self, num_sessions: int) -> bool:
        """Whether plain steps of a higher load were measured."""
        band = load_band(num_sessions)
        return any(number > band and self._measured(number) is not None for number in self._bands)

    def expected_plain_s(self, num_sessions: int) -> float:
        """Seconds of a plain step of `num_sessions`: measured, else predicted from its rows."""
        measured_s = self.plain_s(num_sessions)
        return self.rows.predict(num_sessions) if measured_s is None else measured_s

    def min_gain_tokens(self, num_sessions: int) -> float:
        """Tokens per step that each speculating session must gain to pay for its cost to all sessions.

        If all sessions speculate, a step takes ``1 + min_gain_tokens`` times a plain step. A load without measurements
        takes those of the nearest load; 0.0 without any.
        """
        wanted = load_band(num_sessions)
        known = [number for number in self._bands if self._measured(number) is not None]
        if not known:
            return 0.0
        return self._bands[min(known, key=lambda number: abs(number - wanted))].min_gain_tokens()

    def _measured(self, number: int) -> _Band | None:
        band = self._bands.get(number)
        return band if band is not None and band.plain_s.num_seen >= LEAST_STEPS else None


def load_band(num_sessions: int) -> int:
    """Load band of a number of sessions: one band for each number up to four, then two for each doubling."""
    return num_sessions if num_sessions <= 4 else 4 + math.ceil(2 * math.log2(num_sessions / 4))
