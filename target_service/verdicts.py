"""What a target tells of a decision: the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.v1 import common_pb2 as pb
from specdec.worker.clamping import microseconds, uint32
from target_service.decide import Decision
from target_service.session import SessionState, TargetSession


def make_verdict(decision: Decision, began_at_s: float, elapsed_s: float, held_s: float, num_wasted: int) -> pb.Verdict:
    """Describe a decision, before the session has taken its tokens. A first one takes the prompt's log-probabilities
    along.

    Args:
        decision: what the step decided for the session.
        began_at_s: when the step began.
        elapsed_s: how long it took.
        held_s: how long it was held off for this session's draft.
        num_wasted: proposed tokens that are of no use any more.
    """
    candidate, walk = decision.candidate, decision.walk
    session = candidate.session
    verdict = pb.Verdict(
        start_position=session.num_tokens,
        token_ids=walk.token_ids,
        origins=walk.origins,
        logprobs=decision.logprobs,
        finish_reason=walk.finish_reason,
        stop_token_id=walk.stop_token_id,
        verified_by_depth=depths_of(candidate.tree.depths[: candidate.num_nodes]),
        num_accepted=len(walk.path),
        hit=session.state is SessionState.HIT,
        step_us=microseconds(elapsed_s),
        hold_off_us=microseconds(held_s),
        draft_us=uint32(session.tree.draft_us),
        num_wasted=uint32(num_wasted),
    )
    if session.state is SessionState.PREFILL:
        _describe_prefill(session, verdict, began_at_s + elapsed_s)
    return verdict


def depths_of(tree_depths: Sequence[int]) -> list[int]:
    """Number of nodes at depth 1, 2, ..."""
    counts = [0] * max(tree_depths, default=0)
    for depth in tree_depths:
        counts[depth - 1] += 1
    return counts


def end_position(verdict: pb.Verdict) -> int:
    """Position after a verdict's last token."""
    return int(verdict.start_position) + len(verdict.token_ids)


def _describe_prefill(session: TargetSession, verdict: pb.Verdict, decided_at_s: float) -> None:
    opened_at_s = session.times.opened_at_s
    first_step_at_s = session.times.first_step_at_s or opened_at_s
    verdict.queue_us = microseconds(first_step_at_s - opened_at_s)
    verdict.prefill_us = microseconds(decided_at_s - first_step_at_s)
    verdict.num_cached_tokens = session.seq.num_cached_tokens
    verdict.prompt_logprobs.extend(session.prompt_logprobs)
    session.prompt_logprobs = []
