"""What drafters offer as one proposal."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.growing import ROOT, GrowingOffer
from specdec.drafters.interface import Offer, Room
from specdec.v1 import common_pb2 as pb


def merged(offers: Sequence[Offer], room: Room) -> Offer | None:
    """One tree of all offers, those of the first first: equal children of one parent are one node."""
    growing = GrowingOffer(room)
    for offer in offers:
        places: list[int | None] = []
        for token, parent, score in zip(offer.token_ids, offer.parents, offer.scores, strict=True):
            above = ROOT if parent < 0 else places[parent]
            places.append(None if above is None else growing.add(above, token, score))
    return growing.done()


def main_chain(offer: Offer) -> Offer:
    """The first path from the root down."""
    tokens: list[int] = []
    scores: list[float] = []
    node = ROOT
    for index, parent in enumerate(offer.parents):
        if parent == node:
            node = index
            tokens.append(offer.token_ids[index])
            scores.append(offer.scores[index])
    return Offer(tokens, list(range(-1, len(tokens) - 1)), scores)


def make_proposal(num_committed: int, offer: Offer | None, *, is_chain: bool) -> pb.Proposal:
    """A tree below the last committed token, or a chain of point masses. No offer: a proposal without nodes.

    One without nodes says that nothing comes to mind, so that nobody waits.
    """
    if offer is None:
        return pb.Proposal(start_position=num_committed, draws_afresh=is_chain)
    proposal = pb.Proposal(start_position=num_committed, token_ids=offer.token_ids, path_length=_depth(offer))
    if is_chain:
        proposal.distributions.extend(pb.SparseDistribution(token_ids=[t], probs=[1.0]) for t in offer.token_ids)
        proposal.draws_afresh = True  # nothing is drawn at all
    else:
        proposal.parents.extend(offer.parents)
        proposal.scores = bytes(round(255 * min(1.0, max(0.0, score))) for score in offer.scores)
    return proposal


def _depth(offer: Offer) -> int:
    depths: list[int] = []
    for parent in offer.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)
