"""The draft's next token for each session, the runners-up, and how likely each is to be the target's token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.session import DraftedToken, DraftSession
from specdec.engine.sampling import RowContext, Sampler
from specdec.sampling_params import VerifyMode


@dataclass(frozen=True, slots=True)
class Guesser:
    """Guesses next tokens from the draft's logits.

    Attributes:
        sampler: applies the target's processing of logits and, in coupled mode, the target's noise.
        num_siblings: runners-up offered beside each token of a coupled chain. They cost the draft nothing: where the
            target samples one of them instead, the step commits it and one more token.
        num_sparse: rejection mode: size of the distribution that a token is drawn from.
    """

    sampler: Sampler
    num_siblings: int
    num_sparse: int

    def guess(self, sessions: Sequence[DraftSession], logits: torch.Tensor, draft_us: int) -> list[DraftedToken]:
        """One token per session from its row of `logits` [R, V]."""
        contexts = [_context(session) for session in sessions]
        guesses: dict[int, DraftedToken] = {}
        for mode, draw in ((VerifyMode.COUPLED, self._coupled), (VerifyMode.REJECTION, self._rejection)):
            rows = [row for row, session in enumerate(sessions) if session.mode is mode]
            if rows:
                own = logits if len(rows) == len(sessions) else logits[rows]
                guesses.update(zip(rows, draw(own, [contexts[row] for row in rows], draft_us), strict=True))
        return [guesses[row] for row in range(len(sessions))]

    def _coupled(self, logits: torch.Tensor, contexts: list[RowContext], draft_us: int) -> list[DraftedToken]:
        drafted = []
        for candidates in self.sampler.candidates(logits, contexts, 1 + max(1, self.num_siblings)):
            scores = _softmax([candidate.score for candidate in candidates])
            (first, *others), (score, *other_scores) = candidates, scores
            siblings = tuple((c.token_id, s) for c, s in zip(others, other_scores, strict=True))
            drafted.append(DraftedToken(first.token_id, score, siblings[: self.num_siblings], None, draft_us))
        return drafted

    def _rejection(self, logits: torch.Tensor, contexts: list[RowContext], draft_us: int) -> list[DraftedToken]:
        samples = self.sampler.draft_sample(logits, contexts, self.num_sparse)
        return [DraftedToken(sample.token_id, 1.0, (), sample, draft_us) for sample in samples]


def _context(session: DraftSession) -> RowContext:
    chain = tuple(token.token_id for token in session.chain)
    return RowContext(
        params=session.params,
        position=session.num_committed + len(chain),
        num_prompt_tokens=session.body.num_prompt_tokens,
        history=session.history,
        extra_tokens=chain,
    )


def _softmax(scores: Sequence[float]) -> list[float]:
    """Of scores with noise: how likely each is to stay the best under a small change of the logits.

    Only the order and the rough size matter: the target learns the acceptance rate of each band of scores.
    """
    weights = [math.exp(score - scores[0]) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
