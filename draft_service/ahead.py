"""Several guesses per head in one native call, where that is what as many steps would have guessed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from draft_service.growth import GrowthPolicy
from draft_service.guess import Place, guess_of
from draft_service.session import DraftSession, Guess, Head
from specdec.engine.engine import Engine
from specdec.engine.model.drawing import DrawingDecoder, DrawRow

MOST_ROUNDS = 4
_MOST_CALL_S = 1e-3
"""Commits wait for the end of a call: it computes only as many rounds as fit."""
_FORGETTING = 0.9
"""A time that was too long for a second round counts for this much less at the next chance, so that it is tried again."""

Round = list[tuple[Place, Guess | None]]


class Ahead:
    """Draws the next tokens of all heads of a step, and computes all of them but the last.

    What it draws is held for the sequences (`AheadSlots`) and hung in the trees round by round, as long as the heads
    that would step next are among those it drew for. So trees are those that single steps would have grown, token for
    token and in the same order.
    """

    def __init__(self, engine: Engine, drawing: DrawingDecoder | None, num_siblings: int, max_model_len: int) -> None:
        self.most_rounds = MOST_ROUNDS
        self._engine = engine
        self._drawing = drawing
        self._num_siblings = num_siblings
        self._max_model_len = max_model_len
        self._round_s: dict[int, float] = {}
        """What a round took, by the number of bits of its number of rows."""

    def draw(
        self,
        places: Sequence[Place],
        rows: Sequence[int],
        logits: torch.Tensor,
        growth: GrowthPolicy,
        num_branches: int,
        *,
        alone: bool,
    ) -> list[Round] | None:
        """Guesses for all places, and in the rounds after the first for those of them that may go on.

        None if some place's guess is more than a draw: logits that are adjusted first, a draft for rejection sampling,
        or a decoder without native calls.

        Args:
            places: heads whose tokens are all computed.
            rows: of each, the row of `logits` that follows its last token.
            logits: of the step that has computed it.
            growth: how far trees grow.
            num_branches: how many heads each session may have besides its main one.
            alone: nobody else waits for a step; else there is one round.
        """
        if self._drawing is None or any(session.rule is None for session, _ in places):
            return None
        most_rounds = self._num_rounds(len(places)) if alone else 1
        wanted = [
            self._row(session, head, row, min(most_rounds, self._useful_rounds(session, head, growth)), growth, num_branches)
            for (session, head), row in zip(places, rows, strict=True)
        ]
        started_s = time.monotonic()
        drawn = self._drawing.draw(wanted, logits, 1 + max(1, self._num_siblings))
        num_rounds = max(map(len, drawn))
        if num_rounds > 1:
            self._timed(len(places), (time.monotonic() - started_s) / (num_rounds - 1))
        rounds: list[Round] = [[] for _ in range(num_rounds)]
        for place, draws in zip(places, drawn, strict=True):
            if len(draws) > 1:
                self._engine.ahead.hold(place[1].seq, [token_ids[0] for token_ids, _ in draws[:-1]])
            for guesses, (token_ids, scores) in zip(rounds, draws, strict=False):
                guesses.append((place, guess_of(token_ids, scores, self._num_siblings)))
        return rounds

    def goes_on(self, ready: list[Head], guesses: Round) -> bool:
        """Take what is pending for computed, where `guesses` are those of all heads that have anything pending."""
        drawn = {id(head) for (_, head), _ in guesses}
        if not ready or not all(id(head) in drawn and self._engine.ahead.is_known(head.seq) for head in ready):
            return False
        for head in ready:
            self._engine.ahead.take(head.seq)
        return True

    def _row(
        self, session: DraftSession, head: Head, row: int, num_rounds: int, growth: GrowthPolicy, num_branches: int
    ) -> DrawRow:
        seq = head.seq
        if num_rounds > 1:
            num_rounds = 1 + self._engine.ahead.reserve(seq, num_rounds - 1)
        forks = self._num_siblings > 0 and len(session.heads) - 1 < num_branches
        assert session.rule is not None
        return DrawRow(
            rule=session.rule,
            logits_row=row,
            position=len(seq.token_ids),
            num_rounds=num_rounds,
            block_ids=seq.block_ids,
            path_score=session.path_score(head.node),
            least_path_score=growth.min_path_score,
            least_fork_score=growth.min_branch_score if forks else math.inf,
            ends_all=head is not session.heads[0],
        )

    def _useful_rounds(self, session: DraftSession, head: Head, growth: GrowthPolicy) -> int:
        """How many tokens could follow a head's, whatever they are; 1 at least."""
        num_tokens = len(head.seq.token_ids)
        return max(
            1,
            min(
                growth.max_depth(session.target_credit) - session.tree.depth(head.node),
                growth.node_limit - len(session.tree),
                session.body.num_prompt_tokens + session.params.max_tokens - num_tokens,
                self._max_model_len + 1 - num_tokens,
            ),
        )

    def _num_rounds(self, num_rows: int) -> int:
        """How many rounds fit into a call; two where it is not known what one takes."""
        bucket = num_rows.bit_length()
        round_s = self._round_s.get(bucket)
        if round_s is None:
            return min(2, self.most_rounds)
        num_rounds = max(1, min(self.most_rounds, int(_MOST_CALL_S / round_s)))
        if num_rounds == 1:
            self._round_s[bucket] = round_s * _FORGETTING
        return num_rounds

    def _timed(self, num_rows: int, round_s: float) -> None:
        """Remember what rounds take: what is shorter at once, what is longer bit by bit, as it may be somebody else's."""
        bucket = num_rows.bit_length()
        known_s = self._round_s.get(bucket, round_s)
        self._round_s[bucket] = min(round_s, known_s + (round_s - known_s) / 8)
