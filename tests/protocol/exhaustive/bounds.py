"""How much of what can happen is explored."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one exploration: all orders of all events, as long as no more of these happen.

    Orders always vary between streams, nodes and the client. Within a stream gRPC keeps it, and loses nothing but a
    suffix when the stream is cut; `repeats`, `losses` and `swaps` are what gRPC never does.
    """

    num_sessions: int = 1
    num_tokens: int = 2
    """Of each session's output."""
    credit_window: int = 2
    has_draft: bool = False
    """A draft takes part; else proposals, if any, come from nowhere."""
    has_link: bool = False
    """Draft and target may talk directly, beside the coordinator."""
    is_target_eager: bool = False
    """The target, and what is on the way to and from it, never waits: only the orders of all else are explored."""
    cuts: int = 0
    """Of the coordinator's stream to the draft, if there is one, else to the target."""
    link_cuts: int = 0
    """Of the link between draft and target."""
    target_crashes: int = 0
    draft_crashes: int = 0
    coordinator_crashes: int = 0
    client_crashes: int = 0
    proposals: int = 0
    early_timers: int = 0
    """Timers that may fire while messages are under way."""
    repeats: int = 0
    """Messages of a stream that come twice."""
    losses: int = 0
    """Messages of a stream that do not come, though later ones do."""
    swaps: int = 0
    """Messages of a stream that come before the one that was sent earlier."""

    @property
    def must_end(self) -> bool:
        """Whether an end must be in reach of every state: nobody makes up for what gRPC does not lose."""
        return not self.losses and not self.swaps


@dataclass(frozen=True, slots=True)
class Exploration:
    """Bounds, and what there is within them."""

    bounds: Bounds
    num_states: int
    """That are known to be there: an explorer that finds fewer has lost its way."""


_DRAFT = Bounds(num_tokens=3, credit_window=1, has_draft=True, is_target_eager=True)
_LINK = replace(_DRAFT, num_tokens=2, has_link=True)

SHORT = {
    "faultless": Exploration(Bounds(num_tokens=3), 87),
    "sessions": Exploration(Bounds(num_sessions=2, num_tokens=1), 252),
    "cut": Exploration(Bounds(cuts=1), 457),
    "target": Exploration(Bounds(num_tokens=1, target_crashes=1), 321),
    "coordinator": Exploration(Bounds(num_tokens=1, coordinator_crashes=1), 2088),
    "client": Exploration(Bounds(num_tokens=1, client_crashes=1), 147),
    "proposal": Exploration(Bounds(proposals=1), 299),
    "repeat": Exploration(Bounds(num_tokens=1, repeats=1), 246),
    "loss": Exploration(Bounds(losses=1), 304),
    "swap": Exploration(Bounds(swaps=1, early_timers=1), 158),
    "draft": Exploration(replace(_DRAFT, num_tokens=2), 306),
}
"""Some thousand states in all."""

LONG = {
    "cut-twice": Exploration(Bounds(cuts=2), 1000),
    "cut-target": Exploration(Bounds(cuts=1, target_crashes=1), 1000),
    "cut-proposal": Exploration(Bounds(cuts=1, proposals=1), 1000),
    "coordinator-two-tokens": Exploration(Bounds(coordinator_crashes=1), 1418),
    "client-two-tokens": Exploration(Bounds(client_crashes=1), 600),
    "target-two-tokens": Exploration(Bounds(target_crashes=1), 600),
    "repeat-two-tokens": Exploration(Bounds(repeats=1), 624),
    "early-timer": Exploration(Bounds(num_tokens=1, cuts=1, early_timers=1), 500),
    "sessions-cut": Exploration(Bounds(num_sessions=2, num_tokens=1, cuts=1), 1000),
    "draft-three-tokens": Exploration(_DRAFT, 1001),
    "draft-cut": Exploration(replace(_DRAFT, cuts=1), 1001),
    "draft-crash": Exploration(replace(_DRAFT, draft_crashes=1), 1001),
    "draft-target-crash": Exploration(replace(_DRAFT, target_crashes=1), 1001),
    "draft-repeat": Exploration(replace(_DRAFT, repeats=1), 1001),
    "draft-loss": Exploration(replace(_DRAFT, losses=1), 1001),
    "draft-coordinator": Exploration(replace(_DRAFT, num_tokens=2, coordinator_crashes=1), 500),
    "draft-everywhere": Exploration(Bounds(num_tokens=2, has_draft=True), 500),
    "link": Exploration(_LINK, 7093),
    "link-cut": Exploration(replace(_LINK, num_tokens=1, link_cuts=1), 4855),
    "draft-two-faults": Exploration(replace(_DRAFT, cuts=1, draft_crashes=1), 500),
}
"""Some ten thousand."""

BOUNDS = {**SHORT, **LONG}
