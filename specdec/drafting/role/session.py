"""A draft's session: a tree of guesses below the committed tokens, and the sequences that grow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

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
    """Greatest length of a chain in rejection mode, where rounds are synchronous; 0: no drafts are wanted; None:
    coupled mode, where the growth policy decides.
    """
    chain_start: int
    """Rejection mode: number of committed tokens when the present chain began."""
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
    rule: DrawRule | None = field(init=False, default=None)
    """Rule to sample a guess from logits; None: a constraint masks them first."""

    def __post_init__(self) -> None:
        """Set the rule."""
        EngineSession.__post_init__(self)
        if not self.body.sampling.HasField("constraint"):
            self.rule = DrawRule(self.params)

    @property
    def chain_id(self) -> int:
        """Unique number of a chain within the session (rejection mode)."""
        return (self.epoch << 32) + self.chain_start

    @property
    def main_path(self) -> list[int]:
        """Nodes of the main head's path, from the root."""
        return self.tree.path(self.heads[0].node)

    @property
    def output(self) -> list[int]:
        """The committed tokens of the output."""
        return self.heads[0].seq.token_ids[self.body.num_prompt_tokens : self.num_committed]

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
        self.tree, moved = self.tree.subtree(node)
        self.notes = [_below(self.notes[old], above) for old in sorted(moved)]
        return moved

    def clear(self) -> None:
        """Forget all guesses. The caller resets the heads."""
        self.tree, self.notes = TokenTree(), []


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
        token_ids=tree.token_ids,
        parents=() if tree.is_chain else tree.parents,
        draft_us=uint32(sum(notes[node].draft_us for node in main_path)),
        path_length=len(main_path),
        is_complete=is_complete,
    )
    if session.mode is VerifyMode.REJECTION:
        samples = [note.sample for note in notes if note.sample is not None]
        sparse = [pb.SparseDistribution(token_ids=sample.ids, probs=sample.probs) for sample in samples]
        proposal.distributions.extend(sparse)
        proposal.draws_afresh = True
    else:
        proposal.scores = bytes(round(note.score * 255) for note in notes)
    return proposal
