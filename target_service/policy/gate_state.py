"""What the gate keeps of a session, and what it expects of one by its kind and the load."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specdec.target_service.policy.step_costs import band_of

FIRST_GAIN = 0.5
"""Of a session of whose kind nothing is known."""


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
    """One session's."""

    kind: str
    """Sessions of one kind are expected to gain alike."""
    phase: Phase
    gain: float
    """Tokens accepted per step while it speculates, less what verifying them cost: a moving mean."""
    since_s: float
    is_measured: bool = False
    """Its gain is its own, not what others of its kind gained."""
    num_steps: int = 0
    """Since the phase began."""
    num_counted: int = 0
    """Of these, since there was a proposal."""
    num_barren: int = 0
    """Of these, since a token was accepted."""
    invested_s: float = 0.0
    """Of the target's own time, in which its prompt was computed for a draft, or is being so."""

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
        self.num_steps = self.num_counted = self.num_barren = 0


@dataclass(slots=True)
class _Pool:
    gain: float
    num_learnt: int = 0


@dataclass(slots=True)
class Gains:
    """What sessions gain by kind and load: with few of them a draft gets further ahead, and more is verified."""

    num_supposed: int = 4
    """So many steps what is known of no load, or of another one, counts as: the mean is a plain one at first."""
    _pools: dict[str, dict[int, _Pool]] = field(default_factory=dict)

    def expected(self, kind: str, num_sessions: int) -> float | None:
        """Of a session of a kind at about this load; None: nothing is known of the kind."""
        bands, wanted = self._pools.get(kind), band_of(num_sessions)
        if not bands:
            return None
        return bands[min(bands, key=lambda band: (abs(band - wanted), -band))].gain

    def learn(self, kind: str, num_sessions: int, gain: float, weight: float) -> None:
        """One gained so much. `weight`: of it, once the mean is a moving one."""
        expected = self.expected(kind, num_sessions)
        pool = self._pools.setdefault(kind, {}).setdefault(
            band_of(num_sessions), _Pool(FIRST_GAIN if expected is None else expected)
        )
        pool.num_learnt += 1
        pool.gain += max(weight, 1 / (self.num_supposed + pool.num_learnt)) * (gain - pool.gain)
