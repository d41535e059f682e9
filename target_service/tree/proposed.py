"""Proposals as they arrive: their nodes, and what is checked before a tree takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from google.rpc import code_pb2

from specdec.config.drafter_options import DRAFT_MODEL, SERVICE_DRAFTER_NAMES
from specdec.engine.errors import TreeError
from specdec.engine.sampling.rejection import DraftSample, InvalidDraftDistribution
from specdec.engine.tree import MAX_TREE_NODES, ROOT, check_tree
from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.v1 import common_pb2 as pb

DEFAULT_SCORE = 0.7
"""Score of a node whose proposal carries none."""


@dataclass(frozen=True, slots=True)
class Node:
    """A proposed node without its token, which is in the tree's `tokens`."""

    score: float
    """The source's estimate, from 0 to 1, of the probability that the node is accepted after its parent."""
    token_ids: tuple[int, ...] = ()
    """Tokens of the truncated distribution that the node was sampled from (rejection mode only)."""
    probs: tuple[float, ...] = ()
    """Probabilities of these tokens, in the same order."""
    is_forced: bool = False
    """Whether a constraint forces the token; no draft proposed it."""
    source: str = DRAFT_MODEL
    """Name of the source that proposed the node: a draft if any did, else the first drafter."""
    draft: str = DRAFT_MODEL
    """Name of the method by which the draft proposed the node: its model, or a drafter without one."""
    others: tuple[tuple[str, float], ...] = ()
    """Names and scores of the other sources of the node."""
    is_window: bool = False
    """Whether the node belongs to a drafter's window, and is computed however unlikely."""

    @property
    def is_local(self) -> bool:
        """Whether no draft has proposed the node."""
        return self.source != DRAFT_MODEL

    @property
    def is_drawn(self) -> bool:
        """Rejection mode: whether the node's token was drawn from its distribution, so that it can be verified."""
        return bool(self.probs)

    @property
    def origin(self) -> str:
        """Name of the node's source in verdicts and reports."""
        return self.draft if self.source == DRAFT_MODEL else self.source

    def offers(self) -> Iterator[tuple[str, float]]:
        """All sources of the node, each with its score."""
        yield self.source, self.score
        yield from self.others

    def offered(self, source: str, score: float, draft: str = DRAFT_MODEL) -> Node:
        """The node with one more source; its distribution stays."""
        if source == self.source or any(source == other for other, _ in self.others):
            return self
        if source == DRAFT_MODEL:
            others = (*self.others, (self.source, self.score))
            return replace(self, score=score, source=source, draft=draft, others=others)
        return replace(self, others=(*self.others, (source, score)))


@dataclass(frozen=True, slots=True)
class ReadProposal:
    """A proposal that was parsed and checked before it is merged."""

    proposal: pb.Proposal
    nodes: tuple[list[int], list[int]]
    """Tokens and parents of its nodes, from `SpeculationTree.check`."""


def check_proposal(
    proposal: pb.Proposal, num_committed: int, vocab_size: int, *, is_chain: bool
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a proposal's nodes; `num_committed` is for the error, `is_chain`: for rejection.

    Raises SessionFailure: the proposal is no valid tree, or in rejection mode no chain with distributions.
    """
    token_ids, parents = proposal.token_ids[:], proposal.parents[:]
    num_nodes = len(token_ids)
    chain = list(range(-1, num_nodes - 1)) if is_chain or not parents else []
    parents = parents or chain
    try:
        check_tree(token_ids, parents, vocab_size)
    except TreeError as error:
        raise SessionFailure(
            code_pb2.INVALID_ARGUMENT,
            "INVALID_PROPOSAL",
            f"proposal.{error}",
            field=f"proposal.{error.field}",
            expected_position=num_committed,
        ) from error
    num_distributions = len(proposal.distributions)
    if is_chain and parents != chain:
        raise invalid("proposal.parents", "rejection verification takes a chain")
    if is_chain and num_distributions != num_nodes:
        raise invalid("proposal.distributions", "rejection verification needs one per node")
    for name, number in (("scores", len(proposal.scores)), ("distributions", num_distributions)):
        if number not in (0, num_nodes):
            raise invalid(f"proposal.{name}", "must be empty or have one entry per node")
    if proposal.drafters or proposal.proposed_by:
        _check_drafters(proposal, num_nodes)
    if num_distributions:
        _check_distributions("proposal", token_ids, proposal.distributions, vocab_size)
    if proposal.continuations:
        if not is_chain:
            raise invalid("proposal.continuations", "only rejection verification takes them")
        _add_continuations(proposal, token_ids, parents, vocab_size)
    return token_ids, parents


def _check_drafters(proposal: pb.Proposal, num_nodes: int) -> None:
    if proposal.drafters and len(proposal.proposed_by) != num_nodes:
        raise invalid("proposal.proposed_by", "must have one entry per node")
    if max(proposal.proposed_by, default=0) >= max(1, len(proposal.drafters)):
        raise invalid("proposal.proposed_by", f"names one of {len(proposal.drafters)} drafters that is not there")


def _add_continuations(proposal: pb.Proposal, token_ids: list[int], parents: list[int], vocab_size: int) -> None:
    """Check a proposal's continuations, and add their nodes to its main chain's. Raises SessionFailure."""
    for index, continuation in enumerate(proposal.continuations):
        name, tokens, parent = f"proposal.continuations[{index}]", continuation.token_ids, continuation.parent
        if not ROOT <= parent < len(token_ids):
            raise invalid(f"{name}.parent", f"{parent} is none of the {len(token_ids)} nodes before it")
        if not 0 < len(tokens) <= MAX_TREE_NODES - len(token_ids):
            room = f"1 to {MAX_TREE_NODES - len(token_ids)} tokens have room"
            raise invalid(f"{name}.token_ids", f"{len(tokens)} tokens, {room}")
        if max(tokens) >= vocab_size:
            raise invalid(f"{name}.token_ids", f"a token is outside the vocabulary of {vocab_size}")
        if len(continuation.distributions) != len(tokens) - 1:
            raise invalid(f"{name}.distributions", "each token but the first needs one")
        _check_distributions(name, tokens[1:], continuation.distributions, vocab_size)
        parents += [parent, *range(len(token_ids), len(token_ids) + len(tokens) - 1)]
        token_ids += tokens


def _check_distributions(
    name: str, token_ids: Sequence[int], distributions: Sequence[pb.SparseDistribution], vocab_size: int
) -> None:
    for index, (token, sparse) in enumerate(zip(token_ids, distributions, strict=False)):
        try:
            DraftSample(token, tuple(sparse.token_ids), tuple(sparse.probs)).check(vocab_size)
        except InvalidDraftDistribution as error:
            raise invalid(f"{name}.distributions[{index}]", str(error)) from error


def payloads(proposal: pb.Proposal) -> Callable[[int], Node]:
    """A function from a proposal's node index to its payload."""
    scores, names = proposal.scores, proposal.drafters
    drafts = [name if name in SERVICE_DRAFTER_NAMES else DRAFT_MODEL for name in names]
    proposed_by = proposal.proposed_by
    distributions: list[pb.SparseDistribution] = list(proposal.distributions)
    for continuation in proposal.continuations:
        distributions += [pb.SparseDistribution(), *continuation.distributions]
    # Unknown names become DRAFT_MODEL, as names become labels of metrics.

    def payload_of(index: int) -> Node:
        is_main = index < len(proposal.token_ids)
        score = scores[index] / 255 if scores and is_main else DEFAULT_SCORE
        draft = drafts[proposed_by[index]] if drafts and is_main else DRAFT_MODEL
        if not distributions:
            return _plain_node(score, draft)
        sparse = distributions[index]
        return Node(score, tuple(sparse.token_ids), tuple(sparse.probs), draft=draft)

    return payload_of


def model_nodes(scores: bytes, indices: Iterable[int]) -> list[Node]:
    """Payloads of some nodes of a draft model's proposal; `scores` has a byte for each node, or none."""
    if not scores:
        return [_WITHOUT_SCORE for _ in indices]
    return [*map(_BY_SCORE.__getitem__, map(scores.__getitem__, indices))]


@cache
def _plain_node(score: float, draft: str) -> Node:
    """A node shared by all trees: there are 256 scores and a few names, and nodes are immutable."""
    return Node(score, draft=draft)


_BY_SCORE = tuple(_plain_node(score / 255, DRAFT_MODEL) for score in range(256))
"""Nodes of a draft model by their score's byte."""
_WITHOUT_SCORE = _plain_node(DEFAULT_SCORE, DRAFT_MODEL)
