"""How trees of several sessions grow level by level (EAGLE-2, arXiv:2406.16858).

A node's value is the product of the estimates on its path. Of each level the best `top_k` nodes go on, each with
`top_k` children; at the end the best nodes of all levels stay. A parent is worth no less than its child, so they form a
tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.drafting.heads.drawing import Choices
from specdec.drafting.interface import Offer, Room


@dataclass(slots=True)
class GrownNode:
    """A token under consideration."""

    parent: int
    token_id: int
    score: float
    value: float
    path: tuple[int, ...]
    """Tokens from the root down, its own last."""


@dataclass(slots=True)
class GrowingTree:
    """One session's tree."""

    room: Room
    top_k: int
    """Of children and of nodes of a level that go on."""
    nodes: list[GrownNode] = field(default_factory=list)
    beam: list[int] = field(default_factory=list)
    """Nodes of the last level that go on."""

    def __post_init__(self) -> None:
        self.beam = [-1]

    @property
    def depth(self) -> int:
        """Of the nodes that go on; 0 at the root."""
        return 0 if self.beam == [-1] else len(self.nodes[self.beam[0]].path) if self.beam else self.room.depth

    @property
    def grows(self) -> bool:
        """Whether there is a level to come."""
        return bool(self.beam) and self.depth < self.room.depth

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root down to a node; none for -1."""
        return () if node < 0 else self.nodes[node].path

    def add_level(self, choices: list[Choices]) -> None:
        """The children of each node of the beam, in its order."""
        first = len(self.nodes)
        for parent, found in zip(self.beam, choices, strict=True):
            value = 1.0 if parent < 0 else self.nodes[parent].value
            path = self.path(parent)
            for token, score in found[: self.top_k]:
                self.nodes.append(GrownNode(parent, token, score, value * score, (*path, token)))
        level = sorted(range(first, len(self.nodes)), key=lambda node: (-self.nodes[node].value, node))
        self.beam = sorted(level[: self.top_k])

    def offer(self) -> Offer | None:
        """The best nodes, parents before children; None without any."""
        best = sorted(range(len(self.nodes)), key=lambda node: (-self.nodes[node].value, node))[: self.room.num_nodes]
        places = {-1: -1}
        offer = Offer([], [], [])
        for node in sorted(best):
            grown = self.nodes[node]
            places[node] = len(offer.token_ids)
            offer.token_ids.append(grown.token_id)
            offer.parents.append(places[grown.parent])
            offer.scores.append(grown.score)
        return offer if offer.token_ids else None
