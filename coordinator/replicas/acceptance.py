"""Find drafts whose tokens are never accepted: they cost targets work without gain."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import Session

_SESSION_STEPS = 64
"""Steps of a session in a row, verified with no token accepted, after which it has no draft for a while."""
_DRAFT_STEPS = 256
"""Steps of a draft in a row with no token accepted before it is ejected; at 5 % acceptance chance 2 in 10^6."""
_DRAFT_SESSIONS = 8
"""Sessions, at least, in which these steps happened: one session's text may be unpredictable."""


class Judgement(Enum):
    """Consequence of a verified proposal."""

    NONE = auto()
    THROTTLE = auto()
    """The session goes on without a draft for a while."""
    EJECT = auto()
    """The draft is ejected."""


@dataclass(slots=True)
class _Barren:
    """Steps since a draft's tokens were last accepted."""

    num_steps: int = 0
    sessions: set[str] = field(default_factory=set)


class AcceptanceRecord:
    """Counts, by draft, the verified steps since one of its tokens was accepted."""

    def __init__(self) -> None:
        self._barren: dict[str, _Barren] = {}

    def verified(self, session: Session, side: DraftSide, num_accepted: int) -> Judgement:
        """A target verified a proposal of the session's draft and accepted `num_accepted` tokens."""
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
        """A draft was removed."""
        self._barren.pop(address, None)
