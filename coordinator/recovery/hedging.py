"""Sessions with a slow draft are opened at a second one too, for a bounded time; the faster one keeps them.

After Dean & Barroso, The Tail at Scale (2013). Invariants: a session is hedged exactly while it has two sides, and its
second side is the hedge; at most a share of all sessions is hedged, or one session. Hedges have the lowest priority at
a draft: a full draft drops them first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import structlog

from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.observer import Observer
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.load import is_strained
from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import Session
from specdec.coordinator.sessions.table import SessionTable

_RACE_ANSWERS = 8
"""Answers of the second draft after which the faster one is kept; the first proposal, after the prompt, is none."""
_MOST_STEPS = 64
"""Steps of a hedged session after which the faster draft is kept."""
_MOST_S = 5.0
"""Seconds after which the faster draft is kept, even without steps."""
_LEAST_LEFT_TOKENS = 32
"""Tokens left of a choice below which a hedge cannot pay any more."""
_RIVAL_SHARE = 0.5
"""Share of the slow draft's answer time above which a known rival is not tried: the target may be too fast for both."""
_WINNING_SHARE = 0.8
"""Share of the first draft's answer time that the second must reach to win: a change costs, too."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Hedge:
    session: Session
    timer: asyncio.TimerHandle
    num_steps: int = 0


class Hedging:
    """Begins and ends hedges."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        fleet: Fleet,
        observer: Observer,
        share: float,
        is_overloaded: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hedge nothing yet.

        Args:
            sessions: all sessions.
            fleet: finds other drafts.
            observer: counts hedges.
            share: largest share of sessions that is hedged; 0: none is hedged, nor moved because its draft is slow.
            is_overloaded: whether requests wait for places.
            clock: monotonic, in seconds.
        """
        self._sessions = sessions
        self._fleet = fleet
        self._observer = observer
        self._share = share
        self._is_overloaded = is_overloaded
        self._clock = clock
        self._open: dict[str, _Hedge] = {}
        """Hedges by session id."""

    def find_rival(self, session: Session, slow: DraftSide, *, is_proven: bool = False) -> DraftLink | None:
        """A spare draft that may be faster for a session than its slow one; None if there is none.

        `is_proven`: it must be known to be faster; otherwise its speed may be unknown.
        """
        num_left = session.sampling.max_tokens - session.num_output_tokens
        if not self._share or num_left < _LEAST_LEFT_TOKENS or self._is_overloaded():
            return None
        if self._fleet.draft_credit(session.target.host) == 0:
            return None  # the target has no use for proposals
        rival = self._fleet.find_spare_draft(session.position, besides=slow.host)
        if rival is None:
            return None
        takes_s = answer_s(rival)
        if takes_s is None:
            return None if is_proven else rival
        return rival if takes_s <= _RIVAL_SHARE * slow.pace_s(self._clock()) else None

    def begin(self, session: Session, slow: DraftSide) -> None:
        """Open a session at a second draft too, if there is a rival and the share of hedges allows it."""
        if len(self._open) >= max(1, int(self._share * len(self._sessions))):
            return
        rival = self.find_rival(session, slow)
        if rival is None:
            return
        session.drafting.num_changes += 1
        slow_s = slow.pace_s(self._clock())
        slow.measure_anew()
        timer = asyncio.get_running_loop().call_later(_MOST_S, self.settle, session)
        self._open[session.session_id] = _Hedge(session, timer)
        _log.info(
            "draft_hedged",
            **session.log_fields,
            draft=slow.host.address,
            hedge=rival.address,
            answer_ms=round(slow_s * 1e3, 1),
        )
        self._observer.draft_hedged(len(self._open))
        rival.open_session(session)

    def stepped(self, session: Session) -> None:
        """A hedged session made a step."""
        hedge = self._open[session.session_id]
        hedge.num_steps += 1
        second = session.drafting.sides[1]
        if self._is_overloaded():
            second.host.close_session(session, "overloaded")
        elif second.num_answers >= _RACE_ANSWERS or hedge.num_steps >= _MOST_STEPS:
            self.settle(session)

    def settle(self, session: Session) -> None:
        """Keep the faster of the two drafts."""
        first, second = session.drafting.sides
        winner = faster(first, second, self._clock())
        (first if winner is second else second).host.close_session(session, "slower")

    def closed(self, link: DraftLink, session: Session) -> None:
        """A session is closed at a draft, which ends its hedge."""
        hedge = self._open.pop(session.session_id, None)
        if hedge is None:
            return
        hedge.timer.cancel()
        first, second = session.drafting.sides
        is_won = session.finish is None and first.host is link
        kept = second if is_won else first
        _log.info(
            "draft_hedge_ended",
            **session.log_fields,
            kept=kept.host.address,
            is_won=is_won,
            num_steps=hedge.num_steps,
        )
        self._observer.draft_hedge_ended(len(self._open), is_won=is_won)

    def on_load(self, link: DraftLink) -> None:
        """A draft reported its load: a full draft drops its hedges."""
        if self._open and is_strained(link, self._clock()):
            for hedge in list(self._open.values()):
                if hedge.session.drafting.sides[1].host is link:
                    link.close_session(hedge.session, "overloaded")


def faster(first: DraftSide, second: DraftSide, now_s: float) -> DraftSide:
    """The draft that keeps a session: the second one only if it is clearly faster."""
    if not second.num_answers:
        return first
    return second if second.pace_s(now_s) <= _WINNING_SHARE * first.pace_s(now_s) else first


def answer_s(link: DraftLink) -> float | None:
    """Seconds from a commit to the proposal that covers it: the median of a draft's sessions; None: unknown."""
    sides = (session.drafting.at(link) for session in link.sessions.values())
    answers = [side.answer_s for side in sides if side is not None and side.num_answers]
    return median(answers) if answers else None
