"""What a session drafted as a proposal: a chain of the target's tokens."""

from __future__ import annotations

from itertools import islice

from specdec.drafting.text.session import TextSession
from specdec.replica.worker.clamping import uint32
from specdec.v1 import common_pb2 as pb


def make_proposal(session: TextSession, *, is_complete: bool) -> pb.Proposal:
    """All tokens that can be told, maybe none. `is_complete`: no more will come before a commit."""
    token_ids = session.proposed
    proposal = pb.Proposal(
        start_position=session.num_committed,
        token_ids=token_ids,
        path_length=len(token_ids),
        draft_us=uint32(sum(session.times_us)),
        is_complete=is_complete,
    )
    if session.is_rejection:
        proposal.distributions.extend(pb.SparseDistribution(token_ids=[token], probs=[1.0]) for token in token_ids)
        proposal.draws_afresh = True
    else:
        scores = islice(session.token_scores(), len(token_ids))
        proposal.scores = bytes(round(255 * min(1.0, max(0.0, score))) for score in scores)
    return proposal
