"""What is measured of a pair: times of steps by their rows, and how often the draft is right on real outputs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step by sequences and by rows of each."""

    ms: dict[int, dict[int, float]]

    @property
    def sequences(self) -> list[int]:
        """Numbers of sequences that were measured, rising."""
        return sorted(self.ms)

    def of(self, num_sequences: int, num_rows: int) -> float:
        """Time of a step over so many sequences with so many rows each, between what was measured and beyond it."""
        points = [(count, _between(sorted(rows.items()), num_rows)) for count, rows in sorted(self.ms.items())]
        return _between(points, num_sequences)


def _between(points: Sequence[tuple[int, float]], x: float) -> float:
    """Straight lines through the points; the last one goes on."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(1, bisect.bisect_left([at for at, _ in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Draft and target on one output of the target at one temperature, token by token.

    Given the target's own tokens before it, so a draft token counts at a depth only after all before it were right,
    which is exactly when it can be accepted.
    """

    ranks: tuple[int, ...]
    """Coupled mode: place of the target's token in the draft's order with the same noise, 0 for its guess; -1: further
    down than anybody looks."""
    overlaps: tuple[float, ...]
    """Rejection mode: how likely the draft's token is accepted, sum of min(p, q)."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a round of speculation gives, on average over all outputs."""

    tokens: float
    """Committed by one target step."""
    whole: float
    """Share of rounds whose draft tokens all held, or that ended on a runner-up: the draft goes on from what it has."""
    survival: tuple[float, ...]
    """Share of rounds in which the draft token at depth 1, 2, ... was accepted."""


def rounds(outputs: Sequence[Agreement], mode: str, draft_tokens: int, num_siblings: int = 0) -> Rounds:
    """Walk through the outputs as speculation would, `draft_tokens` at a time.

    In rejection mode whether a token is accepted is drawn; what is returned are the expectations over those draws.
    Rounds begin where rounds end, so runs of easy and hard tokens count as often as they are met.
    """
    num_tokens = sum(len(output.ranks) for output in outputs)
    num_rounds = whole = 0.0
    reached = [0.0] * draft_tokens
    for output in outputs:
        length = len(output.ranks)
        weight = [0.0] * (length + draft_tokens + 3)  # how likely a round begins there
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
    """How often the draft's token is accepted, over all tokens."""
    shares = [_accepted(output, mode, at) for output in outputs for at in range(len(output.ranks))]
    return sum(shares) / len(shares) if shares else 0.0
