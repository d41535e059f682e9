"""The tree of proposals that hangs from a session's last committed token.

Invariants: children of one node have different tokens; every node hangs, through its ancestors, from the last committed
token; what a node is verified with is what the proposal said that brought it first. The tree is data only: it holds no
KV, and dropping any of it costs speed, never correctness.

Nodes come from several sources. What a draft sent stays for as long as it hangs from the last committed token; what
drafters of the target's own offered is *passing*: they offer anew for every step. A node that several of them know is
one node, with the score of each.

Rejection verification takes chains only, and of two that differ at a place the one that came first. Kept side by side,
neither could be verified there, so that whether a token is verified would depend on which tokens were drawn: the output
would be biased (`specdec.engine.sampling.rejection`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from google.rpc import code_pb2

from specdec.config.drafter_options import DRAFT_MODEL, SERVICE_DRAFTER_NAMES
from specdec.engine.errors import TreeError
from specdec.engine.sampling.rejection import DraftSample, InvalidDraftDistribution
from specdec.engine.tree import MAX_TREE_NODES, ROOT, TokenTree, check_tree
from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.v1 import common_pb2 as pb

DEFAULT_SCORE = 0.7
"""Estimated acceptance of a node whose proposal carries no score."""
_NOWHERE = -1
"""Place of an offered node that is neither on the way to the root nor below it."""
_UNPLACED = 1 << 32
"""Index of a node below the root for which the tree has no place."""


@dataclass(frozen=True, slots=True)
class Node:
    """What a proposal says about one node besides its token."""

    score: float
    """The draft's estimate of the probability that it is accepted, given that its parent is."""
    token_ids: tuple[int, ...] = ()
    """Tokens of the truncated distribution that it was sampled from (rejection mode only)."""
    probs: tuple[float, ...] = ()
    """Probabilities of these tokens, in the same order."""
    is_forced: bool = False
    """No draft offered it: a constraint allows nothing else."""
    source: str = DRAFT_MODEL
    """Name of the source that proposed it: a draft, or else the first one."""
    draft: str = DRAFT_MODEL
    """What the draft that proposed it says it is: a model, or a drafter without one."""
    others: tuple[tuple[str, float], ...] = ()
    """Names and scores of the other sources that did."""
    is_window: bool = False
    """It is computed for what is drawn there, however unlikely."""

    @property
    def is_local(self) -> bool:
        """No draft has proposed it."""
        return self.source != DRAFT_MODEL

    @property
    def origin(self) -> str:
        """The name of who proposed it, for people."""
        return self.draft if self.source == DRAFT_MODEL else self.source

    def offers(self) -> Iterator[tuple[str, float]]:
        """Everybody who proposed it, each with a score."""
        yield self.source, self.score
        yield from self.others

    def offered(self, source: str, score: float, draft: str = DRAFT_MODEL) -> Node:
        """The node, proposed by one more. What it is verified with stays."""
        if source == self.source or any(source == other for other, _ in self.others):
            return self
        if source == DRAFT_MODEL:
            others = (*self.others, (self.source, self.score))
            return replace(self, score=score, source=source, draft=draft, others=others)
        return replace(self, others=(*self.others, (source, score)))


@dataclass(frozen=True, slots=True)
class ReadProposal:
    """A proposal that was read before it is known where it hangs."""

    proposal: pb.Proposal
    nodes: tuple[list[int], list[int]]
    """Its tokens and their parents, of `SpeculationTree.check`."""


@dataclass(slots=True)
class SpeculationTree:
    """Proposed tokens below the last committed one; with `is_chain`, for rejection verification."""

    vocab_size: int
    is_chain: bool = False
    tokens: TokenTree = field(default_factory=TokenTree)
    nodes: list[Node] = field(default_factory=list)
    num_stale: int = 0
    """Proposed tokens that arrived too late or off the committed path, since last taken."""
    draft_us: int = 0
    """Drafting time of the nodes on the deepest path, since last taken."""
    num_hung: dict[str, int] = field(default_factory=dict)
    """Nodes that proposals of drafts brought, or knew of first among drafts, by `Node.draft`, since last taken."""
    has_window: bool = False
    """Some nodes are to be computed for what is drawn there, in the next step only."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def lasting_depth(self) -> int:
        """Depth of the deepest node that a draft has proposed."""
        depths = zip(self.tokens.depths, self.nodes, strict=True)
        return max([depth for depth, node in depths if node.source == DRAFT_MODEL], default=0)

    @property
    def is_local(self) -> bool:
        """Whether there is nothing in it that a draft has proposed."""
        return all(node.is_local for node in self.nodes)

    def merge(
        self, proposal: pb.Proposal, committed: list[int], nodes: tuple[list[int], list[int]] | None = None
    ) -> None:
        """Hang a proposal: walk the tokens committed since its start through it, merge what is left below the root.

        `nodes` are what `check` said of it, if it was checked before. Cost: linear in the proposal.

        Raises:
            SessionFailure: it starts past the committed tokens, is no tree, is too large, or holds an unknown id; or,
                for rejection verification, is no chain or lacks distributions.
        """
        num_committed = len(committed)
        if not 1 <= proposal.start_position <= num_committed:
            message = f"{proposal.start_position} is not within the {num_committed} committed tokens"
            raise invalid("proposal.start_position", message, expected_position=num_committed)
        token_ids, parents = nodes or self.check(proposal, num_committed)
        self._hang(proposal, token_ids, parents, committed[proposal.start_position :])

    def hang(
        self,
        source: str,
        token_ids: list[int],
        parents: list[int],
        scores: list[float],
        first_window_node: int | None = None,
    ) -> int:
        """Hang what a drafter of the target's own offers below the last committed token, each node a point mass.

        Returns how many of its nodes are there now; the others have no place. Cost: linear in the offer.

        Raises:
            TreeError: it is no tree, is too large, or holds an unknown id or a score that is none.
        """
        check_tree(token_ids, parents, self.vocab_size)
        if len(scores) != len(token_ids) or not all(0.0 <= score <= 1.0 for score in scores):
            raise TreeError("scores", f"{scores} are not one for each of {len(token_ids)} nodes, from 0 to 1")
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
        """Drop what no draft has proposed; returns how many nodes that were. What is left is no window any more."""
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

    def advance(self, token_ids: list[int]) -> int:
        """Tokens were committed: keep what hangs below them. Returns how many nodes were dropped unaccepted."""
        if not self.nodes:
            return 0
        root, num_walked = ROOT, 0
        for token in token_ids:
            child = self.tokens.child(root, token)
            if child is None:
                return self.clear() - num_walked
            root, num_walked = child, num_walked + 1
        before = len(self.nodes)
        self.tokens, moved = self.tokens.subtree(root)
        self.nodes = [self.nodes[old] for old in moved]  # which rise
        return before - len(self.nodes) - num_walked

    def clear(self) -> int:
        """Drop everything; returns how many nodes there were."""
        dropped = len(self.nodes)
        if dropped:
            self.tokens, self.nodes = TokenTree(), []
        return dropped

    def retain(self, keep: list[bool]) -> None:
        """Drop the nodes that are not to be kept; these are closed under parents."""
        tokens, moved = TokenTree(), {ROOT: ROOT}
        for node, token in enumerate(self.tokens.token_ids):
            if keep[node]:
                moved[node] = tokens.add(moved[self.tokens.parents[node]], token)
        self.nodes = [node for node, is_kept in zip(self.nodes, keep, strict=True) if is_kept]
        self.tokens = tokens

    def place(self, above: int, token: int, payload: Node) -> int | None:
        """The node of a token below `above`, there already or new; None where there is no place for it."""
        node = self.tokens.child(above, token)
        if node is None and len(self.nodes) < MAX_TREE_NODES and not self._is_taken(above):
            node = self.tokens.add(above, token)
            self.nodes.append(payload)
        return node

    def select(self, chosen: list[int]) -> tuple[TokenTree, list[int]]:
        """The tree of the chosen nodes, which must be closed under parents and in ascending order.

        Returns:
            The tree, and which node each of its nodes is. First children come first, as one chain: accepted, their keys
            and values are in place already.
        """
        parents = self.tokens.parents
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

    def _is_taken(self, node: int) -> bool:
        """Whether a chain has another child of `node` already, which stays its only one."""
        return self.is_chain and node + 1 < len(self.tokens)

    def _hang(self, proposal: pb.Proposal, token_ids: list[int], parents: list[int], walked: list[int]) -> None:
        """Nodes that repeat `walked` from its start lead to the root; what hangs below it joins the tree, the rest is
        stale. Equal children of one parent are one node, with the payload of the first. Stops at a node for which
        there is no place.
        """
        payload_of = _payloads(proposal)
        num_walked, num_below, is_full = len(walked), 0, False
        # Where each node is. Up to num_walked: how many walked tokens it and its ancestors repeat, so all of them at
        # the root; past that: below the root, by its index in the tree.
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

    def _place_proposed(self, payload_of: Callable[[int], Node], index: int, above: int, token: int) -> int | None:
        """Where a draft's node is now; None: there is no place for it. Counts it, unless a draft brought it before."""
        node = self.tokens.child(above, token)
        if node is None:
            node = self.place(above, token, payload_of(index))
        elif (known := self.nodes[node]).source != DRAFT_MODEL:
            payload = payload_of(index)
            self.nodes[node] = known.offered(DRAFT_MODEL, payload.score, payload.draft)
        else:
            return node
        if node is not None:
            draft = self.nodes[node].draft
            self.num_hung[draft] = self.num_hung.get(draft, 0) + 1
        return node

    def check(self, proposal: pb.Proposal, num_committed: int) -> tuple[list[int], list[int]]:
        """The proposal's nodes and their parents, which depend on nothing else; `num_committed` is for the error.

        Raises SessionFailure for what is no tree of this session's kind.
        """
        token_ids = list(proposal.token_ids)
        chain = list(range(-1, len(token_ids) - 1))
        parents = list(proposal.parents) or chain
        try:
            check_tree(token_ids, parents, self.vocab_size)
        except TreeError as error:
            raise SessionFailure(
                code_pb2.INVALID_ARGUMENT,
                "INVALID_PROPOSAL",
                f"proposal.{error}",
                field=f"proposal.{error.field}",
                expected_position=num_committed,
            ) from error
        if self.is_chain and parents != chain:
            raise invalid("proposal.parents", "rejection verification takes a chain")
        if self.is_chain and len(proposal.distributions) != len(token_ids):
            raise invalid("proposal.distributions", "rejection verification needs one per node")
        for name in ("scores", "distributions"):
            if len(getattr(proposal, name)) not in (0, len(token_ids)):
                raise invalid(f"proposal.{name}", "must be empty or have one entry per node")
        if proposal.drafters and len(proposal.proposed_by) != len(token_ids):
            raise invalid("proposal.proposed_by", "must have one entry per node")
        if max(proposal.proposed_by, default=0) >= max(1, len(proposal.drafters)):
            raise invalid("proposal.proposed_by", f"names one of {len(proposal.drafters)} drafters that is not there")
        for index, (token, sparse) in enumerate(zip(token_ids, proposal.distributions, strict=False)):
            try:
                DraftSample(token, tuple(sparse.token_ids), tuple(sparse.probs)).check(self.vocab_size)
            except InvalidDraftDistribution as error:
                raise invalid(f"proposal.distributions[{index}]", str(error)) from error
        return token_ids, parents


def _payloads(proposal: pb.Proposal) -> Callable[[int], Node]:
    """What a proposal says of each node, by its index."""
    scores, names = proposal.scores, proposal.drafters
    drafts = [name if name in SERVICE_DRAFTER_NAMES else DRAFT_MODEL for name in names]
    proposed_by, distributions = proposal.proposed_by, proposal.distributions
    # A name that is not known is none: what a draft says becomes a label of metrics.

    def payload_of(index: int) -> Node:
        score = scores[index] / 255 if scores else DEFAULT_SCORE
        draft = drafts[proposed_by[index]] if drafts else DRAFT_MODEL
        if not distributions:
            return _plain_node(score, draft)
        sparse = distributions[index]
        return Node(score, tuple(sparse.token_ids), tuple(sparse.probs), draft=draft)

    return payload_of


@cache
def _plain_node(score: float, draft: str) -> Node:
    """One for all places: there are 256 scores and a few names, and nodes do not change."""
    return Node(score, draft=draft)
