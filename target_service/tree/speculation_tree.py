"""The tree of proposals that hangs from a session's last committed token.

Invariants: children of one node have different tokens; every node hangs, through its ancestors, from the last committed
token; a node is verified with the distribution of the proposal that brought it first. The tree is data only: it holds
no KV, and dropping nodes costs speed, never correctness.

Nodes come from several sources. A draft's nodes stay while they hang from the last committed token. The nodes of the
target's own drafters are *local*: they are dropped after each step, as drafters offer anew. A node that several sources
propose is one node, with a score of each.

Rejection verification takes one chain, of drawn tokens: where two proposals differ, the first one stays. With both,
neither token could be verified there, and whether a token is verified would depend on drawn tokens: the output would be
biased (`specdec.engine.sampling.rejection`). Beside a drawn token the tree may hold others that the target might commit
in its place, each with a chain below it. They were not drawn, and are never verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.errors import TreeError
from specdec.engine.tree import MAX_TREE_NODES, NO_TREE, ROOT, TokenTree, check_tree
from specdec.replica.worker.errors import invalid
from specdec.target_service.tree.proposed import Node, check_proposal, model_nodes, payloads
from specdec.v1 import common_pb2 as pb

_NOWHERE = -1
"""Place of a proposed node that is neither on the committed path nor below the root."""
_UNPLACED = 1 << 32
"""Place of a proposed node below the root for which the tree has no room."""


class Hung(NamedTuple):
    """The nodes of a tree and what was counted of them, before a step's tokens are committed. Nothing changes it."""

    tokens: TokenTree
    nodes: list[Node]
    has_offers: bool
    """See `SpeculationTree`, as for the other fields."""
    num_hung: dict[str, int]
    draft_us: int
    num_stale: int


@dataclass(slots=True)
class SpeculationTree:
    """Proposed tokens below the last committed one; `is_chain`: for rejection verification."""

    vocab_size: int
    is_chain: bool = False
    tokens: TokenTree = field(default_factory=TokenTree)
    nodes: list[Node] = field(default_factory=list)
    num_stale: int = 0
    """Proposed tokens that arrived too late or off the committed path, since the last verdict."""
    draft_us: int = 0
    """Microseconds of drafting the nodes on the deepest path, since the last verdict."""
    num_hung: dict[str, int] = field(default_factory=dict)
    """Number of nodes that drafts proposed first among drafts, by `Node.draft`, since the last verdict."""
    has_offers: bool = False
    """Whether the target's own drafters have offered nodes for the next step."""
    has_window: bool = False
    """Whether some nodes belong to a drafter's window, for the next step only."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def lasting_depth(self) -> int:
        """Depth of the deepest node that a draft has proposed; in a tree for rejection, of the chain to verify."""
        if not self.nodes:
            return 0
        if self.is_chain:
            above, depth = ROOT, 0
            for node, parent in enumerate(self.tokens.parents):
                if parent == above and self.nodes[node].is_drawn and not self.nodes[node].is_local:
                    above, depth = node, depth + 1
            return depth
        if not self.has_offers:
            return max(self.tokens.depths)
        depths = zip(self.tokens.depths, self.nodes, strict=True)
        return max([depth for depth, node in depths if node.source == DRAFT_MODEL], default=0)

    @property
    def is_local(self) -> bool:
        """Whether no draft has proposed any node."""
        return all(node.is_local for node in self.nodes) if self.has_offers else not self.nodes

    def merge(
        self, proposal: pb.Proposal, committed: list[int], nodes: tuple[list[int], list[int]] | None = None
    ) -> None:
        """Merge a draft's proposal: follow the tokens committed since its start, and add the nodes below them.

        Cost: linear in the proposal.

        Args:
            proposal: a proposal that starts at any committed position.
            committed: the session's committed tokens.
            nodes: result of `check`; None: it is checked here.

        Raises:
            SessionFailure: the proposal starts outside the committed tokens, is no tree, is too large, or holds an
                unknown id; or, in rejection mode, is no chain or lacks distributions.
        """
        num_committed = len(committed)
        if not 1 <= proposal.start_position <= num_committed:
            message = f"{proposal.start_position} is not within the {num_committed} committed tokens"
            raise invalid("proposal.start_position", message, expected_position=num_committed)
        token_ids, parents = nodes or self.check(proposal, num_committed)
        self._hang(proposal, token_ids, parents, committed[proposal.start_position :])

    def check(self, proposal: pb.Proposal, num_committed: int) -> tuple[list[int], list[int]]:
        """See `check_proposal`; the result is independent of what hangs here."""
        return check_proposal(proposal, num_committed, self.vocab_size, is_chain=self.is_chain)

    def hang(
        self,
        source: str,
        token_ids: list[int],
        parents: list[int],
        scores: list[float],
        first_window_node: int | None = None,
    ) -> int:
        """Hang an offer of one of the target's own drafters below the last committed token, each node a point mass.

        Cost: linear in the offer.

        Args:
            source: name of the drafter.
            token_ids: tokens of the nodes.
            parents: for each node the index of its parent; -1: the last committed token.
            scores: for each node a score from 0 to 1.
            first_window_node: index from which nodes belong to the drafter's window; None: there is no window.

        Returns:
            Number of offered nodes that the tree has now; it has no room for the others.

        Raises:
            TreeError: the offer is no tree, is too large, or holds an unknown id or an invalid score.
        """
        check_tree(token_ids, parents, self.vocab_size)
        if len(scores) != len(token_ids) or not all(0.0 <= score <= 1.0 for score in scores):
            raise TreeError("scores", f"{scores} are not one for each of {len(token_ids)} nodes, from 0 to 1")
        self.has_offers = True
        places: list[int | None] = []
        first_window_node = len(token_ids) if first_window_node is None else first_window_node
        for index, (token, parent, score) in enumerate(zip(token_ids, parents, scores, strict=True)):
            above = places[parent] if parent >= 0 else ROOT
            node = None if above is None else self.tokens.child(above, token)
            if node is not None:
                self.nodes[node] = self.nodes[node].offered(source, score)
            elif above is not None:
                payload = Node(score, (token,), (1.0,), source=source) if self.is_chain else Node(score, source=source)
                node = self.place(above, token, payload)
            if node is not None and index >= first_window_node:
                self.nodes[node] = replace(self.nodes[node], is_window=True)
                self.has_window = True
            places.append(node)
        return sum(place is not None for place in places)

    def drop_local(self) -> int:
        """Drop nodes that no draft has proposed, and end windows; returns the number of dropped nodes."""
        if not self.has_offers:
            return 0
        self.has_offers = False
        if self.has_window:
            self.nodes = [replace(node, is_window=False) if node.is_window else node for node in self.nodes]
            self.has_window = False
        if not self.nodes:
            return 0
        num_dropped = sum(node.source != DRAFT_MODEL for node in self.nodes)
        if num_dropped == len(self.nodes):
            return self.clear()
        if num_dropped:
            self.retain([node.source == DRAFT_MODEL for node in self.nodes])  # nothing above these is dropped
        self.nodes = [replace(node, others=()) if node.others else node for node in self.nodes]
        return num_dropped

    def hung(self) -> Hung:
        """The tree before `advance`, which makes another one; the counts since the last verdict begin anew."""
        tokens, nodes = (self.tokens, self.nodes) if self.nodes else (NO_TREE, [])
        before = Hung(tokens, nodes, self.has_offers, self.num_hung, self.draft_us, self.num_stale)
        self.draft_us = self.num_stale = 0
        if self.num_hung:
            self.num_hung = {}
        return before

    def advance(self, token_ids: list[int], accepted: Sequence[int] = ()) -> int:
        """Keep the nodes below the newly committed tokens; returns the number of nodes dropped unaccepted.

        `accepted`: the nodes of the first of these tokens, as far as they are known.
        """
        if not self.nodes:
            return 0
        root, num_walked = (accepted[-1] if accepted else ROOT), len(accepted)
        for token in token_ids[num_walked:]:
            child = self.tokens.child(root, token)
            if child is None:
                return self.clear() - num_walked
            root, num_walked = child, num_walked + 1
        before = len(self.nodes)
        self.tokens, kept = self.tokens.subtree(root)
        self.nodes = [self.nodes[node] for node in kept]
        return before - len(self.nodes) - num_walked

    def clear(self) -> int:
        """Drop all nodes; returns their number."""
        dropped, self.has_offers = len(self.nodes), False
        if dropped:
            self.tokens, self.nodes = TokenTree(), []
        return dropped

    def retain(self, keep: list[bool]) -> None:
        """Drop the nodes whose entry in `keep` is false; a kept node's parent must be kept."""
        tokens, moved = TokenTree(), {ROOT: ROOT}
        for node, token in enumerate(self.tokens.token_ids):
            if keep[node]:
                moved[node] = tokens.add(moved[self.tokens.parents[node]], token)
        self.nodes = [node for node, is_kept in zip(self.nodes, keep, strict=True) if is_kept]
        self.tokens = tokens

    def place(self, above: int, token: int, payload: Node) -> int | None:
        """The node of a token below `above`, present or added; None: the tree has no room for it."""
        node = self.tokens.child(above, token)
        if self.is_chain and payload.is_drawn and self._drawn_below(above) not in (None, node):
            return None
        if node is None:
            if len(self.nodes) < MAX_TREE_NODES:
                node = self.tokens.add(above, token)
                self.nodes.append(payload)
        elif payload.is_drawn and not self.nodes[node].is_drawn:
            self.nodes[node] = payload
        return node

    def select(self, chosen: list[int]) -> tuple[TokenTree, list[int]]:
        """The tree of the chosen nodes, which must be closed under parents and in ascending order.

        Returns:
            The tree, and for each of its nodes the index in this one. The chain of first children comes first: if it is
            accepted, its keys and values are in place already.
        """
        parents = self.tokens.parents
        if len(chosen) == len(parents) and self.tokens.is_chain_first:
            return self.tokens, chosen  # nothing is added to it before the step's tokens are committed
        chain: list[int] = []
        for node in chosen:
            if parents[node] == (chain[-1] if chain else ROOT):
                chain.append(node)
        in_chain = set(chain)
        order = chain + [node for node in chosen if node not in in_chain]
        position = {node: index for index, node in enumerate(order)}
        tree = TokenTree(
            [self.tokens.token_ids[node] for node in order], [position.get(parents[node], ROOT) for node in order]
        )
        return tree, order

    def _drawn_below(self, above: int) -> int | None:
        """The child of `above` that was drawn, of a tree for rejection."""
        parents = self.tokens.parents
        return next((node for node, each in enumerate(parents) if each == above and self.nodes[node].is_drawn), None)

    def _hang(self, proposal: pb.Proposal, token_ids: list[int], parents: list[int], walked: list[int]) -> None:
        """Merge a proposal's nodes. Nodes that repeat the tokens `walked` lead to the root. Nodes below the root join
        the tree, up to the first one without room. All others are stale. Equal children of one parent are one node,
        with the payload of the first.
        """
        if self._replace(proposal, token_ids, parents, walked):
            return
        payload_of = payloads(proposal)
        num_walked, num_below, is_full = len(walked), 0, False
        # The place of each node. Up to num_walked: the number of walked tokens that it and its ancestors repeat, where
        # num_walked is the root. Above: num_walked + 1 + its index in the tree.
        places: list[int] = []
        for index, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            above = places[parent] if parent >= 0 else 0
            place = _NOWHERE
            if above >= num_walked:
                num_below += 1
                place = _UNPLACED
                if not is_full and above != _UNPLACED:
                    node = self._place_proposed(payload_of, index, above - num_walked - 1, token)
                    is_full = node is None
                    place = _UNPLACED if node is None else num_walked + 1 + node
            elif above >= 0 and token == walked[above]:
                place = above + 1
            places.append(place)
        self.num_stale += len(token_ids) - num_below

    def _replace(self, proposal: pb.Proposal, token_ids: list[int], parents: list[int], walked: list[int]) -> bool:
        """Merge the usual proposal at once: a draft model's whole tree, which begins with this tree's nodes.

        Returns False, and changes nothing, if it is another proposal.
        """
        if self.is_chain or self.has_offers or proposal.drafters or proposal.distributions:
            return False
        grown, root = TokenTree(token_ids, parents), ROOT
        if not grown.is_set:
            return False
        kept: Sequence[int] = range(len(token_ids))
        for token in walked:
            child = grown.child(root, token)
            if child is None:
                self.num_stale += len(token_ids)
                return True
            root = child
        if walked:
            grown, kept = grown.subtree(root)
        known, present = len(self.nodes), self.tokens
        if grown.token_ids[:known] != present.token_ids or grown.parents[:known] != present.parents:
            return False
        self.tokens = grown
        self.nodes += model_nodes(proposal.scores, kept[known:])
        self.num_stale += len(token_ids) - len(self.nodes)
        if num_new := len(self.nodes) - known:
            self.num_hung[DRAFT_MODEL] = self.num_hung.get(DRAFT_MODEL, 0) + num_new
        return True

    def _place_proposed(self, payload_of: Callable[[int], Node], index: int, above: int, token: int) -> int | None:
        """Index of a draft's node in the tree; None: there is no room. Counts a node that no draft proposed before."""
        node = self.tokens.child(above, token)
        if node is None:
            node = self.place(above, token, payload_of(index))
        elif self.is_chain and not self.nodes[node].is_drawn:
            payload = payload_of(index)
            return self.place(above, token, payload) if payload.is_drawn else node
        elif (known := self.nodes[node]).source != DRAFT_MODEL:
            payload = payload_of(index)
            self.nodes[node] = known.offered(DRAFT_MODEL, payload.score, payload.draft)
        else:
            return node
        if node is not None:
            draft = self.nodes[node].draft
            self.num_hung[draft] = self.num_hung.get(draft, 0) + 1
        return node
