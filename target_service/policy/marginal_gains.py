"""What asking one more source for a step brings, beyond what those asked before it have proposed.

Sources agree most where guessing is easy, so what each brings alone says little of what it adds. The *headroom* is the
number of tokens that the step could commit beyond what is expected of its tree. Of that a source gains a share, which
is learnt apart for little and for much headroom: where a sure source leaves little, hardly any other source finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

from specdec.target_service.policy.acceptance import NUM_BANDS, PRIOR_RATE
from specdec.target_service.policy.means import PRIOR_WEIGHT, SLOW_WEIGHT


@dataclass(frozen=True, slots=True)
class Headroom:
    """What one more source could gain in a step."""

    tokens: float
    """Tokens that the step could accept beyond what is expected."""
    limit: int
    """Most tokens that the step may accept."""


@dataclass(frozen=True, slots=True)
class DrafterCall:
    """A call of one source, for one session and step."""

    source: str
    headroom: Headroom
    """Headroom when the source was asked."""
    new_nodes: range
    """Nodes of the session's tree that no other source had proposed."""


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
        """Tokens that a call of `source` gains."""
        band = self._bands[source][_headroom_band(headroom)]
        return headroom.tokens * band.gained / band.headroom

    def observe(self, call: DrafterCall, accepted: Set[int]) -> None:
        """A step is over for which a source was asked; `accepted`: nodes of the tree."""
        band = self._bands[call.source][_headroom_band(call.headroom)]
        band.gained = band.gained * (1 - SLOW_WEIGHT) + sum(node in accepted for node in call.new_nodes)
        band.headroom = band.headroom * (1 - SLOW_WEIGHT) + call.headroom.tokens

    def forget(self, source: str) -> None:
        """Another source has its name."""
        self._bands.pop(source, None)


def _headroom_band(headroom: Headroom) -> int:
    return max(0, min(int(NUM_BANDS * headroom.tokens / headroom.limit), NUM_BANDS - 1)) if headroom.limit > 0 else 0
