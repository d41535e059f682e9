"""Grows a tree level by level (EAGLE-2, arXiv:2406.16858).

A node's value is the product of the scores on its path. The best `top_k` nodes of a level get `top_k` children each; at
the end the best nodes of all levels remain. As no child has a higher value than its parent, they form a tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.drafting.heads.drawing import Choices
from specdec.drafting.interface import Offer, Room


@dataclass(slots=True)
class GrownNode:
    """A candidate token."""

    parent: int
    token_id: int
    score: float
    value: float
    path: tuple[int, ...]
    """Tokens from the root to this node."""


@dataclass(slots=True)
class GrowingTree:
    """One session's tree."""

    room: Room
    top_k: int
    """Number of children per node, and of nodes per level that get children."""
    nodes: list[GrownNode] = field(default_factory=list)
    beam: list[int] = field(default_factory=list)
    """Nodes of the last level that get children."""

    def __post_init__(self) -> None:
        self.beam = [-1]

    @property
    def depth(self) -> int:
        """Depth of the beam's nodes; 0 at the root."""
        return 0 if self.beam == [-1] else len(self.nodes[self.beam[0]].path) if self.beam else self.room.depth

    @property
    def grows(self) -> bool:
        """Whether another level can be added."""
        return bool(self.beam) and self.depth < self.room.depth

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root to a node; empty for -1."""
        return () if node < 0 else self.nodes[node].path

    def add_level(self, choices: list[Choices]) -> None:
        """Add the children of each node of the beam, in the beam's order."""
        first = len(self.nodes)
        for parent, found in zip(self.beam, choices, strict=True):
            value = 1.0 if parent < 0 else self.nodes[parent].value
            path = self.path(parent)
            for token, score in found[: self.top_k]:
                self.nodes.append(GrownNode(parent, token, score, value * score, (*path, token)))
        level = sorted(range(first, len(self.nodes)), key=lambda node: (-self.nodes[node].value, node))
        self.beam = sorted(level[: self.top_k])

    def offer(self) -> Offer | None:
        """The best nodes, parents before children; None if there are none."""
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
