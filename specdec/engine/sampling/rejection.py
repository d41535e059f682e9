"""Rejection verification: the output has the target's distribution p for any distribution q of the draft.

Accept the draft's token x with probability min(1, p(x) / q(x)), else sample from norm(max(0, p - q)). Source:
Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", arXiv:2211.17192, Algorithm 1;
Chen et al., arXiv:2302.01318, Algorithm 2.

The guarantee has three conditions. First, the pairs that the draft sends are q: it samples from them after rounding for
the wire, and both sides divide them by the same sum. Second, the draft's sample, the accept test and the residual
sample use independent random numbers (`Purpose`). Third, whether a position's token is verified may depend on committed
tokens and on its q, never on that token or later ones: dropping a token for its low q is biased, and so is sending a
chain sooner because of a token in it. docs/rejection.md has the argument and all decisions that it concerns.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.wire.sampling_params import SamplingParams


class InvalidDraftDistribution(ValueError):
    """The pairs of a drafted token are no distribution, or cannot have given the token."""


@dataclass(frozen=True, slots=True)
class DraftSample:
    """A drafted token and the sparse distribution from which it was sampled.

    q(ids[i]) = probs[i] / fsum(probs), exactly, at draft and target; 0 for all other ids.
    """

    token_id: int
    ids: tuple[int, ...]
    probs: tuple[float, ...]
    """Positive float32 values, as sent."""

    def check(self, vocab_size: int) -> None:
        """Raise InvalidDraftDistribution unless an honest draft can have sent this."""
        if len(self.ids) != len(self.probs):
            raise InvalidDraftDistribution(f"{len(self.ids)} ids but {len(self.probs)} probabilities")
        if len(set(self.ids)) != len(self.ids):
            raise InvalidDraftDistribution("an id occurs twice")
        if not all(0 <= token_id < vocab_size for token_id in self.ids):
            raise InvalidDraftDistribution(f"an id is outside the vocabulary of {vocab_size}")
        if not all(math.isfinite(prob) and prob > 0.0 for prob in self.probs):
            raise InvalidDraftDistribution("a probability is not positive and finite")
        if self.token_id not in self.ids:
            raise InvalidDraftDistribution(f"token {self.token_id} is outside its own distribution")


def verify_token(target_probs: Tensor, draft: DraftSample, params: SamplingParams, t: int) -> tuple[bool, int]:
    """Verify one drafted token. Given a draft sampled from q, the returned token has the target's distribution.

    Args:
        target_probs: [V] float32, the target's processed distribution at `t` (`Sampler.probs`); normalised here by its
            float64 sum.
        draft: the token and its checked distribution.
        params: the session's parameters; if greedy, the token must equal the best one.
        t: absolute position of the token.

    Returns:
        (True, the draft's token) or (False, the token that replaces it).

    Raises:
        NonFiniteLogits: the target's distribution is NaN.

    Cost: a sum over V, and a few passes over V after a rejection.
    """
    if params.is_greedy:
        tied = (target_probs == target_probs.max()).nonzero()
        if not len(tied):
            raise NonFiniteLogits
        best = int(tied[0, 0])
        return best == draft.token_id, best
    draft_sum = math.fsum(draft.probs)
    draft_prob = draft.probs[draft.ids.index(draft.token_id)] / draft_sum
    target = target_probs.to(torch.float64)
    target = target / target.sum()
    u = uniform(params.seed, params.choice, Purpose.ACCEPT, t)
    target_prob = float(target[draft.token_id])
    if math.isnan(target_prob):
        raise NonFiniteLogits
    if u * draft_prob < target_prob:
        return True, draft.token_id
    ids = torch.tensor(draft.ids, device=target.device)
    probs = torch.tensor(draft.probs, dtype=torch.float64, device=target.device) / draft_sum
    residual = target.index_add(0, ids, probs, alpha=-1).clamp_(min=0.0)
    cumulated = residual.cumsum(0)
    total = cumulated[-1:]
    if float(total) <= 0.0:
        return True, draft.token_id  # p = q up to rounding
    u = uniform(params.seed, params.choice, Purpose.RESIDUAL, t)
    index = int(torch.searchsorted(cumulated, total * u, right=True))
    if index == len(cumulated):  # the product rounded up to the total
        index = int(residual.nonzero()[-1, 0])
    return False, index
