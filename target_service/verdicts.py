"""A target's reports to a session's owner: verdicts, and progress while there is no verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from specdec.target_service.records.step_record import DrafterStep, Taken
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.speculation_tree import Hung
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import frame_slices, microseconds, uint32

FORCED = "forced"
"""Name in place of a drafter's for forced tokens."""
_TOKEN_BYTES = 32
"""Bytes of a token's id, origin and drafter."""
_STATISTICS_BYTES = 6144
"""Bytes of a verdict without tokens and log-probabilities: counts of 64 depths, a tree of 64 nodes, drafters, times."""
PROGRESS_INTERVAL_S = 1.0
"""Seconds without a verdict or a progress message after which a session's owner gets a progress message."""


def make_verdict(decision: Decision, taken: Taken) -> pb.Verdict:
    """The verdict of a decision. A session's first verdict includes the prompt's log-probabilities, unless the owner
    takes them in parts.
    """
    candidate, walk = decision.candidate, decision.walk
    session = candidate.session
    verdict = pb.Verdict(  # fields without a value are not named: each would take a tenth of the time
        start_position=taken.start,
        token_ids=walk.token_ids,
        origins=walk.origins,
        verified_by_depth=depths_of(candidate.tree.depths[: candidate.num_nodes]),
        num_accepted=len(walk.path),
        hit=taken.state is SessionState.HIT,
        step_us=microseconds(taken.elapsed_s),
    )
    if taken.tree.draft_us:
        verdict.draft_us = uint32(taken.tree.draft_us)
    if taken.held_s:
        verdict.hold_off_us = microseconds(taken.held_s)
    if taken.num_wasted:
        verdict.num_wasted = uint32(taken.num_wasted)
    if taken.suspends_draft:
        verdict.suspends_draft = True
    if decision.logprobs:
        verdict.logprobs.extend(decision.logprobs)
    if walk.finish_reason:
        verdict.finish_reason = walk.finish_reason
        if walk.stop_token_id is not None:
            verdict.stop_token_id = walk.stop_token_id
    if session.body.tells_trees and taken.tree.nodes:
        verdict.tree.CopyFrom(tree_of(decision, taken.tree))
    if taken.state is SessionState.PREFILL:
        _describe_prefill(session, verdict, taken.began_at_s + taken.elapsed_s)
    return verdict


def tree_of(decision: Decision, tree: Hung) -> pb.StepTree:
    """The session's tree at the step, which is not empty."""
    candidate = decision.candidate
    proposed_by = [FORCED if node.is_forced else node.origin for node in tree.nodes]
    drafters = list(dict.fromkeys(proposed_by))
    return pb.StepTree(
        token_ids=tree.tokens.token_ids,
        parents=tree.tokens.parents,
        scores=bytes(round(min(1.0, max(0.0, node.score)) * 255) for node in tree.nodes),
        verified=candidate.chosen[: candidate.num_nodes],
        logprobs=decision.node_logprobs,
        accepted=decision.accepted,
        drafters=drafters,
        proposed_by=bytes(map(drafters.index, proposed_by)),
    )


def describe_drafters(verdict: pb.Verdict, accepted_by: Sequence[str], drafters: Sequence[DrafterStep]) -> None:
    """Add to a verdict the sources of accepted tokens, and the records of the target's drafters."""
    verdict.accepted_by.extend(accepted_by)
    for step in drafters:
        verdict.drafters.add(
            name=step.name,
            num_proposed=step.num_proposed,
            num_verified=step.num_verified,
            num_accepted=step.num_accepted,
            cost_us=microseconds(step.elapsed_s),
        )


def pieces_of(verdict: pb.Verdict, most_bytes: int) -> list[pb.Verdict]:
    """Split a verdict with log-probabilities if it has more than `most_bytes` bytes; else it is the only piece.

    Each piece has its own start position, so that it can be resent alone; the last one has the step's statistics.
    """
    if verdict.ByteSize() <= most_bytes:
        return [verdict]
    sizes = [position.ByteSize() + _TOKEN_BYTES for position in verdict.logprobs]
    *before, rest = frame_slices(sizes, max(1, most_bytes - _STATISTICS_BYTES))
    pieces = [
        pb.Verdict(
            start_position=verdict.start_position + piece.start,
            token_ids=verdict.token_ids[piece],
            origins=verdict.origins[piece],
            logprobs=verdict.logprobs[piece],
            is_partial=True,
            suspends_draft=verdict.suspends_draft,
            accepted_by=_names_of(verdict, piece),
        )
        for piece in before
    ]
    last = pb.Verdict()
    last.CopyFrom(verdict)
    last.start_position += rest.start
    last.accepted_by[:] = _names_of(verdict, rest)
    for of_tokens in (last.token_ids, last.origins, last.logprobs):
        del of_tokens[: rest.start]
    return [*pieces, last]


def _names_of(verdict: pb.Verdict, piece: slice) -> Sequence[str]:
    """Sources of a piece's tokens of origin DRAFT: `accepted_by` has names for these only."""
    before, among = (list(verdict.origins[part]).count(pb.ORIGIN_DRAFT) for part in (slice(piece.start), piece))
    return verdict.accepted_by[before : before + among]


def depths_of(tree_depths: Sequence[int]) -> list[int]:
    """Number of nodes at depth 1, 2, ..."""
    counts = [0] * max(tree_depths, default=0)
    for depth in tree_depths:
        counts[depth - 1] += 1
    return counts


def end_position(verdict: pb.Verdict) -> int:
    """Position after the last token of a verdict."""
    return int(verdict.start_position) + len(verdict.token_ids)


def _describe_prefill(session: TargetSession, verdict: pb.Verdict, decided_at_s: float) -> None:
    opened_at_s = session.times.opened_at_s
    first_step_at_s = session.times.first_step_at_s or opened_at_s
    verdict.queue_us = microseconds(first_step_at_s - opened_at_s)
    verdict.prefill_us = microseconds(decided_at_s - first_step_at_s)
    verdict.num_cached_tokens = session.seq.num_cached_tokens
    if session.prompt_logprobs is not None:
        verdict.prompt_logprobs.extend(session.prompt_logprobs.take_whole())


def due_for_progress(sessions: Iterable[TargetSession], now_s: float) -> Iterator[TargetSession]:
    """Sessions whose owners get a progress message now (`now_s` of time.monotonic); yielding marks them as sent."""
    for session in sessions:
        times = session.times
        last_s = max(times.opened_at_s, times.last_verdict_at_s or 0.0, times.told_at_s)
        if now_s - last_s >= PROGRESS_INTERVAL_S and session.orphaned_at_s is None:
            times.told_at_s = now_s
            yield session


def describe_progress(session: TargetSession) -> pb.SessionProgress:
    """Progress of a session: queued without a sequence or blocks, or while it steps apart; paused without credit; else
    running."""
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
