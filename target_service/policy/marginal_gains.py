"""The gain of asking one more source for a step, beyond the proposals of the sources asked before.

Sources agree most where guessing is easy, so a source's acceptance alone says little of what it adds. The *headroom* is
the number of tokens that the step could commit beyond those expected of its tree. A source gains a share of it. The
share is learnt separately for little and for much headroom: other sources hardly find what a sure source leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

from specdec.target_service.policy.acceptance import NUM_BANDS, PRIOR_RATE
from specdec.target_service.policy.means import PRIOR_WEIGHT, SLOW_WEIGHT


@dataclass(frozen=True, slots=True)
class Headroom:
    """The most that one more source could gain in a step."""

    tokens: float
    """Tokens that the step could accept beyond those expected of its tree."""
    limit: int
    """Most tokens that the step may accept."""


@dataclass(frozen=True, slots=True)
class DrafterCall:
    """A call of one source, for one session and step."""

    source: str
    headroom: Headroom
    """Headroom before the call."""
    new_nodes: range
    """Nodes of the session's tree that the call added."""


@dataclass(slots=True)
class _Band:
    gained: float = PRIOR_RATE * PRIOR_WEIGHT
    headroom: float = PRIOR_WEIGHT


@dataclass(slots=True)
class MarginalGains:
    """Marginal gains of all sources. Memory: sixteen numbers for each source."""

    _bands: defaultdict[str, list[_Band]] = field(
        default_factory=lambda: defaultdict(lambda: [_Band() for _ in range(NUM_BANDS)])
    )

    def expected(self, source: str, headroom: Headroom) -> float:
        """Expected tokens that a call of `source` gains."""
        band = self._bands[source][_headroom_band(headroom)]
        return headroom.tokens * band.gained / band.headroom

    def observe(self, call: DrafterCall, accepted: Set[int]) -> None:
        """Learn from a call whose step is over; `accepted`: accepted nodes of the session's tree."""
        band = self._bands[call.source][_headroom_band(call.headroom)]
        band.gained = band.gained * (1 - SLOW_WEIGHT) + sum(node in accepted for node in call.new_nodes)
        band.headroom = band.headroom * (1 - SLOW_WEIGHT) + call.headroom.tokens

    def forget(self, source: str) -> None:
        """Drop the record of a source: another source has its name now."""
        self._bands.pop(source, None)


def _headroom_band(headroom: Headroom) -> int:
    return max(0, min(int(NUM_BANDS * headroom.tokens / headroom.limit), NUM_BANDS - 1)) if headroom.limit > 0 else 0
