"""Proposed tokens as a tree below the last committed token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import lt

from specdec.engine.errors import TreeError

ROOT = -1
"""The parent of nodes directly below the last committed token."""

MAX_TREE_NODES = 64
"""Greatest number of nodes of a proposal, or of a sequence's step."""


def check_tree(
    token_ids: Sequence[int], parents: Sequence[int], vocab_size: int, max_nodes: int = MAX_TREE_NODES
) -> None:
    """Check a tree from a message.

    Raises:
        TreeError: too many nodes, lists of unequal length, an id outside the vocabulary, or a parent that does not come
            before its child.
    """
    if len(token_ids) > max_nodes:
        raise TreeError("token_ids", f"{len(token_ids)} nodes, at most {max_nodes} allowed")
    if len(parents) != len(token_ids):
        raise TreeError("parents", f"{len(parents)} parents for {len(token_ids)} tokens")
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size and _come_before(parents)):
        return  # fast checks in C; the loop below finds the fault
    for index, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise TreeError(f"token_ids[{index}]", f"{token} is outside the vocabulary of {vocab_size}")
        if not ROOT <= parent < index:
            raise TreeError(f"parents[{index}]", f"{parent} does not come before node {index}")


def _come_before(parents: Sequence[int]) -> bool:
    return min(parents) >= ROOT and all(map(lt, parents, range(len(parents))))


class TokenTree:
    """Proposed tokens in topological order: a parent comes before its children, so any prefix of the nodes is a tree.

    Node ``i`` has token ``token_ids[i]`` and parent ``parents[i]``, which is ``ROOT`` or less than ``i``.
    Depth counts from 1.
    """

    __slots__ = ("depths", "num_in_place", "parents", "token_ids")

    def __init__(self, token_ids: Iterable[int] = (), parents: Iterable[int] | None = None) -> None:
        """Build from lists that pass `check_tree`; without parents, a chain.

        Equal children of one parent stay separate nodes (`child` finds the first); `add` returns an existing one.
        """
        self.token_ids = list(token_ids)
        self.parents = list(range(-1, len(self.token_ids) - 1) if parents is None else parents)
        num_in_place = 0
        for parent in self.parents:
            if parent != num_in_place - 1:
                break
            num_in_place += 1
        self.depths = depths = list(range(1, num_in_place + 1))
        for parent in self.parents[num_in_place:]:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        self.num_in_place = num_in_place
        """Number of leading nodes that form a chain, whose slots are those of the tokens if accepted."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"TokenTree(token_ids={self.token_ids}, parents={self.parents})"

    @property
    def is_chain(self) -> bool:
        """Whether every node is a child of the one before it."""
        return self.num_in_place == len(self.token_ids)

    @property
    def is_chain_first(self) -> bool:
        """Whether the chain of first children comes before all other nodes."""
        return self.num_in_place - 1 not in self.parents[self.num_in_place :]

    def depth(self, node: int) -> int:
        """Depth of a node, 1 below the last committed token; 0 for `ROOT`."""
        return self.depths[node] if node >= 0 else 0

    def path(self, node: int) -> list[int]:
        """Nodes from depth 1 down to `node`; empty for `ROOT`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def child(self, parent: int, token_id: int) -> int | None:
        """The child of `parent` (or `ROOT`) with `token_id`, or None."""
        token_ids, node = self.token_ids, parent + 1
        if node < len(token_ids) and token_ids[node] == token_id and self.parents[node] == parent:
            return node  # in a chain the child is the next node
        node = -1
        for _ in range(token_ids.count(token_id)):
            node = token_ids.index(token_id, node + 1)
            if self.parents[node] == parent:
                return node
        return None

    def add(self, parent: int, token_id: int) -> int:
        """Add a token below `parent`, unless an equal child exists. Returns its node.

        Raises:
            TreeError: there is no such parent.
        """
        if not ROOT <= parent < len(self.token_ids):
            raise TreeError("parent", f"no node {parent} in a tree of {len(self.token_ids)}")
        existing = self.child(parent, token_id)
        return self._append(parent, token_id) if existing is None else existing

    @property
    def is_set(self) -> bool:
        """Whether children of one parent have different tokens."""
        num_nodes = len(self.token_ids)
        if len(set(self.token_ids)) == num_nodes:
            return True
        # Numbers, unlike pairs, are no objects that garbage collections walk.
        pairs = {parent << 32 | token for parent, token in zip(self.parents, self.token_ids, strict=True)}
        return len(pairs) == num_nodes

    def subtree(self, root: int) -> tuple[TokenTree, list[int]]:
        """The tree below `root`, with `ROOT` in its place, and the index in this one of each of its nodes."""
        kept: list[int] = []
        places = {root: ROOT}
        parents: list[int] = []
        for node, parent in enumerate(self.parents[root + 1 :], root + 1):
            above = places.get(parent)
            if above is not None:
                places[node] = len(kept)
                kept.append(node)
                parents.append(above)
        return TokenTree([self.token_ids[node] for node in kept], parents), kept

    def check_path(self, nodes: Sequence[int]) -> None:
        """Check that `nodes` are a path from a child of `ROOT`.

        Raises:
            TreeError: a node does not exist, or is no child of the one before it.
        """
        above = ROOT
        for node in nodes:
            if not 0 <= node < len(self.token_ids) or self.parents[node] != above:
                raise TreeError("nodes", f"{list(nodes)}: node {node} is no child of {above}")
            above = node

    def _append(self, parent: int, token_id: int) -> int:
        node = len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        if parent == node - 1 == self.num_in_place - 1:
            self.num_in_place += 1
        return node


NO_TREE = TokenTree()
"""A tree without nodes, shared by all who have none: nothing may be added to it."""
