"""How long a step waits for a draft: learnt from what waiting, and not waiting, has brought.

A session without a proposal can decode plainly at once, or wait until its draft has sent a tree of some depth. Which is
better depends on the draft's speed, the network, the acceptance and the load, all at once. A formula over their
averages was tried and waited too long (docs/decisions/verification.md), so the choice is made by outcome. An *episode*
runs from one miss (a step formed without a proposal at hand) to the next; what it committed over the time it took is
credited to the depth that was waited for at its start. The depth with the best rate is chosen, and now and then another
one, so that rates stay current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.target_service.policy.budget import TRIAL_STEPS, TRY_EVERY, WORTHWHILE
from specdec.target_service.policy.means import SLOW_WEIGHT, WEIGHT

DEPTHS = (0, 2, 4)
"""Depths that a step may wait for; 0 decodes plainly at once."""
CATCH_UP_S = 0.01
"""Seconds that a draft is assumed to take before one has answered, and that a silent one may be waited for where steps
are shorter."""


@dataclass(frozen=True, slots=True)
class HoldOff:
    """A step of one session that waits for a draft. Times are of the worker's clock."""

    since_s: float
    """A draft's answer is timed from here."""
    until_s: float
    depth: int
    """Depth of the tree that ends the wait before `until_s`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps since a session's last miss."""

    depth: int
    """Depth that was waited for at the miss; 0: none."""
    began_s: float
    num_tokens: int
    """Tokens of the session at its beginning."""


@dataclass(slots=True)
class MissRecord:
    """What a session's misses say of its draft."""

    num_unanswered: int = 0
    """Misses in a row after which no proposal came in time."""
    episode: Episode | None = None
    """The present one; None before the first miss, and where hold-offs are fixed."""


@dataclass(slots=True)
class DraftLatency:
    """Moving means of how fast the drafts answer, in seconds."""

    first_s: float = CATCH_UP_S
    """From a verdict that left no proposal to the first usable node."""
    node_s: float = 0.0
    """From one node to the next."""

    def observe_first(self, elapsed_s: float) -> None:
        """A proposal answered a verdict after `elapsed_s`."""
        self.first_s += WEIGHT * (elapsed_s - self.first_s)

    def observe_node(self, elapsed_s: float) -> None:
        """A further node took `elapsed_s`."""
        self.node_s += WEIGHT * (elapsed_s - self.node_s)

    def until_depth(self, depth: int) -> float:
        """Expected time until a draft has sent a tree of `depth`."""
        return self.first_s + max(0, depth - 1) * self.node_s


@dataclass(slots=True, kw_only=True)
class HoldOffChoice:
    """Picks the depth to wait for, for sessions of one kind (greedy, or sampled at a like temperature)."""

    window: int = TRIAL_STEPS
    """Episodes for which a depth is kept. A wait that follows plain steps profits from what the draft did during these,
    so depths are compared in runs of their own."""
    _tokens: list[float] = field(default_factory=lambda: [0.0] * len(DEPTHS))
    _time_s: list[float] = field(default_factory=lambda: [0.0] * len(DEPTHS))
    _episodes: list[float] = field(default_factory=lambda: [0.0] * len(DEPTHS))
    _num_tried: list[int] = field(default_factory=lambda: [0] * len(DEPTHS))
    """Episodes, however long ago."""
    _num_windows: int = 0
    _current: int = 0
    _num_left: int = 0

    def choose(self, max_depth: int) -> int:
        """The depth to wait for, at most `max_depth`. Depths without an episode come first."""
        if self._num_left > 0 and self._current <= max_depth:
            self._num_left -= 1
            return self._current
        self._num_left = self.window - 1
        self._current = self._pick(max_depth)
        return self._current

    def is_trial(self, depth: int) -> bool:
        """Whether waiting for a depth is known to be clearly worse than not waiting: then it keeps its rate current."""
        arm, rates = DEPTHS.index(depth), self.rates()
        return arm > 0 and self._num_tried[arm] >= self.window // 2 and WORTHWHILE * rates[arm] < rates[0]

    def _pick(self, max_depth: int) -> int:
        arms = [arm for arm, depth in enumerate(DEPTHS) if depth <= max_depth]
        self._num_windows += 1
        least_tried = min(arms, key=lambda arm: self._episodes[arm])
        if self._episodes[least_tried] == 0 or self._num_windows % TRY_EVERY == 0:
            return DEPTHS[least_tried]
        rates = self.rates()
        best = max(arms, key=lambda arm: rates[arm])
        return DEPTHS[best] if rates[best] >= WORTHWHILE * rates[0] else DEPTHS[0]

    def observe(self, depth: int, num_tokens: int, elapsed_s: float) -> None:
        """An episode that began with waiting for `depth` committed `num_tokens` in `elapsed_s`."""
        chosen = DEPTHS.index(depth)
        self._episodes = [episodes * (1 - SLOW_WEIGHT) for episodes in self._episodes]
        self._tokens[chosen] = self._tokens[chosen] * (1 - SLOW_WEIGHT) + num_tokens
        self._time_s[chosen] = self._time_s[chosen] * (1 - SLOW_WEIGHT) + elapsed_s
        self._episodes[chosen] += 1
        self._num_tried[chosen] += 1

    def rates(self) -> Sequence[float]:
        """Tokens per second by arm; infinite where nothing is known."""
        pairs = zip(self._tokens, self._time_s, strict=True)
        return [tokens / time_s if time_s > 0 else float("inf") for tokens, time_s in pairs]


def pays_for_all(num_waiting: int, acceptance: float, tokens_per_s: float, latency: DraftLatency) -> bool:
    """Whether a wait that keeps others waiting, too, which need none, gains more tokens than are decoded meanwhile.

    Episodes do not say so: they are of one session each, and a wait for one of eight looks as good to it as a wait of
    all eight for all.

    Args:
        num_waiting: sessions whose drafts are waited for, all at once.
        acceptance: share of proposed tokens that are accepted where the one before was.
        tokens_per_s: what all sessions decode.
        latency: of their drafts.
    """
    gained = 0.0
    for depth in range(1, DEPTHS[-1] + 1):
        gained += num_waiting * acceptance**depth
        if gained > tokens_per_s * latency.until_depth(depth):
            return True
    return False


def kind_of(temperature: float) -> str:
    """Sessions of one kind share what is learnt: acceptance depends on the temperature more than on anything else."""
    return "greedy" if temperature == 0 else "cool" if temperature < 0.75 else "warm"
