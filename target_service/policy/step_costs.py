"""What a step takes by how many of its sessions speculate: measured, not modelled.

Merging proposals, verdicts, relaying, a draft that takes cores or memory bandwidth from the target, more rows: all of
it makes steps longer, and no model of the forward pass sees more than the rows. So the time from step to step is kept
by the number of sessions and by the share of them that speculate; what that share costs is read off against steps of
which none does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_WEIGHT = 0.05
"""Of a new step: the mean follows about the last twenty."""
_MOST_SURPRISE = 4.0
"""A step that stalled counts as at most so many times the mean."""
_NUM_SHARES = 3
_MEMORY_S = 5.0
"""What a share cost so long ago counts a third of what it costs now: drafts and machines change."""
_PRIOR_PRICE, _PRIOR_WEIGHT = 0.05, 0.01
_LEAST_STEPS = 3
"""Of a mean that anything is concluded from."""


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    num_steps: int = 0
    seen_s: float = -math.inf

    def observe(self, value: float, now_s: float) -> float:
        """Returns what was believed of it."""
        self.num_steps += 1
        if self.num_steps == 1:
            self.value = value
        believed = min(value, _MOST_SURPRISE * self.value)
        self.value += max(_WEIGHT, 1 / self.num_steps) * (believed - self.value)
        self.seen_s = now_s
        return believed


@dataclass(slots=True)
class _Band:
    """Steps of about one number of sessions."""

    plain_s: _Mean = field(default_factory=_Mean)
    shares: list[_Mean] = field(default_factory=lambda: [_Mean() for _ in range(_NUM_SHARES)])
    """Mean share of sessions that speculated, in thirds."""
    times_s: list[_Mean] = field(default_factory=lambda: [_Mean() for _ in range(_NUM_SHARES)])
    """Of these steps."""


class StepCosts:
    """Step times by load. Memory: some ten numbers for each doubling of the number of sessions."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}

    def observe(self, num_sessions: int, share: float, step_s: float, now_s: float) -> float:
        """A step of so many sessions, of which a share speculated, took `step_s` from the end of the one before.

        Returns what is believed of that: a machine that stood still says nothing of speculation.
        """
        band = self._bands.setdefault(band_of(num_sessions), _Band())
        if share <= 0:
            return band.plain_s.observe(step_s, now_s)
        third = min(_NUM_SHARES - 1, int(share * _NUM_SHARES))
        band.shares[third].observe(share, now_s)
        return band.times_s[third].observe(step_s, now_s)

    def plain_s(self, num_sessions: int) -> float | None:
        """A step of so many sessions of which none speculates; None: not measured."""
        band = self._bands.get(band_of(num_sessions))
        return band.plain_s.value if band is not None and band.plain_s.num_steps >= _LEAST_STEPS else None

    def plain_seen_s(self, num_sessions: int) -> float:
        """When such a step was last seen."""
        band = self._bands.get(band_of(num_sessions))
        return -math.inf if band is None or self.plain_s(num_sessions) is None else band.plain_s.seen_s

    def price(self, num_sessions: int, now_s: float) -> float:
        """What speculating costs a session: tokens per step that it must gain, for each session that does.

        If all speculate a step takes ``1 + price`` times as long as if none does.
        """
        own = self._bands.get(band_of(num_sessions))
        if own is None or self.plain_s(num_sessions) is None:
            return self._price_nearby(num_sessions, now_s)
        return _slope(own, now_s)

    def _price_nearby(self, num_sessions: int, now_s: float) -> float:
        wanted = band_of(num_sessions)
        known = [band for band, costs in self._bands.items() if costs.plain_s.num_steps >= _LEAST_STEPS]
        if not known:
            return _PRIOR_PRICE
        return _slope(self._bands[min(known, key=lambda band: abs(band - wanted))], now_s)


def band_of(num_sessions: int) -> int:
    """Numbers of sessions that are taken for the same: each up to four, then two bands for each doubling."""
    return num_sessions if num_sessions <= 4 else 4 + math.ceil(2 * math.log2(num_sessions / 4))


def _slope(band: _Band, now_s: float) -> float:
    """Least squares through no cost at no share; what was seen long ago, and less of it, weighs less."""
    over, under = _PRIOR_WEIGHT * _PRIOR_PRICE, _PRIOR_WEIGHT
    for share, time_s in zip(band.shares, band.times_s, strict=True):
        if time_s.num_steps < _LEAST_STEPS:
            continue
        weight = math.exp(-(now_s - time_s.seen_s) / _MEMORY_S)
        over += weight * share.value * (time_s.value / band.plain_s.value - 1)
        under += weight * share.value**2
    return max(0.0, over / under)
