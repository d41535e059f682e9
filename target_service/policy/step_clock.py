"""One clock: what a step of given rows, sessions and speculating share takes. Measured; the rows by a fitted line.

Merging proposals, verdicts, relaying, a draft that takes cores or memory bandwidth from the target: all of it makes
steps longer, and no model of the forward pass sees more than the rows. So the time from step to step is kept by the
number of sessions as well; what speculation adds is read off against steps in which nobody speculates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.target_service.policy.means import WEIGHT, Mean
from specdec.target_service.policy.step_time import StepTimeModel

LEAST_STEPS = 3
"""Steps before a mean is used."""


@dataclass(slots=True)
class _Band:
    """Steps of about one number of sessions."""

    plain_s: Mean = field(default_factory=Mean)
    plain_seen_s: float = -math.inf
    speculating_s: Mean = field(default_factory=Mean)
    squares: float = 0.0
    """Sum of the squared shares of sessions that speculated; older steps weigh less, here and below."""
    shares: float = 0.0
    """Sum of these shares."""
    products_s: float = 0.0
    """Sum of these shares, each times its step's time."""

    def observe_speculating(self, share: float, step_s: float) -> float:
        believed_s = self.speculating_s.observe(step_s)
        kept = 1 - WEIGHT
        self.squares = kept * self.squares + share * share
        self.shares = kept * self.shares + share
        self.products_s = kept * self.products_s + share * believed_s
        return believed_s

    def min_gain_tokens(self) -> float:
        """Least squares, through no cost at no share. The prior is a step of weight `WEIGHT` in which all sessions
        speculated at no cost: else the error of one step is divided by a small share.
        """
        cost = self.products_s / self.plain_s.value - self.shares
        return max(0.0, cost / (self.squares + WEIGHT))


@dataclass(slots=True)
class StepClock:
    """Step times by rows and by load. Memory: nine numbers for each band of numbers of sessions."""

    rows: StepTimeModel = field(default_factory=StepTimeModel)
    _bands: dict[int, _Band] = field(default_factory=dict)

    def observe_turn(self, num_sessions: int, share: float, turn_s: float, now_s: float) -> float:
        """A step of `num_sessions`, of which a share speculated, took `turn_s` from the end of the one before.

        Returns what is believed of that: a machine that stood still says nothing of speculation.
        """
        band = self._bands.setdefault(load_band(num_sessions), _Band())
        if share > 0:
            return band.observe_speculating(share, turn_s)
        band.plain_seen_s = now_s
        return band.plain_s.observe(turn_s)

    def plain_s(self, num_sessions: int) -> float | None:
        """Seconds of a step of `num_sessions` in which nobody speculates; None: not measured."""
        band = self._measured(load_band(num_sessions))
        return None if band is None else band.plain_s.value

    def plain_seen_s(self, num_sessions: int) -> float:
        """When such a step was last seen."""
        band = self._measured(load_band(num_sessions))
        return -math.inf if band is None else band.plain_seen_s

    def expected_plain_s(self, num_sessions: int) -> float:
        """The same, by the rows where none was measured."""
        measured_s = self.plain_s(num_sessions)
        return self.rows.predict(num_sessions) if measured_s is None else measured_s

    def min_gain_tokens(self, num_sessions: int) -> float:
        """Tokens per step that each speculating session must gain to pay for what it costs all of them.

        If all speculate a step takes ``1 + min_gain_tokens`` times as long as if none does. What was not measured at a
        load is taken from the nearest one.
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
    """Numbers of sessions that are taken for the same: each up to four, then two bands for each doubling."""
    return num_sessions if num_sessions <= 4 else 4 + math.ceil(2 * math.log2(num_sessions / 4))
