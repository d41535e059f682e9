"""A draft's session: a tree of guesses below the committed tokens, and the sequences that grow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from specdec.drafting.role.growth import GrowthPolicy
from specdec.engine.drawing.rows import DrawRule
from specdec.engine.sampling.sampler import DraftSample
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence
from specdec.engine.tree import ROOT, TokenTree
from specdec.replica.worker.sessions import EngineSession
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import uint32
from specdec.wire.sampling_params import SamplingParams, VerifyMode


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess of the next token at one place."""

    token_id: int
    """The token that the target would sample if its logits were the draft's."""
    score: float
    """Estimated probability that it is accepted if its ancestors are."""
    siblings: tuple[tuple[int, float], ...] = ()
    """Runners-up, each with its score."""
    sample: DraftSample | None = None
    """The sparse distribution from which it was sampled (rejection mode)."""


@dataclass(frozen=True, slots=True)
class Note:
    """The draft's data of one node of the tree."""

    score: float
    """See Guess."""
    path_score: float
    """Estimated probability that the node and all its ancestors are accepted."""
    is_end: bool
    """Whether the choice ends with it, so that it has no children."""
    draft_us: int
    """Microseconds of the step that guessed it."""
    sample: DraftSample | None
    """Rejection mode only."""


@dataclass(slots=True, eq=False)
class GrowingLeaf:
    """A sequence that grows the tree at one leaf: it holds the committed tokens, then the path down to `node`."""

    seq: Sequence
    node: int = ROOT
    is_over: bool = False
    """Whether nothing can follow its leaf: the choice or the draft's context ends."""
    chain_start: int = 0
    """Rejection mode: number of tokens before the first one of its chain."""


@dataclass(slots=True, eq=False, kw_only=True)
class FollowingSession(EngineSession):
    """A session of any model drafter."""

    body: pb.OpenSession
    """The message that opened it."""
    target_credit: int | None = None
    """Draft tokens per step that the target last found worth verifying; None: not reported."""
    is_suspended: bool = False
    """The target has suspended speculation: nothing is computed, not even committed tokens."""
    has_heard: bool = False
    """Whether a commit has arrived."""
    committed_at_s: float | None = None
    """Monotonic time of the last commit; None once a proposal has answered it."""


FollowingT = TypeVar("FollowingT", bound=FollowingSession)


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(FollowingSession):
    """A session that guesses with the target's tokens.

    Invariants: ``heads[0]`` is the main one and always there; every head's tokens are the committed ones followed by
    the path from the root to its node; `notes` has one entry per node.
    """

    params: SamplingParams
    """The target's sampling parameters."""
    mode: VerifyMode
    """The target's verification."""
    history: TokenHistory
    """Counts of the committed tokens."""
    num_committed: int
    """Tokens that are final."""
    max_chain: int | None
    """Greatest length of the main chain in rejection mode, below what the target verifies; 0: no drafts are wanted;
    None: coupled mode, where the growth policy decides.
    """
    tree: TokenTree = field(default_factory=TokenTree)
    """Guesses below the last committed token."""
    notes: list[Note] = field(default_factory=list)
    """Data of each node."""
    heads: list[GrowingLeaf] = field(default_factory=list)
    """The sequences that grow the tree."""
    is_compiling: bool = False
    """Its constraint is being compiled: nothing is computed."""
    num_unsent: int = 0
    """Steps whose nodes have not been sent."""
    num_sent: int = 0
    """Number of nodes, the first ones, that the last proposal had."""
    num_verifying: int = 0
    """Length of the main path that was sent before the last commit: the target may verify it now."""
    rule: DrawRule | None = field(init=False, default=None)
    """Rule to sample a guess from logits; None: a constraint masks them first."""

    def __post_init__(self) -> None:
        """Set the rule."""
        EngineSession.__post_init__(self)
        if not self.body.sampling.HasField("constraint"):
            self.rule = DrawRule(self.params)

    def chain_id(self, head: GrowingLeaf) -> int:
        """Number of a head's chain (rejection mode), unique among the chains on one path of the session."""
        return (self.epoch << 32) + head.chain_start

    @property
    def main_path(self) -> list[int]:
        """Nodes of the main head's path, from the root."""
        return self.tree.path(self.heads[0].node)

    @property
    def output(self) -> list[int]:
        """The committed tokens of the output."""
        return self.heads[0].seq.token_ids[self.body.num_prompt_tokens : self.num_committed]

    def max_depth(self, growth: GrowthPolicy) -> int:
        """Greatest depth of the main path."""
        depth = growth.max_depth(self.target_credit)
        return depth if self.max_chain is None else min(self.num_verifying + self.max_chain, depth)

    def path_score(self, node: int) -> float:
        """Estimated probability that `node` is reached; 1 for the root."""
        return self.notes[node].path_score if node >= 0 else 1.0

    def ends_choice(self, token_id: int, num_tokens: int) -> bool:
        """Whether nothing is drafted after `token_id`, which makes the sequence `num_tokens` long.

        In rejection mode only the position decides. A chain cut short by its own tokens would be ready sooner, so that
        verification would depend on the sampled tokens (`specdec.engine.sampling.rejection`).
        """
        params = self.params
        is_full = num_tokens - self.body.num_prompt_tokens >= params.max_tokens
        if self.mode is VerifyMode.REJECTION:
            return is_full
        is_eos = token_id in params.eos_token_ids and not params.ignore_eos
        return is_full or is_eos or token_id in params.stop_token_ids

    def add(
        self, parent: int, token_id: int, score: float, is_end: bool, draft_us: int, sample: DraftSample | None
    ) -> int:
        """Add a guess below `parent`, unless it is there already. Returns its node."""
        node = self.tree.add(parent, token_id)
        if node == len(self.notes):
            self.notes.append(Note(score, score * self.path_score(parent), is_end, draft_us, sample))
        return node

    def reroot(self, node: int) -> dict[int, int]:
        """Keep the nodes below `node`. Returns the new index of each."""
        above = self.path_score(node)
        self.tree, kept = self.tree.subtree(node)
        self.num_sent = sum(old < self.num_sent for old in kept)
        self.notes = [_below(self.notes[old], above) for old in kept]
        return {old: new for new, old in enumerate(kept)}

    def clear(self) -> None:
        """Forget all guesses. The caller resets the heads."""
        self.tree, self.notes, self.num_sent = TokenTree(), [], 0


def _below(note: Note, above: float) -> Note:
    path_score = note.path_score / above if above > 0 else note.score
    return Note(note.score, path_score, note.is_end, note.draft_us, note.sample)


def make_proposal(session: DraftSession, *, is_complete: bool = False) -> pb.Proposal:
    """A proposal of the whole tree below the last committed token. Cost: linear in its nodes, at most 64.

    `is_complete`: no node will be added before the next commit.
    """
    tree, notes = session.tree, session.notes
    main_path = session.main_path
    proposal = pb.Proposal(
        start_position=session.num_committed,
        draft_us=uint32(sum(notes[node].draft_us for node in main_path)),
        path_length=len(main_path),
        is_complete=is_complete,
    )
    if session.mode is VerifyMode.REJECTION:
        _describe_chains(session, proposal)
    else:
        proposal.token_ids.extend(tree.token_ids)
        proposal.parents.extend(() if tree.is_chain else tree.parents)
        proposal.scores = bytes(round(note.score * 255) for note in notes)
    return proposal


def _describe_chains(session: DraftSession, proposal: pb.Proposal) -> None:
    """Add the main chain, and the chains below its likely corrections; a correction without a chain is left out."""
    tree, notes, main_path = session.tree, session.notes, session.main_path
    drawn_below = {tree.parents[node]: node for node, note in enumerate(notes) if note.sample is not None}
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(main_path)}
    proposal.token_ids.extend(tree.token_ids[node] for node in main_path)
    proposal.distributions.extend(_sparse(notes[node].sample) for node in main_path)
    proposal.draws_afresh = True
    for correction, note in enumerate(notes):
        if note.sample is not None or correction not in drawn_below:
            continue
        chain = [correction]
        while chain[-1] in drawn_below:
            chain.append(drawn_below[chain[-1]])
        proposal.continuations.add(
            parent=places[tree.parents[correction]],
            token_ids=[tree.token_ids[node] for node in chain],
            distributions=[_sparse(notes[node].sample) for node in chain[1:]],
        )
        for node in chain:
            places[node] = len(places) - 1


def _sparse(sample: DraftSample | None) -> pb.SparseDistribution:
    assert sample is not None
    return pb.SparseDistribution(token_ids=sample.ids, probs=sample.probs)
