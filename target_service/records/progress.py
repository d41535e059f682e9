"""What a session without a verdict is doing, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb

PROGRESS_INTERVAL_S = 1.0
"""Without a verdict for so long, a session's owner is told; then each time after as long again."""


def due_for_progress(sessions: Iterable[TargetSession], now_s: float) -> Iterator[TargetSession]:
    """Sessions whose owners are to be told now, by time.monotonic: they count as told."""
    for session in sessions:
        times = session.times
        last_s = max(times.opened_at_s, times.last_verdict_at_s or 0.0, times.told_at_s)
        if now_s - last_s >= PROGRESS_INTERVAL_S and session.orphaned_at_s is None:
            times.told_at_s = now_s
            yield session


def describe_progress(session: TargetSession) -> pb.SessionProgress:
    """Queued before its first step, without blocks, or for turns of its own; paused without credit; else running."""
    states = pb.SessionProgress
    if not session.has_seq:
        return pb.SessionProgress(state=states.STATE_QUEUED)
    seq = session.seq
    if seq.paused:
        state = states.STATE_PAUSED
    else:
        is_waiting = not seq.block_ids or session.num_tokens < session.apart_until
        state = states.STATE_QUEUED if is_waiting else states.STATE_RUNNING
    return pb.SessionProgress(state=state, num_computed_tokens=seq.num_computed_tokens)
