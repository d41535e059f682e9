"""Drafters of one session: what each did for the step at hand, and whether it pays to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.drafting.interface import Context, SessionDrafter
from specdec.target_service.policy.budget import SHARE, TRIAL_STEPS
from specdec.target_service.policy.means import WEIGHT
from specdec.target_service.session import TargetSession

_MOST_INTERVAL = 64
"""Steps between two calls of a drafter that brings nothing."""
_MOST_LOST_TOKENS = 8.0
"""Tokens that a drafter's calls may lose in a session before it is judged sooner than after a trial. Chosen: lookahead
proposes from its fifth call on."""


class DrafterRecorder(Protocol):
    """Counts what drafters did."""

    def asked(self, drafter: str, num_nodes: int, elapsed_s: float) -> None:
        """A drafter offered `num_nodes` nodes."""

    def judged(self, drafter: str, num_verified: int, accepted_depths: Sequence[int]) -> None:
        """`num_verified` of its nodes were verified, and those at `accepted_depths` accepted."""

    def searched(self, elapsed_s: float, matchness: float) -> None:
        """`layer_skip` searched for sublayers to leave out; `matchness`: share of tokens that the best set finds."""

    def dropped(self, drafter: str) -> None:
        """A drafter is not asked any more."""


@dataclass(slots=True)
class DrafterStep:
    """What a drafter did for a session's step."""

    name: str
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    elapsed_s: float = 0.0
    window_tokens: float = 0.0
    """Tokens that could have been decoded while its own rows in the target's step were computed."""


@dataclass(slots=True)
class DrafterInSession:
    """A drafter that proposes for one session, and whether that pays."""

    name: str
    proposer: SessionDrafter
    wait: int = 0
    """Steps until it is asked again."""
    interval: int = 1
    num_calls: int = 0
    gain: float = 0.0
    """Mean number of tokens accepted thanks to a call."""
    step: DrafterStep | None = None
    """What it did for the step at hand; None: it was not asked."""

    def is_due(self) -> bool:
        """Whether it is asked for the step at hand; counts the steps for which it is not."""
        if self.wait > 0:
            self.wait -= 1
            return False
        return True

    def judge(self, credit: float, cost_tokens: float) -> None:
        """A step is over for which it was asked.

        Args:
            credit: tokens that were accepted thanks to it.
            cost_tokens: what asking it cost, its own rows in the step included, in tokens that could have been decoded
                meanwhile. Only a call that brings as much has it asked at every step again: luck now and then does not
                make up for dear calls.
        """
        self.num_calls += 1
        self.gain += max(WEIGHT, 1 / self.num_calls) * (credit - self.gain)
        if credit > 0 and credit >= cost_tokens:
            self.interval = 1
        elif self.gain + SHARE < cost_tokens:
            lost_tokens = self.num_calls * (cost_tokens - self.gain)
            if self.num_calls >= TRIAL_STEPS or lost_tokens > _MOST_LOST_TOKENS:
                self.interval = min(_MOST_INTERVAL, 2 * self.interval)
        self.wait = self.interval - 1


@dataclass(slots=True)
class SessionDrafters:
    """What `LocalDrafters` keeps of a session."""

    session: TargetSession
    context: Context
    drafters: list[DrafterInSession] = field(default_factory=list)
    asked_at: int = 0
    """Number of its tokens when drafters were last asked."""
    asked: set[str] = field(default_factory=set)
    """Names of drafters that were asked then, or passed over."""
