"""What a pair does at each load: the target of a fleet draws its turns and tokens from it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from specdec.plan.simulation.pair import Pair, PairSettings, Speculation

_NUM_QUANTILES = 65
_WARM_UP_STEPS, _WARM_UP_S = 60, 3.0
"""Plain steps, and seconds, before a pair is measured: its policies have learnt by then."""
_LEAST_STEPS, _SESSION_STEPS = 60, 3000
"""Steps measured at least, and steps of sessions measured about."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A pair with a number of sessions."""

    num_sessions: int
    turns_s: np.ndarray
    """Quantiles of the time from one step's end to the next one's, ascending."""
    tokens: np.ndarray
    """Cumulated shares of steps that commit at most 1, 2, ... tokens of a session, the last one, 1, left out."""
    mean_turn_s: float
    mean_tokens: float
    draft_use: float
    """Share of the time in which the draft computes, with the sessions of its other targets."""
    speculating: float
    """Share of the steps of sessions that speculate."""

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens per second, of all sessions."""
        return self.num_sessions * self.mean_tokens / self.mean_turn_s


class ReplicaCurve:
    """Turns and tokens of a replica by its sessions, between measured loads by interpolation."""

    def __init__(self, points: Sequence[LoadPoint]) -> None:
        """`points` ascend by sessions; a load above the last one is refused by who asks (`most_sessions`)."""
        self.points = tuple(points)
        self._loads = [point.num_sessions for point in points]

    @property
    def most_sessions(self) -> int:
        """The highest measured load."""
        return self._loads[-1]

    def turn_s(self, num_sessions: int, rng: Generator) -> float:
        """Seconds of a turn, drawn."""
        low, high, weight = self._around(num_sessions)
        at = rng.random() * (_NUM_QUANTILES - 1)
        index, part = int(at), at - int(at)

        def value(point: LoadPoint) -> float:
            return float(point.turns_s[index] * (1 - part) + point.turns_s[index + 1] * part)

        return value(low) * (1 - weight) + value(high) * weight if weight else value(low)

    def tokens(self, num_sessions: int, num: int, rng: Generator) -> np.ndarray:
        """Tokens that each of `num` sessions commits in a turn with `num_sessions`, drawn."""
        low, high, weight = self._around(num_sessions)
        point = high if weight and rng.random() < weight else low
        if not len(point.tokens):
            return np.ones(num, dtype=np.int64)
        return np.searchsorted(point.tokens, rng.random(num), side="right") + 1

    def mean(self, num_sessions: int, of: Callable[[LoadPoint], float]) -> float:
        """A figure at a load."""
        low, high, weight = self._around(num_sessions)
        return of(low) * (1 - weight) + of(high) * weight

    def _around(self, num_sessions: int) -> tuple[LoadPoint, LoadPoint, float]:
        right = bisect.bisect_left(self._loads, num_sessions)
        if right == 0 or right == len(self._loads):
            point = self.points[min(right, len(self._loads) - 1)]
            return point, point, 0.0
        low, high = self.points[right - 1], self.points[right]
        return low, high, (num_sessions - low.num_sessions) / (high.num_sessions - low.num_sessions)


def measure_curve(
    settings: PairSettings,
    speculation: Speculation,
    output_tokens: float,
    most_sessions: int,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> ReplicaCurve:
    """Run a pair at loads from 1 to `most_sessions`, each twice the one before."""
    loads = [1]
    while loads[-1] < most_sessions:
        loads.append(min(2 * loads[-1], most_sessions))
    points = []
    for load in loads:
        tell(f"a target with {load} of {most_sessions} sessions, speculation {speculation}")
        points.append(_measure(settings, speculation, output_tokens, load, seed + load))
    return ReplicaCurve(points)


def _measure(settings: PairSettings, speculation: Speculation, output_tokens: float, load: int, seed: int) -> LoadPoint:
    plain_s = settings.target.seconds(load, load)
    if speculation is Speculation.OFF or settings.draft is None:
        turns = np.full(_NUM_QUANTILES, plain_s)
        return LoadPoint(load, turns, np.empty(0), plain_s, 1.0, 0.0, 0.0)
    pair = Pair(settings, speculation, load, output_tokens, seed)
    num_steps = max(_LEAST_STEPS, _SESSION_STEPS // load)
    tally = pair.run(max(_WARM_UP_S if load <= 4 else 0.0, _WARM_UP_STEPS * plain_s), 1e9, num_steps)
    tokens = np.array(tally.tokens)
    shares = np.bincount(tokens)[1:] / len(tokens)
    quantiles = np.quantile(np.array(tally.turns_s), np.linspace(0, 1, _NUM_QUANTILES))
    return LoadPoint(
        num_sessions=load,
        turns_s=quantiles,
        tokens=np.cumsum(shares)[:-1],
        mean_turn_s=float(np.mean(tally.turns_s)),
        mean_tokens=float(tokens.mean()),
        draft_use=tally.draft_busy_s / tally.elapsed_s,
        speculating=tally.num_speculating / len(tokens),
    )
