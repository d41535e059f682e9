"""Joins the drafters' offers in one proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafting.interface import ROOT, GrowingOffer, Offer, Room
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Named:
    """An offer with the names of its drafters."""

    offer: Offer
    drafters: Sequence[str]
    """[N] The drafter that offered each node."""


def named(offer: Offer, drafter: str) -> Named:
    """An offer of one drafter."""
    return Named(offer, [drafter] * len(offer.token_ids))


def merged(offers: Sequence[Named], room: Room) -> Named | None:
    """All offers as one tree. Equal tokens below one parent become one node, which keeps the earlier offer's name.

    Returns None if no offer has a node.
    """
    growing = GrowingOffer(room)
    drafters: list[str] = []
    for each in offers:
        offer, places = each.offer, list[int | None]()
        for index, (token, parent, score) in enumerate(zip(offer.token_ids, offer.parents, offer.scores, strict=True)):
            above = ROOT if parent < 0 else places[parent]
            place = None if above is None else growing.add(above, token, score)
            if place == len(drafters):
                drafters.append(each.drafters[index])
            places.append(place)
    done = growing.done()
    return None if done is None else Named(done, drafters)


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


def make_proposal(num_committed: int, found: Named | None, *, is_chain: bool, is_complete: bool) -> pb.Proposal:
    """A tree below the last committed token or, with `is_chain`, a chain of point masses.

    Without an offer the proposal has no nodes. `is_complete`: no better proposal will come before the next commit.
    """
    if found is None:
        return pb.Proposal(start_position=num_committed, draws_afresh=is_chain, is_complete=is_complete)
    offer, names = found.offer, list(dict.fromkeys(found.drafters))
    proposal = pb.Proposal(
        start_position=num_committed,
        token_ids=offer.token_ids,
        path_length=_depth(offer),
        drafters=names,
        proposed_by=bytes(map(names.index, found.drafters)),
        is_complete=is_complete,
    )
    if is_chain:
        proposal.distributions.extend(pb.SparseDistribution(token_ids=[t], probs=[1.0]) for t in offer.token_ids)
        proposal.draws_afresh = True  # point masses need no noise
    else:
        proposal.parents.extend(offer.parents)
        proposal.scores = bytes(round(255 * min(1.0, max(0.0, score))) for score in offer.scores)
    return proposal


def _depth(offer: Offer) -> int:
    depths: list[int] = []
    for parent in offer.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)
