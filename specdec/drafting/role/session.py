"""A session as the draft holds it: a tree of guesses below the committed tokens, and the sequences that grow it."""

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
    """What the draft thinks comes next at one place."""

    token_id: int
    """The token that the target would sample if its logits were the draft's."""
    score: float
    """Estimated probability that it is accepted if all before it are."""
    siblings: tuple[tuple[int, float], ...] = ()
    """Runners-up, each with its score."""
    sample: DraftSample | None = None
    """The sparse distribution it was drawn from (rejection mode)."""


@dataclass(frozen=True, slots=True)
class Note:
    """What the draft remembers of one node of the tree."""

    score: float
    """As in Guess."""
    path_score: float
    """Estimated probability that the node and all its ancestors are accepted."""
    is_end: bool
    """The choice would end with it; nothing hangs below."""
    draft_us: int
    """Time of the step that guessed it."""
    sample: DraftSample | None
    """Rejection mode only."""


@dataclass(slots=True, eq=False)
class Head:
    """A sequence that grows the tree at one leaf: it holds the committed tokens, then the path down to `node`."""

    seq: Sequence
    node: int = ROOT
    is_over: bool = False
    """Its leaf ends the choice, or the draft's context: nothing follows."""


@dataclass(slots=True, eq=False, kw_only=True)
class FollowingSession(EngineSession):
    """One choice that a drafter follows, whatever it guesses by."""

    body: pb.OpenSession
    """The message that opened it."""
    target_credit: int | None = None
    """How many draft tokens per step the target last found worth verifying; None: not told."""
    is_suspended: bool = False
    """Nobody wants proposals now: nothing is computed, not even what is committed."""
    has_heard: bool = False
    """A commit has come."""
    committed_at_s: float | None = None
    """When the last commit arrived, until a proposal answers it."""


FollowingT = TypeVar("FollowingT", bound=FollowingSession)


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(FollowingSession):
    """One choice while its continuation is guessed.

    Invariants: ``heads[0]`` is the main one and always there; every head's tokens are the committed ones followed by
    the path from the root to its node; `notes` has one entry per node.
    """

    params: SamplingParams
    """How the target picks tokens."""
    mode: VerifyMode
    """How it verifies them."""
    history: TokenHistory
    """Counts of the committed tokens."""
    num_committed: int
    """Tokens that are final."""
    max_chain: int | None
    """Longest chain in rejection mode, where rounds are synchronous; 0 for a session that wants no drafts; None in
    coupled mode, where the growth policy decides."""
    chain_start: int
    """Rejection mode: committed tokens where the chain at hand was begun."""
    tree: TokenTree = field(default_factory=TokenTree)
    """Guesses below the last committed token."""
    notes: list[Note] = field(default_factory=list)
    """What is remembered of each of them."""
    heads: list[Head] = field(default_factory=list)
    """The sequences that grow the tree."""
    is_compiling: bool = False
    """What its constraint allows is not known yet: nothing is computed."""
    num_unsent: int = 0
    """Steps whose nodes no proposal has carried yet."""
    rule: DrawRule | None = field(init=False, default=None)
    """How a guess is drawn from logits; None where a constraint masks these first."""

    def __post_init__(self) -> None:
        """Work the rule out once."""
        EngineSession.__post_init__(self)
        if not self.body.sampling.HasField("constraint"):
            self.rule = DrawRule(self.params)

    @property
    def chain_id(self) -> int:
        """What no two chains of the session share (rejection mode)."""
        return (self.epoch << 32) + self.chain_start

    @property
    def main_path(self) -> list[int]:
        """Nodes of the main head's path, root-down."""
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

        In rejection mode only the position decides: chains that their own tokens cut short would be ready sooner, so
        that what is verified would depend on the tokens drawn (`specdec.engine.sampling.rejection`).
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
        """Hang a guess below `parent`; one that is there already (a runner-up, say) is returned instead."""
        node = self.tree.add(parent, token_id)
        if node == len(self.notes):
            self.notes.append(Note(score, score * self.path_score(parent), is_end, draft_us, sample))
        return node

    def reroot(self, node: int) -> dict[int, int]:
        """Keep what hangs below `node`; returns where each node went."""
        above = self.path_score(node)
        self.tree, moved = self.tree.subtree(node)
        self.notes = [_below(self.notes[old], above) for old in sorted(moved)]
        return moved

    def clear(self) -> None:
        """Forget all guesses; the heads are the caller's business."""
        self.tree, self.notes = TokenTree(), []


def _below(note: Note, above: float) -> Note:
    path_score = note.path_score / above if above > 0 else note.score
    return Note(note.score, path_score, note.is_end, note.draft_us, note.sample)


def make_proposal(session: DraftSession, *, is_complete: bool = False) -> pb.Proposal:
    """The whole tree, hung from the last committed token. Cost: linear in its nodes, of which there are at most 64.

    `is_complete`: nothing will be added to it before a commit.
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
