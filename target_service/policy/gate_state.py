"""What the gate keeps of a session, and what it expects of one by its kind."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_GAIN = 0.5
"""Tokens per step that a session of an unknown kind is expected to gain."""


class Phase(enum.Enum):
    """Where a session stands with the gate."""

    ON = enum.auto()
    """It speculates."""
    PROBE = enum.auto()
    """It speculates to find out what that brings."""
    OFF = enum.auto()
    """Its draft is suspended."""


@dataclass(slots=True)
class GateState:
    """What the gate keeps of one session."""

    kind: str
    """Sessions of one kind are expected to gain alike."""
    phase: Phase
    gain: float
    """Tokens accepted per step while it speculates, less what verifying them cost: a moving mean."""
    since_s: float
    is_measured: bool = False
    """Its gain is its own, not what others of its kind gained."""
    num_counted: int = 0
    """Steps since the phase began and there was a proposal."""
    num_without_acceptance: int = 0
    """Steps of these since a token was accepted."""
    invested_s: float = 0.0
    """Seconds that the target has spent on computing its prompt for a draft."""

    @property
    def has_begun(self) -> bool:
        """Whether it has ever speculated, so that a draft knows its prompt."""
        return self.is_measured or self.invested_s > 0

    def enter(self, phase: Phase, now_s: float) -> None:
        """Begin a phase."""
        self.phase, self.since_s = phase, now_s
        self.restart()

    def restart(self) -> None:
        """Its draft begins where it was told to stop: what goes on until it proposes is not counted."""
        self.num_counted = self.num_without_acceptance = 0
