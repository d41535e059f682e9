"""What a session without a verdict is doing, for whoever waits for it."""

from __future__ import annotations

from specdec.v1 import common_pb2 as pb
from target_service.session import TargetSession

PROGRESS_INTERVAL_S = 1.0
"""Without a verdict for so long, a session's owner is told; then each time after as long again."""


def describe_progress(session: TargetSession) -> pb.SessionProgress:
    """Queued before its first step or without blocks, paused without credit, else running."""
    states = pb.SessionProgress
    if not session.has_seq:
        return pb.SessionProgress(state=states.STATE_QUEUED)
    seq = session.seq
    if seq.paused:
        state = states.STATE_PAUSED
    else:
        state = states.STATE_RUNNING if seq.block_ids else states.STATE_QUEUED
    return pb.SessionProgress(state=state, num_computed_tokens=seq.num_computed_tokens)
