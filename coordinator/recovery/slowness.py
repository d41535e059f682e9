"""Sessions whose target steps them far more slowly than an idle one would, as on a host that lacks processors.

Their target is neither silent nor stalled, so nothing else moves them. The session's own rate of tokens is compared
with the step time that the idle target reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.sessions.session import Session, TargetHost

_WINDOW_S = 3.0
"""Seconds over which a session's rate is measured; it doubles with each move."""
_LEAST_GAIN = 4.0
"""Factor by which the other target must be faster: its report knows neither its drafts nor this session's."""
_LEAST_SAVED_S = 5.0
"""Seconds by which the session must be done sooner."""
_PROMPT_TOKENS_PER_STEP = 64
"""Tokens that the other target computes again in the time of a step, at least."""
_MOST_DOUBLINGS = 6


@dataclass(slots=True)
class _Measured:
    """A session's position at a time, at one opening."""

    epoch: int
    position: int
    since_s: float
    num_moves: int = 0


class SlowTargets:
    """Measures sessions, and finds faster targets for them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._measured: dict[str, _Measured] = {}

    def keep(self, sessions: Iterable[Session]) -> None:
        """Forget sessions that have ended."""
        running = {session.session_id for session in sessions}
        self._measured = {key: known for key, known in self._measured.items() if key in running}

    def waits(self, session: Session) -> None:
        """The session waits for its client: the time does not count."""
        if (known := self._measured.get(session.session_id)) is not None:
            known.epoch = -1

    def faster(self, session: Session, host: TargetHost, now_s: float) -> TargetLink | None:
        """An idle target where the session would be done much sooner; it is counted as a move. None: it stays."""
        position = session.position
        known = self._measured.setdefault(session.session_id, _Measured(-1, position, now_s))
        if known.epoch != session.target.epoch:
            known.epoch, known.position, known.since_s = session.target.epoch, position, now_s
            return None
        elapsed_s = now_s - known.since_s
        if elapsed_s < _WINDOW_S * 2**known.num_moves:
            return None
        num_new, known.position, known.since_s = position - known.position, position, now_s
        idle = self._fleet.find_idle(session.request, besides=host)
        if idle is None or idle.load is None or not idle.load.step_us or num_new <= 0:
            return None
        num_left = session.sampling.max_tokens - (position - session.num_prompt_tokens)
        step_s, token_s = idle.load.step_us * 1e-6, elapsed_s / num_new
        there_s = step_s * (num_left + position / _PROMPT_TOKENS_PER_STEP)
        if token_s < _LEAST_GAIN * step_s or token_s * num_left < there_s + _LEAST_SAVED_S:
            return None
        known.num_moves = min(known.num_moves + 1, _MOST_DOUBLINGS)
        return idle
