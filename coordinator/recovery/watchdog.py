"""Move sessions whose target is up but makes no progress for them, or far less than another would.

Keepalive and the target's own servicer detect a silent target or a stalled engine. The watchdog looks at each session:
it must get verdicts or progress reports, or it moves.

Times in which this process stood still (a suspended machine, a signal) do not count: replicas' messages of that time
are still unread.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from specdec.coordinator.recovery.moves import TargetMoves
from specdec.coordinator.recovery.slowness import SlowTargets
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.session import Session, TargetHost
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.tasks import in_parts
from specdec.wire.errors import Unavailable

_LOOKS = 6
"""Looks per stall bound: a stall is found at most a sixth of the bound too late."""
_LONGEST_LOOK_S = 1.0
_UNTOLD_FACTOR = 3
"""Factor on the stall bound for older targets, which do not report a queue or a long prompt."""
_QUEUED_S = 1.0
"""Seconds that a session queues at its target before an idle target gets it."""
_MOST_DOUBLINGS = 6
_STANDSTILL_S = 0.5
"""Seconds by which a look must be late to show a standstill rather than a busy event loop."""
_log = structlog.get_logger(__name__)


class Watchdog:
    """Checks all sessions at intervals. Each move of a session without progress doubles the time until the next.

    Without another target no session is moved, as its own may still progress. After `timeout_s` more it fails, if its
    target reports progress at all.
    """

    def __init__(
        self,
        *,
        sessions: SessionTable,
        fleet: Fleet,
        moves: TargetMoves,
        slow: SlowTargets,
        stall_s: float,
        timeout_s: float,
    ) -> None:
        """Watch nothing yet.

        Args:
            sessions: all sessions.
            fleet: knows other targets.
            moves: moves sessions.
            slow: finds sessions that progress too slowly.
            stall_s: seconds without progress before a session moves; see `CoordinatorSettings.session_stall_s`.
            timeout_s: seconds more after which a session without another target fails.
        """
        self._sessions = sessions
        self._fleet = fleet
        self._moves = moves
        self._slow = slow
        self._stall_s = stall_s
        self._timeout_s = timeout_s
        self._interval_s = min(_LONGEST_LOOK_S, self._stall_s / _LOOKS)
        self._due_s: float | None = None
        """Monotonic time of the next look."""

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        self._due_s = time.monotonic() + self._interval_s
        while True:
            await asyncio.sleep(self._interval_s)
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """Move stalled sessions. `run` calls it at intervals: a late call shows a standstill of this process."""
        late_s = 0.0 if self._due_s is None else now_s - self._due_s
        self._due_s = now_s + self._interval_s
        if late_s >= _STANDSTILL_S:
            self._forgive(late_s, now_s)
        self._slow.keep(self._sessions)
        in_parts((session.position, partial(self._look_at, session, now_s)) for session in self._sessions)

    def _look_at(self, session: Session, now_s: float) -> None:
        try:
            if session.finish is None:
                self._judge(session, now_s)
        except Exception as error:  # the other sessions must be watched all the same
            _log.error("watchdog_fault", **session.log_fields, exc_info=error)

    def _judge(self, session: Session, now_s: float) -> None:
        side = session.target
        host = side.host
        is_starved = session.position >= side.credit_position or side.waits_for_prompt_credit
        if host is None or not side.is_open or not host.is_up or is_starved:
            self._slow.waits(session)
            return
        grown = 2 ** min(side.num_stalls, _MOST_DOUBLINGS)
        bound_s = self._stall_s * grown * (1 if host.tells_progress else _UNTOLD_FACTOR)
        if now_s - side.heard_s >= bound_s:
            self._stalled(session, host, now_s - side.heard_s, bound_s)
        elif side.queued_s is not None and now_s - side.queued_s >= _QUEUED_S * grown:
            self._queued(session, host)
        elif (faster := self._slow.faster(session, host, now_s)) is not None:
            _log.info("session_slow", **session.log_fields, target=host.address, faster=faster.address)
            self._moves.move(session, faster)

    def _forgive(self, late_s: float, now_s: float) -> None:
        _log.warning("stood_still", late_s=round(late_s, 1))
        for session in self._sessions:
            session.target.pardon(late_s, now_s)
            session.drafting.pardon(late_s, now_s)

    def _stalled(self, session: Session, host: TargetHost, silent_s: float, bound_s: float) -> None:
        other = self._fleet.find_target(session.request, besides=host, only_ready=True)
        if other is not None:
            _log.warning("session_stalled", **session.log_fields, target=host.address, silent_s=round(silent_s, 1))
            session.request.trace.session_failed("target", session.choice, host.address, "SESSION_STALLED")
            session.target.num_stalls += 1
            session.target.is_doubtful = True
            self._fleet.failed(host)
            self._moves.move(session, other)
        elif host.tells_progress and silent_s >= bound_s + self._timeout_s:
            cause = f"target {host.address} made no progress for {silent_s:.0f} s"
            self._moves.give_up_session(session, Unavailable(cause, reason="TARGET_STALLED"))

    def _queued(self, session: Session, host: TargetHost) -> None:
        idle = self._fleet.find_idle(session.request, besides=host)
        if idle is not None:
            session.target.num_stalls += 1
            self._moves.move(session, idle)
