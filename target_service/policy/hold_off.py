"""How long a step waits for a draft: learnt from the token rates of earlier waits, and of steps without a wait.

A session without a proposal can decode plainly at once, or wait until its draft has sent a tree of some depth. The
better choice depends on the draft's speed, the network, the acceptance and the load. A formula over their averages was
tried and waited too long (docs/decisions/verification.md), so measured rates decide. An *episode* runs from one miss (a
step formed without a proposal) to the next; its tokens and its time are credited to the depth of the wait at its start.
The depth with the best rate is chosen, and now and then another one, so that rates stay current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.target_service.policy.budget import TRIAL_STEPS, TRY_EVERY, WORTHWHILE
from specdec.target_service.policy.means import SLOW_WEIGHT, WEIGHT

DEPTHS = (0, 2, 4)
"""Tree depths that a step may wait for; 0: it decodes plainly at once."""
CATCH_UP_S = 0.01
"""Seconds of a draft's first answer before one was measured, and least bound on a wait for a silent draft."""


@dataclass(frozen=True, slots=True)
class HoldOff:
    """A wait of one session for its draft. Times are of the worker's clock, in seconds."""

    since_s: float
    """Start of the wait, from which the draft's answer is timed."""
    until_s: float
    depth: int
    """Depth of a tree that ends the wait before `until_s`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps since a session's last miss."""

    depth: int
    """Depth of the wait at the miss; 0: no wait."""
    began_s: float
    num_tokens: int
    """Tokens of the session at the beginning of the episode."""


@dataclass(slots=True)
class MissRecord:
    """A session's misses."""

    num_unanswered: int = 0
    """Consecutive waits that ended without a proposal."""
    episode: Episode | None = None
    """The present episode; None before the first miss, and where hold-offs are fixed."""


@dataclass(slots=True)
class DraftLatency:
    """Moving means of the drafts' answer times, in seconds."""

    first_s: float = CATCH_UP_S
    """Seconds from the start of a wait to the first usable node."""
    node_s: float = 0.0
    """Seconds from one node to the next."""

    def observe_first(self, elapsed_s: float) -> None:
        """Learn that the first node came after `elapsed_s`."""
        self.first_s += WEIGHT * (elapsed_s - self.first_s)

    def observe_vain(self, waited_s: float) -> None:
        """Learn that no node came within `waited_s`: the network or the draft has become slower."""
        self.first_s = max(self.first_s, waited_s)

    def observe_node(self, elapsed_s: float) -> None:
        """Learn that a further node took `elapsed_s`."""
        self.node_s += WEIGHT * (elapsed_s - self.node_s)

    def until_depth(self, depth: int) -> float:
        """Expected seconds until a draft has sent a tree of `depth`."""
        return self.first_s + max(0, depth - 1) * self.node_s


@dataclass(slots=True, kw_only=True)
class HoldOffChoice:
    """Picks the depth to wait for, for sessions of one temperature range (`kind_of`)."""

    window: int = TRIAL_STEPS
    """Consecutive episodes with one depth. During plain steps a draft gets ahead, from which a wait after them profits:
    depths are compared in separate runs."""
    depths: Sequence[int] = DEPTHS
    """What is chosen from. The first is chosen where no other is clearly better."""
    _tokens: list[float] = field(init=False)
    _time_s: list[float] = field(init=False)
    _episodes: list[float] = field(init=False)
    _num_tried: list[int] = field(init=False)
    """Episodes of each depth, without decay."""
    _num_windows: int = 0
    _current: int = 0
    _num_left: int = 0

    def __post_init__(self) -> None:
        num = len(self.depths)
        self._tokens, self._time_s, self._episodes, self._num_tried = [0.0] * num, [0.0] * num, [0.0] * num, [0] * num

    def choose(self, max_depth: int) -> int:
        """The depth to wait for, at most `max_depth`. Depths without an episode come first."""
        if self._num_left > 0 and self._current <= max_depth:
            self._num_left -= 1
            return self._current
        self._num_left = self.window - 1
        self._current = self._pick(max_depth)
        return self._current

    def is_trial(self, depth: int) -> bool:
        """Whether a wait for a depth is a trial: its rate is known to be clearly below that of no wait."""
        arm, rates = self.depths.index(depth), self.rates()
        return arm > 0 and self._num_tried[arm] >= self.window // 2 and WORTHWHILE * rates[arm] < rates[0]

    def _pick(self, max_depth: int) -> int:
        arms = [arm for arm, depth in enumerate(self.depths) if depth <= max_depth]
        self._num_windows += 1
        least_tried = min(arms, key=lambda arm: self._episodes[arm])
        if self._episodes[least_tried] == 0 or self._num_windows % TRY_EVERY == 0:
            return self.depths[least_tried]
        rates = self.rates()
        best = max(arms, key=lambda arm: rates[arm])
        return self.depths[best] if rates[best] >= WORTHWHILE * rates[0] else self.depths[0]

    def observe(self, depth: int, num_tokens: int, elapsed_s: float) -> None:
        """Learn that an episode that began with a wait for `depth` committed `num_tokens` in `elapsed_s`."""
        chosen = self.depths.index(depth)
        self._episodes = [episodes * (1 - SLOW_WEIGHT) for episodes in self._episodes]
        self._tokens[chosen] = self._tokens[chosen] * (1 - SLOW_WEIGHT) + num_tokens
        self._time_s[chosen] = self._time_s[chosen] * (1 - SLOW_WEIGHT) + elapsed_s
        self._episodes[chosen] += 1
        self._num_tried[chosen] += 1

    def rates(self) -> Sequence[float]:
        """Tokens per second, by index of `self.depths`; infinite for a depth without an episode."""
        pairs = zip(self._tokens, self._time_s, strict=True)
        return [tokens / time_s if time_s > 0 else float("inf") for tokens, time_s in pairs]


def pays_for_all(num_waiting: int, acceptance: float, tokens_per_s: float, latency: DraftLatency) -> bool:
    """Whether a wait that delays sessions with a proposal gains more tokens than are decoded meanwhile.

    Episodes do not show that: each measures one session, to which a wait for one of eight sessions looks as good as a
    wait for all eight.

    Args:
        num_waiting: sessions whose drafts are waited for together.
        acceptance: probability that a proposed token is accepted after an accepted one.
        tokens_per_s: decoding rate over all sessions.
        latency: answer times of the drafts.
    """
    gained = 0.0
    for depth in range(1, DEPTHS[-1] + 1):
        gained += num_waiting * acceptance**depth
        if gained > tokens_per_s * latency.until_depth(depth):
            return True
    return False


def kind_of(temperature: float) -> str:
    """Temperature range whose sessions share records: acceptance depends most on the temperature."""
    return "greedy" if temperature == 0 else "cool" if temperature < 0.75 else "warm"
