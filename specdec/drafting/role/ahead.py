"""Drafts several tokens per head in one call, with the same result as single steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch

from specdec.drafting.role.branches import Branches
from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.guess import Place, guess_of, guess_of_sample, row_context
from specdec.drafting.role.session import DraftSession, GrowingLeaf, Guess
from specdec.engine.drawing.rows import Drawing, DrawRow, DrawRule
from specdec.engine.engine import Engine
from specdec.wire.sampling_params import VerifyMode

_FORGETTING = 0.9
"""Factor per call by which the time of a too long round fades, so that two rounds are tried again."""

Round = list[tuple[Place, Guess | None]]


class Ahead:
    """Samples the next tokens of all heads of a step, and computes all but the last.

    Its tokens are added to the trees round by round, while the heads that would step next are among its own. So the
    trees are those of single steps, token for token and in the same order.
    """

    def __init__(
        self,
        engine: Engine,
        branches: Branches,
        drawing: Drawing | None,
        num_siblings: int,
        num_sparse: int,
        max_model_len: int,
    ) -> None:
        self.most_rounds = 1 if drawing is None else drawing.most_rounds
        self.drawing = drawing
        self._ends_at_forks = drawing is None or drawing.ends_at_forks
        self._engine = engine
        self._branches = branches
        self._num_siblings = num_siblings
        self._num_sparse = num_sparse
        self._max_model_len = max_model_len
        self._round_s: dict[int, float] = {}
        """Seconds of a round, by the bit length of its number of rows."""

    def draw(
        self,
        places: Sequence[Place],
        rows: Sequence[int],
        logits: torch.Tensor,
        growth: GrowthPolicy,
        num_branches: int,
    ) -> list[Round] | None:
        """Guesses for all places; in later rounds, for the places that may continue.

        There is one round while another sequence waits for a step. Returns None if there is no drawing, if a place's
        guess needs more than drawing (a mask, or an adjustment that `drawing` does not take), or if verify modes
        differ.

        Args:
            places: heads whose tokens are all computed.
            rows: for each place, the row of `logits` after its last token.
            logits: of the step that computed these rows.
            growth: bounds on trees.
            num_branches: heads that a session may have besides its main one.
        """
        drawing = self.drawing
        modes = {session.mode for session, _ in places}
        if drawing is None or len(modes) > 1 or not (drawing.has_sparse or VerifyMode.COUPLED in modes):
            return None
        most_rounds = 1 if self._branches.any_ready() else self._num_rounds(len(places))
        wanted: list[DrawRow] = []
        for (session, head), row in zip(places, rows, strict=True):
            if session.rule is None or not drawing.takes(session.rule):
                return None
            num_rounds = min(most_rounds, self._useful_rounds(session, head, growth))
            wanted.append(self._row(session, session.rule, head, row, num_rounds, growth, num_branches))
        started_s = time.monotonic()
        if VerifyMode.REJECTION in modes:
            samples = drawing.draw_sparse(wanted, logits, self._num_sparse)
            guesses = [[None if each is None else guess_of_sample(each) for each in of_row] for of_row in samples]
        else:
            drawn = drawing.draw(wanted, logits, drawn_tokens(self._num_siblings))
            guesses = [[guess_of(*each, self._num_siblings) for each in of_row] for of_row in drawn]
        if drawing.num_passes:
            self._timed(len(places), (time.monotonic() - started_s) / drawing.num_passes)
        rounds: list[Round] = [[] for _ in range(max(map(len, guesses)))]
        for place, of_place in zip(places, guesses, strict=True):
            if len(of_place) > 1:
                self._engine.ahead.hold(place[1].seq, [guess.token_id for guess in of_place[:-1] if guess is not None])
            for guess_round, guess in zip(rounds, of_place, strict=False):
                guess_round.append((place, guess))
        return rounds

    def due(self, rounds: list[Round]) -> Iterator[Round]:
        """Yield the first round, then of each later round the guesses of heads that would step next. If rounds end at
        forks, stop at a round that lacks a guess for such a head; otherwise heads forked meanwhile join the next step.

        Before a round is yielded, the tokens before it count as computed. At the end unused tokens are dropped.
        """
        slots = self._engine.ahead
        yield rounds[0]
        for guesses in rounds[1:]:
            ready = {id(head) for head in self._branches.ready_heads()}
            going = [each for each in guesses if id(each[0][1]) in ready and slots.is_known(each[0][1].seq)]
            if not going or (self._ends_at_forks and len(going) < len(ready)):
                break
            for (_, head), _ in going:
                slots.take(head.seq)
            yield going
        slots.release()

    def _row(
        self,
        session: DraftSession,
        rule: DrawRule,
        head: GrowingLeaf,
        row: int,
        num_rounds: int,
        growth: GrowthPolicy,
        num_branches: int,
    ) -> DrawRow:
        if num_rounds > 1:
            num_rounds = 1 + self._engine.ahead.reserve(head.seq, num_rounds - 1)
        may_fork = self._ends_at_forks and self._num_siblings > 0 and len(session.heads) - 1 < num_branches
        return DrawRow(
            rule=rule,
            logits_row=row,
            position=len(head.seq.token_ids),
            num_rounds=num_rounds,
            block_ids=head.seq.block_ids,
            path_score=session.path_score(head.node),
            least_path_score=growth.min_path_score,
            least_fork_score=growth.min_branch_score if may_fork else math.inf,
            ends_all=self._ends_at_forks and head is not session.heads[0],
            adjusting=row_context(session, head) if rule.params.adjusts_logits else None,
            chain=session.chain_id(head),
        )

    def _useful_rounds(self, session: DraftSession, head: GrowingLeaf, growth: GrowthPolicy) -> int:
        """The greatest number of tokens that may follow a head's; at least 1."""
        num_tokens = len(head.seq.token_ids)
        limits = (
            session.max_depth(growth) - session.tree.depth(head.node),
            growth.node_limit - len(session.tree),
            session.body.num_prompt_tokens + session.params.max_tokens - num_tokens,
            self._max_model_len + 1 - num_tokens,
        )
        return max(1, min(limits))

    def _num_rounds(self, num_rows: int) -> int:
        """Number of rounds that fit into a call; two while a round's time is unknown."""
        bucket = num_rows.bit_length()
        round_s = self._round_s.get(bucket)
        if round_s is None:
            return min(2, self.most_rounds)
        most_call_s = 0.0 if self.drawing is None else self.drawing.most_call_s
        num_rounds = max(1, min(self.most_rounds, int(most_call_s / round_s)))
        if num_rounds == 1:
            self._round_s[bucket] = round_s * _FORGETTING
        return num_rounds

    def _timed(self, num_rows: int, round_s: float) -> None:
        """Note a round's time: a shorter one at once, a longer one gradually, as other processes may have caused it."""
        bucket = num_rows.bit_length()
        known_s = self._round_s.get(bucket, round_s)
        self._round_s[bucket] = min(round_s, known_s + (round_s - known_s) / 8)


def drawn_tokens(num_siblings: int) -> int:
    """Tokens per draw: the guess, its siblings, and at least one more for the score."""
    return 1 + max(1, num_siblings)
