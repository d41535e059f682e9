"""What a draft offers below a row's tokens, and the likeliest chain in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MAX_PROPOSAL_BYTES

MOST_NODES = 64
"""Nodes of a proposal, at most, as at targets."""
_ROOT = -1


class BadOffer(Exception):
    """A proposal that no sound draft sends."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tree of tokens below the first `start` tokens of a row."""

    start: int
    tokens: Sequence[int]
    children: Sequence[Sequence[int]]
    """Nodes below each node, the likeliest first; those below the root are last."""
    is_complete: bool
    """The draft adds nothing before the next commit."""

    def chain(self, following: Sequence[int], most: int) -> list[int] | None:
        """The likeliest continuation after the tokens `following` from `start` on; None if the tree lacks these."""
        node = _ROOT
        for token in following:
            for child in self.children[node]:
                if self.tokens[child] == token:
                    node = child
                    break
            else:
                return None
        found: list[int] = []
        while len(found) < most and self.children[node]:
            node = self.children[node][0]
            found.append(self.tokens[node])
        return found


def read_offer(encoded: bytes, vocab_size: int) -> Offer:
    """An encoded Proposal. Raises BadOffer."""
    if len(encoded) > MAX_PROPOSAL_BYTES:
        raise BadOffer(f"{len(encoded)} bytes")
    try:
        proposal = pb.Proposal.FromString(encoded)
    except DecodeError:
        raise BadOffer("does not parse") from None
    tokens, parents, scores = list(proposal.token_ids), list(proposal.parents), proposal.scores
    if len(tokens) > MOST_NODES:
        raise BadOffer(f"{len(tokens)} nodes")
    if tokens and max(tokens) >= vocab_size:
        raise BadOffer(f"token {max(tokens)} of a vocabulary of {vocab_size}")
    if not parents:
        parents = list(range(_ROOT, len(tokens) - 1))
    if len(parents) != len(tokens) or any(not _ROOT <= parent < node for node, parent in enumerate(parents)):
        raise BadOffer("its parents are no tree")
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)
    if len(scores) == len(tokens):
        for below in children:
            below.sort(key=lambda node: -scores[node])
    return Offer(proposal.start_position, tokens, children, proposal.is_complete)
