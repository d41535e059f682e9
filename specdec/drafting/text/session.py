"""A text draft's session: the target's committed tokens, the draft's pieces, and proposals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from operator import mul

from specdec.drafting.role.opening import Opening
from specdec.drafting.role.session import FollowingSession
from specdec.drafting.text.bridge import LOOK_BACK, NOTHING_WRITTEN, Piece, TextBridge, Written
from specdec.engine.engine import Engine
from specdec.engine.sampling.sampler import RowContext
from specdec.engine.sequence import Sequence
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import uint32
from specdec.wire.sampling_params import VerifyMode


@dataclass(slots=True, eq=False, kw_only=True)
class TextSession(FollowingSession):
    """A session that guesses with the draft's own tokens.

    Invariants: the tokens of `seq` are those of `pieces`, then of `drafted` (the last may be missing at the end of the
    draft's context). The pieces joined are the text of `token_ids`. `scores` and `times_us` have one entry per drafted
    piece.
    """

    opening: Opening
    """The checked OpenSession."""
    token_ids: list[int]
    """The target's committed tokens."""
    pieces: list[Piece]
    """The same text as pieces of the draft."""
    seq: Sequence
    drafted: list[Piece] = field(default_factory=list)
    """Guessed pieces after them."""
    scores: list[float] = field(default_factory=list)
    """Estimated probability of each drafted piece to be right if all before it are."""
    times_us: list[int] = field(default_factory=list)
    """Microseconds of the step that drafted each piece."""
    written: Written = NOTHING_WRITTEN
    """The drafted text as the target's tokens."""
    is_over: bool = False
    """Whether nothing can follow the drafted text: the choice or the draft's context ends."""
    told: tuple[int, int, bool] | None = None
    """The last proposal's committed length, number of tokens and completeness; None: nothing was proposed."""

    @property
    def num_committed(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)

    @property
    def num_told(self) -> int | None:
        """Number of tokens proposed since the last commit; None: no proposal."""
        return self.told[1] if self.told is not None and self.told[0] == len(self.token_ids) else None

    @property
    def is_rejection(self) -> bool:
        """Whether the target verifies by rejection sampling."""
        return self.opening.mode is VerifyMode.REJECTION

    @property
    def path_score(self) -> float:
        """Estimated probability that all drafted pieces are right."""
        score = 1.0
        for each in self.scores:
            score *= each
        return score

    @property
    def proposed(self) -> tuple[int, ...]:
        """Tokens to propose: those that more text is unlikely to change."""
        num_tokens = len(self.written.token_ids) if self.is_over else self.written.num_settled
        if self.opening.max_chain is not None:
            num_tokens = min(num_tokens, self.opening.max_chain)
        return self.written.token_ids[:num_tokens]

    def draw_context(self) -> RowContext:
        """The sampler's context of the next token, after the drafted text as the target's tokens."""
        return RowContext(
            params=self.opening.params,
            position=len(self.token_ids) + len(self.written.token_ids),
            num_prompt_tokens=self.body.num_prompt_tokens,
            history=self.opening.history,
            extra_tokens=self.written.token_ids,
        )

    def ends_choice(self, token_id: int, num_drafted: int) -> bool:
        """Whether nothing follows the target's token `token_id` after `num_drafted` drafted ones."""
        params = self.opening.params
        is_full = len(self.token_ids) + num_drafted + 1 - self.body.num_prompt_tokens >= params.max_tokens
        is_eos = token_id in params.eos_token_ids and not params.ignore_eos
        return is_full or is_eos or token_id in params.stop_token_ids

    def forget_drafted(self) -> None:
        """Forget the drafted text. The caller rolls the sequence back."""
        self.drafted, self.scores, self.times_us = [], [], []
        self.written, self.is_over = NOTHING_WRITTEN, False

    def token_scores(self) -> Iterator[float]:
        """Score of each written token: the product over the pieces that begin in it."""
        starts = [0, *accumulate(len(span) for _, span in self.drafted)][:-1]
        products = [1.0, *accumulate(self.scores, mul)]
        reached = [products[sum(start < end for start in starts)] for end in (0, *self.written.ends)]
        for before, after in pairwise(reached):
            yield after / before if before > 0 else 0.0


def make_proposal(session: TextSession, *, is_complete: bool) -> pb.Proposal:
    """A proposal of `session.proposed`, which may be empty. `is_complete`: no more will come before a commit."""
    token_ids = session.proposed
    proposal = pb.Proposal(
        start_position=session.num_committed,
        token_ids=token_ids,
        path_length=len(token_ids),
        draft_us=uint32(sum(session.times_us)),
        is_complete=is_complete,
    )
    if session.is_rejection:
        proposal.distributions.extend(pb.SparseDistribution(token_ids=[token], probs=[1.0]) for token in token_ids)
        proposal.draws_afresh = True
    else:
        scores = islice(session.token_scores(), len(token_ids))
        proposal.scores = bytes(round(255 * min(1.0, max(0.0, score))) for score in scores)
    return proposal


def follow(engine: Engine, bridge: TextBridge, session: TextSession, new: list[int]) -> None:
    """Commit tokens: keep the drafted pieces that they confirm, and drop the others.

    Raises:
        SequenceTooLong: the draft's context cannot hold the text.
    """
    seq, drafted, num_pieces = session.seq, session.drafted, len(session.pieces)
    num_kept, written = bridge.follow(session.pieces, drafted, new, max(1, seq.num_final_tokens))
    if num_kept > num_pieces and not written:  # the drafted text extends the committed text
        num_taken = num_kept - num_pieces
        session.pieces += drafted[:num_taken]
        session.drafted, session.scores = drafted[num_taken:], session.scores[num_taken:]
        session.times_us = session.times_us[num_taken:]
        missing = session.pieces[len(seq.token_ids) :]
    else:
        session.pieces = [*[*session.pieces, *drafted][:num_kept], *written]
        session.forget_drafted()
        num_held = min(num_kept, len(seq.token_ids))
        engine.rollback(seq, num_held)
        missing = session.pieces[num_held:]
    if missing:
        engine.append(seq, [joint_id for joint_id, _ in missing])
    session.token_ids += new
    session.is_over &= bool(session.drafted)
    session.written = bridge.written(session.token_ids, session.drafted)
    engine.finalize(seq, max(seq.num_final_tokens, len(session.pieces) - LOOK_BACK))


def num_equal(drafted: tuple[int, ...], committed: list[int]) -> int:
    """Number of leading tokens that are equal."""
    pairs = zip(drafted, committed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(committed)))
