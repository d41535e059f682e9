"""The gate's state of one session."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    """Phase of a session at the gate."""

    ON = enum.auto()
    """The session speculates."""
    PROBE = enum.auto()
    """The session speculates to measure its gain."""
    OFF = enum.auto()
    """The session's draft is suspended."""


@dataclass(slots=True)
class Gain:
    """Gain of a kind of sessions: tokens accepted per speculating step, less the cost of verifying, in tokens."""

    mean: float = 0.0
    variance: float = 1.0
    """Moving mean of the squared differences of one step's gain from `mean`."""

    def learn(self, gain: float, weight: float) -> None:
        """Learn the gain of a step, or of a session."""
        difference = gain - self.mean
        self.mean += weight * difference
        self.variance += weight * (difference * difference - self.variance)


@dataclass(slots=True)
class GateState:
    """The gate's state of one session."""

    kind: str
    """Name of the session's kind: its mode, temperature range and sources."""
    phase: Phase
    gain: float
    """Tokens accepted per speculating step, less the cost of verifying, in tokens: a moving mean."""
    since_s: float
    """Monotonic time in seconds at which the phase began."""
    is_measured: bool = False
    """Whether `gain` was measured in this session; else it is that of the kind."""
    num_counted: int = 0
    """Steps since the first proposal of the phase."""
    num_without_acceptance: int = 0
    """Counted steps since the last accepted token."""
    num_silent: int = 0
    """Speculating steps before the first proposal of the phase. A new session begins with the number of its kind."""
    invested_s: float = 0.0
    """Seconds that the target spent on the session's prompt for its own draft."""

    @property
    def has_begun(self) -> bool:
        """Whether the session has ever speculated, so that a draft knows its prompt."""
        return self.is_measured or self.invested_s > 0

    def enter(self, phase: Phase, now_s: float) -> None:
        """Begin a phase."""
        self.phase, self.since_s = phase, now_s
        self.restart()

    def restart(self) -> None:
        """Reset the counts: steps before the draft's first proposal are not counted."""
        self.num_counted = self.num_without_acceptance = self.num_silent = 0
