"""Which drafts propose nothing that is ever accepted: they cost targets work, and give nothing for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import Session

_SESSION_STEPS = 64
"""Verified in one session with nothing accepted: it goes on without a draft for a while."""
_DRAFT_STEPS = 256
"""Verified in a row with nothing accepted. One that is right once in twenty gets there in 2 of 10^6 cases."""
_DRAFT_SESSIONS = 8
"""From so many sessions at least: one may be of a kind that no draft foresees."""


class Judgement(Enum):
    """What follows from a verified proposal."""

    NONE = auto()
    THROTTLE = auto()
    """The session does better without a draft for a while."""
    EJECT = auto()
    """The draft is of no use to anybody."""


@dataclass(slots=True)
class _Barren:
    """Steps since a draft's tokens were last accepted."""

    num_steps: int = 0
    sessions: set[str] = field(default_factory=set)


class AcceptanceRecord:
    """Counts, draft by draft, the verified steps since one of its tokens was accepted. Bounded by what it judges."""

    def __init__(self) -> None:
        self._barren: dict[str, _Barren] = {}

    def verified(self, session: Session, side: DraftSide, num_accepted: int) -> Judgement:
        """A target verified what a session's draft proposed, and accepted so many tokens."""
        address = side.host.address
        if num_accepted:
            self._barren.pop(address, None)
            side.num_barren, side.has_accepted = 0, True
            return Judgement.NONE
        side.num_barren += 1
        barren = self._barren.setdefault(address, _Barren())
        barren.num_steps += 1
        if len(barren.sessions) < _DRAFT_SESSIONS:
            barren.sessions.add(session.session_id)
        if barren.num_steps >= _DRAFT_STEPS and len(barren.sessions) >= _DRAFT_SESSIONS:
            del self._barren[address]
            return Judgement.EJECT
        return Judgement.THROTTLE if side.num_barren >= _SESSION_STEPS else Judgement.NONE

    def forget(self, address: str) -> None:
        """A draft is gone for good."""
        self._barren.pop(address, None)
