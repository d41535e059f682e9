"""The one record of acceptance: by source, depth and score, of all sessions and of each one.

Each source has a scale of scores of its own. How often nodes of a score are accepted is learnt, so that the nodes of
all sources, drafts among them, are ranked on one scale. The target's tokens decide for every offered node below a
committed one whether it would have been accepted, verified or not: the record of a source that is asked grows, even if
few of its nodes are verified.

A session's own record counts more the longer it is: its text may be unlike those of other sessions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from specdec.target_service.policy.means import PRIOR_WEIGHT, SLOW_WEIGHT, WEIGHT

NUM_BANDS = 8
"""Equal ranges of scores, or of headroom, each counted apart."""
_DEPTHS = (1, 2, 4)
"""First depths of the ranges that are counted apart."""
PRIOR_RATE = 0.5
"""Estimated probability that a token is accepted, before any was verified."""


def score_band(score: float) -> int:
    """The band of scores that are counted together."""
    return max(0, min(int(score * NUM_BANDS), NUM_BANDS - 1))


def _depth_band(depth: int) -> int:
    return sum(depth >= least for least in _DEPTHS) - 1


@dataclass(slots=True)
class Counts:
    """Nodes that were reached, and those of them that were the target's token; older ones count less."""

    accepted: float = 0.0
    reached: float = 0.0

    def observe(self, accepted: bool, weight: float = SLOW_WEIGHT) -> None:
        """One more node."""
        self.accepted = self.accepted * (1 - weight) + accepted
        self.reached = self.reached * (1 - weight) + 1.0

    def rate(self, prior: float) -> float:
        """Share of nodes that were accepted; nothing seen: `prior`."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.reached + PRIOR_WEIGHT)


@dataclass(slots=True)
class OwnRecord:
    """Counts of one source in one session."""

    bands: list[Counts] = field(default_factory=lambda: [Counts() for _ in range(NUM_BANDS)])


@dataclass(slots=True)
class SourceRecord:
    """Counts of one source in all sessions."""

    bands: list[list[Counts]] = field(default_factory=lambda: [[Counts() for _ in range(NUM_BANDS)] for _ in _DEPTHS])

    def observe(self, score: float, depth: int, accepted: bool, own: OwnRecord | None) -> None:
        """A node that hangs from a committed token was, or was not, the target's next one."""
        band = score_band(score)
        self.bands[_depth_band(depth)][band].observe(accepted)
        if own is not None:
            own.bands[band].observe(accepted, WEIGHT)

    def rate(self, score: float, depth: int, own: OwnRecord | None) -> float:
        """Estimated probability that a node of this score is accepted when its parent is."""
        band = score_band(score)
        rate = self.bands[_depth_band(depth)][band].rate(min(1.0, max(0.0, score)))
        return rate if own is None else own.bands[band].rate(rate)


class Acceptance:
    """Records of all sources. Memory: some fifty numbers for each."""

    def __init__(self) -> None:
        self._records: defaultdict[str, SourceRecord] = defaultdict(SourceRecord)
        self._went_on = Counts()

    def __getitem__(self, source: str) -> SourceRecord:
        return self._records[source]

    @property
    def depth_rate(self) -> float:
        """Estimated probability that a walk goes on where a draft has proposed something, whatever its score."""
        return self._went_on.rate(PRIOR_RATE)

    def observe_depth(self, went_on: bool) -> None:
        """A node with verified children of a draft was reached; `went_on` when one of them was accepted."""
        self._went_on.observe(went_on)

    def forget(self, source: str) -> None:
        """Another source has its name."""
        self._records.pop(source, None)
