"""A session's chain, with the runners-up beside it, as a proposal."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.session import DraftedToken
from specdec.engine.tree import ROOT
from specdec.v1 import common_pb2 as pb


def coupled_proposal(start_position: int, chain: Sequence[DraftedToken], max_nodes: int) -> pb.Proposal:
    """The chain first, so that its KV is in place once accepted; then the runners-up, nearest the root first.

    Args:
        start_position: position of the chain's first token.
        chain: at most `max_nodes` tokens.
        max_nodes: most nodes of a proposal; runners-up that do not fit are left out.
    """
    token_ids = [token.token_id for token in chain]
    parents = list(range(ROOT, len(chain) - 1))
    scores = [token.score for token in chain]
    siblings = [(depth - 1, *sibling) for depth, token in enumerate(chain) for sibling in token.siblings]
    for parent, token_id, score in siblings[: max(0, max_nodes - len(chain))]:
        token_ids.append(token_id)
        parents.append(parent)
        scores.append(score)
    return pb.Proposal(
        start_position=start_position,
        token_ids=token_ids,
        parents=parents if len(token_ids) > len(chain) else (),
        scores=bytes(round(score * 255) for score in scores),
        draft_us=sum(token.draft_us for token in chain),
        path_length=len(chain),
    )


def rejection_proposal(start_position: int, chain: Sequence[DraftedToken]) -> pb.Proposal:
    """The chain, each token with the sparse distribution it was drawn from."""
    samples = [token.sample for token in chain if token.sample is not None]
    return pb.Proposal(
        start_position=start_position,
        token_ids=[sample.token_id for sample in samples],
        distributions=[pb.SparseDistribution(token_ids=sample.ids, probs=sample.probs) for sample in samples],
        draft_us=sum(token.draft_us for token in chain),
        path_length=len(chain),
    )
