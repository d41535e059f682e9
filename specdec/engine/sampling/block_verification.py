"""Block verification: accepts a prefix of a drafted chain as a whole; the output has the target's distribution.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv:2403.10444, Algorithm 2. A token with a
high p/q makes up for an earlier one with a low p/q. With weights w[0] = 1 and w[i] = min(1, w[i-1] p(x[i]) / q(x[i])),
at least i tokens are accepted with probability w[i]; no other rule accepts more on average. Token by token it would be
the product of min(1, p/q), which is never more.

The conditions of `rejection.py` apply: whether the chain continues after a token may depend on that token and earlier
ones, not on later ones. In addition, random numbers of positions past the accepted ones decide where the chain is cut.
So the numbers of accept tests and of the draft's samples belong to one chain (`noise.uniform`): a position that is
drafted again gets new ones.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample
from specdec.wire.sampling_params import SamplingParams


def verify_block(
    target_probs: Tensor, drafts: Sequence[DraftSample], params: SamplingParams, t: int
) -> tuple[int, int | None]:
    """Verify a chain; the accepted tokens and the returned one have the target's distribution.

    Args:
        target_probs: [N, V] float32, the target's processed distribution at each drafted token (`Sampler.probs`);
            normalised here by its float64 sum.
        drafts: N >= 1 tokens and their checked distributions.
        params: the session's parameters, not greedy.
        t: absolute position of the first token.

    Returns:
        The number of accepted tokens, and the token after them; None if all are accepted: the next token is then
        sampled as without a draft.

    Raises:
        NonFiniteLogits: a row is NaN.

    Cost: a few passes over [N, V].
    """
    target = target_probs.to(torch.float64)
    target = target / target.sum(dim=1, keepdim=True)
    if bool(target.isnan().any()):
        raise NonFiniteLogits
    weight = 1.0
    num_accepted = 0
    residuals: list[Tensor] = []
    for index, draft in enumerate(drafts):
        residual, probs = _residual(weight, target[index], draft)
        residuals.append(residual)
        if index and weight > 0.0:
            surplus = float(residual.sum())
            accept = 1.0 if weight >= 1.0 else surplus / (surplus + 1.0 - weight)
            if uniform(params.seed, params.choice, Purpose.ACCEPT, t + index - 1, t) < accept:
                num_accepted = index
        of_target = float(target[index, draft.token_id])
        weight = min(1.0, weight * of_target / probs[draft.token_id])
    if uniform(params.seed, params.choice, Purpose.ACCEPT, t + len(drafts) - 1, t) < weight:
        return len(drafts), None
    return num_accepted, _drawn(residuals[num_accepted], params, t + num_accepted, drafts[num_accepted].token_id)


def _residual(weight: float, target: Tensor, draft: DraftSample) -> tuple[Tensor, dict[int, float]]:
    """max(0, weight p - q), [V] float64, and the draft's probabilities by token."""
    total = math.fsum(draft.probs)
    probs = {token_id: prob / total for token_id, prob in zip(draft.ids, draft.probs, strict=True)}
    ids = torch.tensor(list(probs), device=target.device)
    values = torch.tensor(list(probs.values()), dtype=torch.float64, device=target.device)
    return (weight * target).index_add_(0, ids, values, alpha=-1).clamp_(min=0.0), probs


def _drawn(residual: Tensor, params: SamplingParams, t: int, drafted: int) -> int:
    cumulated = residual.cumsum(0)
    if float(cumulated[-1]) <= 0.0:
        return drafted  # p = q up to rounding
    u = uniform(params.seed, params.choice, Purpose.RESIDUAL, t)
    index = int(torch.searchsorted(cumulated, cumulated[-1:] * u, right=True))
    return int(residual.nonzero()[-1, 0]) if index == len(cumulated) else index
