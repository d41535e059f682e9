"""The one record of acceptance: by source, depth and score, of all sessions and of each session.

Sources score their nodes on different scales. The record learns the acceptance rate of each score, so that the nodes of
all sources are ranked on one scale. A committed token tells of every offered sibling whether it was right, verified or
not: the record of a source grows even if few of its nodes are verified.

A session's own record weighs more with each observation: its text may differ from that of other sessions.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.tree import MAX_TREE_NODES, TokenTree
from specdec.target_service.policy.means import PRIOR_WEIGHT, SLOW_WEIGHT, WEIGHT

NUM_BANDS = 8
"""Number of equal ranges of scores, or of headroom, with separate counts."""
_DEPTHS = (1, 2, 4)
"""First depth of each range of depths with separate counts."""
PRIOR_RATE = 0.5
"""Estimated probability that a token is accepted, before any was verified."""


def score_band(score: float) -> int:
    """Index of the range of scores that `score` falls into, from 0 to `NUM_BANDS` - 1."""
    return int(score * NUM_BANDS) if 0.0 <= score < 1.0 else NUM_BANDS - 1 if score > 0 else 0


@dataclass(slots=True)
class Counts:
    """Decayed counts of reached nodes, and of those that matched the target's token."""

    accepted: float = 0.0
    reached: float = 0.0

    def observe(self, accepted: bool) -> None:
        """Count one more reached node."""
        self.accepted = self.accepted * (1 - SLOW_WEIGHT) + accepted
        self.reached = self.reached * (1 - SLOW_WEIGHT) + 1.0

    def rate(self, prior: float) -> float:
        """Share of reached nodes that were accepted; `prior` before the first one."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.reached + PRIOR_WEIGHT)


@dataclass(slots=True)
class OwnRecord:
    """Counts of one source in one session."""

    bands: list[Counts] = field(default_factory=lambda: [Counts() for _ in range(NUM_BANDS)])


@dataclass(slots=True)
class SourceRecord:
    """Counts of one source in all sessions."""

    bands: list[list[Counts]] = field(default_factory=lambda: [[Counts() for _ in range(NUM_BANDS)] for _ in _DEPTHS])
    _at_depth: list[list[Counts]] = field(init=False, repr=False)
    """The bands of each depth."""

    def __post_init__(self) -> None:
        self._at_depth = [self.bands[max(0, bisect(_DEPTHS, depth) - 1)] for depth in range(MAX_TREE_NODES + 1)]

    def observe(self, score: float, depth: int, accepted: bool, own: OwnRecord | None) -> None:
        """Count a node below a committed token; `accepted`: it equals the target's next token."""
        band = score_band(score)
        self._at_depth[depth][band].observe(accepted)
        if own is not None:
            counts = own.bands[band]
            counts.accepted = counts.accepted * (1 - WEIGHT) + accepted
            counts.reached = counts.reached * (1 - WEIGHT) + 1.0

    def path_scores(
        self, scores: Sequence[float], tree: TokenTree, own: OwnRecord | None, max_depth: int
    ) -> list[float]:
        """Each node's product of `rate` along its path, 0 below `max_depth`; scores are from 0 to 1."""
        products: list[float] = []
        at_depth, own_bands = self._at_depth, None if own is None else own.bands
        for score, parent, depth in zip(scores, tree.parents, tree.depths, strict=True):
            if depth > max_depth:
                products.append(0.0)
                continue
            band = int(score * NUM_BANDS) if score < 1 else NUM_BANDS - 1
            counts = at_depth[depth][band]
            rate = (counts.accepted + PRIOR_WEIGHT * score) / (counts.reached + PRIOR_WEIGHT)
            if own_bands is not None:
                counts = own_bands[band]
                rate = (counts.accepted + PRIOR_WEIGHT * rate) / (counts.reached + PRIOR_WEIGHT)
            products.append(rate * products[parent] if parent >= 0 else rate)
        return products

    def rate(self, score: float, depth: int, own: OwnRecord | None) -> float:
        """Estimated probability that a node of this score is accepted when its parent is."""
        band = score_band(score)
        rate = self._at_depth[depth][band].rate(min(1.0, max(0.0, score)))
        return rate if own is None else own.bands[band].rate(rate)


class Acceptance:
    """Records of all sources. Memory: 48 numbers for each source."""

    def __init__(self) -> None:
        self._records: defaultdict[str, SourceRecord] = defaultdict(SourceRecord)
        self._went_on = Counts()

    def __getitem__(self, source: str) -> SourceRecord:
        return self._records[source]

    @property
    def depth_rate(self) -> float:
        """Estimated probability that a walk goes on at a node with proposals of a draft, regardless of their scores."""
        return self._went_on.rate(PRIOR_RATE)

    def observe_depth(self, went_on: bool) -> None:
        """A walk reached a node with verified children of a draft; `went_on`: one of them was accepted."""
        self._went_on.observe(went_on)

    def forget(self, source: str) -> None:
        """Drop the record of a source: another source has its name now."""
        self._records.pop(source, None)
