"""Trees from heads that compute all depths at once: the likeliest paths through each depth's choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.drafting.heads.drawing import Choices, after, choose
from specdec.drafting.heads.growth import GrowingTree
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.interface import Offer
from specdec.engine.sampling.sampler import Sampler


def draw_slots(sampler: Sampler, logits: torch.Tensor, asks: Sequence[HeadAsk], top_k: int) -> list[Offer | None]:
    """Each session's tree of likeliest paths, from logits [sessions, depths, V] float32 over the target's tokens.

    Penalties of a depth assume the best path above it, for all of its nodes.
    """
    slots = choose_slots(sampler, logits, asks, top_k)
    offers: list[Offer | None] = []
    for ask, found in zip(asks, slots, strict=True):
        tree = GrowingTree(ask.room, 1 if ask.is_chain else top_k)
        for choices in found:
            if not tree.grows:
                break
            tree.add_level([choices] * len(tree.beam))
        offers.append(tree.offer())
    return offers


def choose_slots(sampler: Sampler, logits: torch.Tensor, asks: Sequence[HeadAsk], top_k: int) -> list[list[Choices]]:
    """The best tokens by session and depth; a session ends at the first depth without any."""
    found: list[list[Choices]] = [[] for _ in asks]
    paths: list[tuple[int, ...]] = [()] * len(asks)
    going = list(range(len(asks)))
    for depth in range(logits.shape[1]):
        going = [i for i in going if depth < asks[i].room.depth]
        if not going:
            break
        rows = [after(asks[i].row, paths[i]) for i in going]
        drawn = choose(sampler, logits[going, depth], rows, top_k)
        for i, choices in zip(going, drawn, strict=True):
            if choices:
                found[i].append(choices)
                paths[i] = (*paths[i], choices[0][0])
        going = [i for i, choices in zip(going, drawn, strict=True) if choices]
    return found
