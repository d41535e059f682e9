"""Measurements of a pair: step times by rows, and agreement of the draft with the target's outputs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step by number of sequences and rows per sequence."""

    ms: dict[int, dict[int, float]]

    @property
    def sequences(self) -> list[int]:
        """Measured numbers of sequences, ascending."""
        return sorted(self.ms)

    def of(self, num_sequences: int, num_rows: int) -> float:
        """Milliseconds of a step over `num_sequences` with `num_rows` each, inter- or extrapolated."""
        points = [(count, _between(sorted(rows.items()), num_rows)) for count, rows in sorted(self.ms.items())]
        return _between(points, num_sequences)


def _between(points: Sequence[tuple[int, float]], x: float) -> float:
    """Linear interpolation; the last line is extended."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(1, bisect.bisect_left([at for at, _ in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Draft and target on one output of the target at one temperature, token by token.

    Each draft token follows the target's own tokens, as in serving, where it can be accepted only after these.
    """

    ranks: tuple[int, ...]
    """Coupled mode: rank from 0 of the target's token in the draft's order with the same noise; -1: too low."""
    overlaps: tuple[float, ...]
    """Rejection mode: probability that the draft's token is accepted, the sum of min(p, q)."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Averages over the rounds of all outputs."""

    tokens: float
    """Tokens committed by one target step."""
    whole: float
    """Share of rounds that end on a drafted token: all are accepted, or a runner-up is; the draft then continues."""
    survival: tuple[float, ...]
    """Share of rounds in which the draft token at depth 1, 2, ... was accepted."""


def rounds(outputs: Sequence[Agreement], mode: str, draft_tokens: int, num_siblings: int = 0) -> Rounds:
    """Walk through the outputs in rounds of `draft_tokens`, as speculation does.

    In rejection mode acceptance is random, and the result is the expectation. Each round begins at the end of the one
    before, so easy and hard passages count as often as in serving.
    """
    num_tokens = sum(len(output.ranks) for output in outputs)
    num_rounds = whole = 0.0
    reached = [0.0] * draft_tokens
    for output in outputs:
        length = len(output.ranks)
        weight = [0.0] * (length + draft_tokens + 3)  # probability that a round begins at a token
        weight[0] = 1.0
        for start in range(length):
            if not (begins := weight[start]):
                continue
            num_rounds += begins
            alive = begins
            for depth in range(draft_tokens):
                at = start + depth
                if at >= length:
                    break
                accepted = _accepted(output, mode, at)
                stops = alive * (1 - accepted)
                if mode == "coupled" and stops and 0 < output.ranks[at] <= num_siblings:
                    weight[at + 2] += stops
                    whole += stops
                else:
                    weight[at + 1] += stops
                alive *= accepted
                reached[depth] += alive
            if start + draft_tokens < length:
                weight[start + draft_tokens + 1] += alive
            whole += alive
    if not num_rounds:
        return Rounds(1.0, 0.0, (0.0,) * draft_tokens)
    return Rounds(num_tokens / num_rounds, whole / num_rounds, tuple(share / num_rounds for share in reached))


def _accepted(output: Agreement, mode: str, at: int) -> float:
    return float(output.ranks[at] == 0) if mode == "coupled" else output.overlaps[at]


def agreement_share(outputs: Sequence[Agreement], mode: str) -> float:
    """Share of tokens at which the draft's token is accepted."""
    shares = [_accepted(output, mode, at) for output in outputs for at in range(len(output.ranks))]
    return sum(shares) / len(shares) if shares else 0.0
