"""An offer under construction: equal children of one parent are one node."""

from __future__ import annotations

from specdec.drafting.interface import Offer, Room

ROOT = -1


class GrowingOffer:
    """Nodes are added until there is no more room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether no node can be added."""
        return len(self._token_ids) >= self._room.num_nodes

    def add(self, parent: int, token_id: int, score: float) -> int | None:
        """The node of a token below `parent`, there already or new; None where there is no room for it."""
        node = self._children.get((parent, token_id))
        if node is not None:
            return node
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        if self.is_full or depth > self._room.depth:
            return None
        node = self._children[parent, token_id] = len(self._token_ids)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._scores.append(score)
        self._depths.append(depth)
        return node

    def done(self) -> Offer | None:
        """The offer; None if it is empty."""
        return Offer(self._token_ids, self._parents, self._scores) if self._token_ids else None
