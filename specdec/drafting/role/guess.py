"""Guesses the next token at each place, with runners-up and estimated probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.constraints.grammar.follower import MaskWords, NodeMask
from specdec.drafting.role.corrections import ACCEPTED
from specdec.drafting.role.session import DraftSession, GrowingLeaf, Guess
from specdec.engine.sampling.perturbed_top import shares
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.restrictions import masked_logits
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.replica.worker.isolation import each_or_halves
from specdec.wire.sampling_params import VerifyMode

MIN_SIBLING_SCORE = 0.03
"""Probability below which a runner-up costs the target more than it saves."""

Place = tuple[DraftSession, GrowingLeaf]


@dataclass(frozen=True, slots=True)
class Guesser:
    """Guesses next tokens from the draft's logits."""

    sampler: Sampler
    """Applies the target's processing of logits and, in coupled mode, the target's noise."""
    num_siblings: int
    """Runners-up offered beside each token in coupled mode. If the target samples one of them, its step commits one
    more token.
    """
    num_sparse: int
    """Rejection mode: tokens of the distribution from which a guess is sampled."""

    def guess_each(
        self,
        places: Sequence[Place],
        rows: Sequence[int],
        logits: torch.Tensor,
        on_fault: Callable[[DraftSession, Exception], None],
    ) -> list[tuple[Place, Guess | None]]:
        """A guess for each place; a session whose guess raises is passed to `on_fault`.

        Args:
            places: in any order.
            rows: for each place, the row of `logits` after its last token.
            logits: of the step.
            on_fault: called with the session and the error.
        """
        of_sessions: dict[int, list[int]] = {}
        for index, (session, _) in enumerate(places):
            of_sessions.setdefault(id(session), []).append(index)

        def guess(groups: list[list[int]]) -> list[tuple[Place, Guess | None]]:
            indices = sorted(index for group in groups for index in group)  # in the order of their rows
            own = [rows[index] for index in indices]
            some = [places[index] for index in indices]
            return list(zip(some, self.guess(some, logits if len(own) == len(logits) else logits[own]), strict=True))

        return each_or_halves(
            list(of_sessions.values()), guess, lambda group, error: on_fault(places[group[0]][0], error)
        )

    def guess(self, places: Sequence[Place], logits: torch.Tensor) -> list[Guess | None]:
        """One guess per place from its row of `logits` [R, V]; None if nothing can be sampled from it."""
        contexts = [row_context(session, head) for session, head in places]
        masks: dict[int, MaskWords] = {}
        for row, (session, _) in enumerate(places):
            if (mask := _mask(session, contexts[row])) is not None and mask.words is not None and mask.words.any():
                masks[row] = mask.words
                contexts[row] = contexts[row]._replace(must_end=mask.must_end)
        logits = masked_logits(logits, masks)
        guesses: dict[int, Guess | None] = {}
        for mode in VerifyMode:
            rows = [row for row, (session, _) in enumerate(places) if session.mode is mode]
            if not rows:
                continue
            own, of_rows = logits if len(rows) == len(places) else logits[rows], [contexts[row] for row in rows]
            if mode is VerifyMode.COUPLED:
                drawn = self._coupled(own, of_rows)
            else:
                drawn = self._rejection(
                    own, of_rows, [session.chain_id(head) for session, head in (places[row] for row in rows)]
                )
            guesses.update(zip(rows, drawn, strict=True))
        return [guesses[row] for row in range(len(places))]

    def _coupled(self, logits: torch.Tensor, contexts: list[RowContext]) -> list[Guess | None]:
        drawn = self.sampler.candidates(logits, contexts, 1 + max(1, self.num_siblings))
        return [guess_of([c.token_id for c in best], [c.score for c in best], self.num_siblings) for best in drawn]

    def _rejection(self, logits: torch.Tensor, contexts: list[RowContext], chains: list[int]) -> list[Guess | None]:
        samples = self.sampler.draft_sample(logits, contexts, self.num_sparse, chains)
        return [None if sample is None else guess_of_sample(sample) for sample in samples]


def guess_of_sample(sample: DraftSample) -> Guess:
    """The guess of a sample for rejection verification."""
    return Guess(sample.token_id, ACCEPTED, (), sample)


def guess_of(token_ids: Sequence[int], scores: Sequence[float], num_siblings: int) -> Guess | None:
    """The guess of a draw's best tokens, best first; None without a valid token.

    Tokens with a score of minus infinity or NaN are invalid; they come last.
    """
    found = [score for score in scores if score > -math.inf]
    if not found:
        return None
    estimates = shares(found)
    runners_up = zip(token_ids[1 : 1 + num_siblings], estimates[1:], strict=False)
    siblings = tuple((token_id, estimate) for token_id, estimate in runners_up if estimate >= MIN_SIBLING_SCORE)
    return Guess(token_ids[0], estimates[0], siblings)


def _mask(session: DraftSession, context: RowContext) -> NodeMask | None:
    """The mask of a session's constraint; None without a constraint."""
    if session.grammar is None:
        return None
    params = session.params
    holds_back = params.holds_back(context.position - context.num_prompt_tokens)
    return session.grammar.mask_after(context.extra_tokens, params.min_tokens_ids if holds_back else ())


def row_context(session: DraftSession, head: GrowingLeaf) -> RowContext:
    """The sampler's context of the token after a head's."""
    drafted = tuple(head.seq.token_ids[session.num_committed :])
    return RowContext(
        params=session.params,
        position=session.num_committed + len(drafted),
        num_prompt_tokens=session.body.num_prompt_tokens,
        history=session.history,
        extra_tokens=drafted,
    )
