"""Drafters of one session: what each did for the present step, and whether asking it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.drafting.interface import Context, SessionDrafter
from specdec.target_service.policy.budget import SHARE, TRIAL_STEPS
from specdec.target_service.policy.means import WEIGHT
from specdec.target_service.records.step_record import DrafterStep
from specdec.target_service.session import TargetSession

_MOST_INTERVAL = 64
"""Most steps from one call of a drafter to the next."""
_MOST_LOST_TOKENS = 8.0
"""Tokens that a drafter's calls may lose in a session before it is judged, even within its trial. Chosen, not measured:
lookahead proposes only from its fifth call on."""


class DrafterRecorder(Protocol):
    """Metrics of drafters."""

    def asked(self, drafter: str, num_nodes: int, elapsed_s: float) -> None:
        """Count a call of a drafter that hung `num_nodes` nodes in `elapsed_s` seconds."""

    def judged(self, drafter: str, num_verified: int, accepted_depths: Sequence[int]) -> None:
        """Count a drafter's `num_verified` verified nodes, and its accepted ones by their depths."""

    def searched(self, elapsed_s: float, matchness: float) -> None:
        """Note a search of `layer_skip` for sublayers to skip; `matchness`: share of tokens the best set predicts."""

    def dropped(self, drafter: str) -> None:
        """Count a drafter that is not asked any more."""


@dataclass(slots=True)
class DrafterInSession:
    """A drafter opened for one session, with its gain there."""

    name: str
    proposer: SessionDrafter
    wait: int = 0
    """Steps left before it is asked again."""
    interval: int = 1
    """Steps from one call to the next."""
    num_calls: int = 0
    gain: float = 0.0
    """Moving mean of accepted tokens per call."""
    step: DrafterStep | None = None
    """Record for the present step; None: it was not asked."""

    def is_due(self) -> bool:
        """Whether it is asked for the present step; counts down the steps without a call."""
        if self.wait > 0:
            self.wait -= 1
            return False
        return True

    def judge(self, credit: float, cost_tokens: float) -> None:
        """Learn from a call whose step is over, and set the time of the next call.

        Args:
            credit: accepted tokens of its nodes; a token of several drafters is divided among them.
            cost_tokens: cost of the call with its window's rows, in tokens that could have been decoded meanwhile. Only
                a call with a credit of at least that has the drafter asked at every step again: rare luck does not pay
                for expensive calls.
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
    """State of a session in `LocalDrafters`."""

    session: TargetSession
    context: Context
    drafters: list[DrafterInSession] = field(default_factory=list)
    asked_at: int = 0
    """Number of the session's tokens when drafters were last asked."""
    asked: set[str] = field(default_factory=set)
    """Names of drafters that had their turn for that step."""
