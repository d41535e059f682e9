"""The best tokens of scores plus Gumbel noise: exact, ties to the lowest id, without computing all noise.

Every token is hashed. The two float64 logarithms of its noise are computed only if an upper bound allows the token
among the best: a handful per row.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.engine.sampling.logit_processors import temperature_scores
from specdec.engine.sampling.noise import gumbel_from_bits, hash_u32

_BOUND_SLACK = 1e-3
"""Slack above the float32 rounding of bounds that can still win."""


def perturbed_top(
    logits: Tensor, temperatures: Sequence[float], keys: Sequence[int], num_top: int
) -> tuple[list[int], list[float]]:
    """The `num_top` best tokens of (logits - best) / temperature + gumbel, best first, ties by ascending id.

    Rows of temperature 0 are ranked by their logits alone. A row's result depends on that row only.

    Args:
        logits: [R, V] float32.
        temperatures: R values, 0 or at least `MIN_TEMPERATURE`.
        keys: two u32 of each row's noise key, 2 * R values.
        num_top: at most V.

    Returns:
        Token ids and float32 scores, R * num_top of each, row by row. If fewer than `num_top` tokens of a row are above
        minus infinity, the rest has that score and no meaning. If a row holds NaN or plus infinity, or nothing above
        minus infinity, all its scores are NaN.
    """
    token_ids = [0] * (len(temperatures) * num_top)
    scores = [-math.inf] * (len(temperatures) * num_top)
    greedy = [r for r, temperature in enumerate(temperatures) if temperature == 0.0]
    noisy = [r for r, temperature in enumerate(temperatures) if temperature != 0.0]
    for rows in (greedy, noisy):
        if not rows:
            continue
        part = logits if len(rows) == len(temperatures) else logits[rows]
        if rows is greedy:
            found = _survivors(part, part, part, num_top)
        else:
            found = _noisy_survivors(
                part, [temperatures[r] for r in rows], [keys[2 * r : 2 * r + 2] for r in rows], num_top
            )
        for r, best in zip(rows, found, strict=True):
            if not best or not math.isfinite(best[0][0]):
                scores[r * num_top : (r + 1) * num_top] = [math.nan] * num_top
                continue
            for i, (score, token_id) in enumerate(best):
                token_ids[r * num_top + i] = token_id
                scores[r * num_top + i] = score
    return token_ids, scores


def _noisy_survivors(
    logits: Tensor, temperatures: Sequence[float], keys: Sequence[Sequence[int]], num_top: int
) -> list[list[tuple[float, int]]]:
    device = logits.device
    scores = temperature_scores(logits, temperatures)  # [R, V]
    hashes = hash_u32(
        torch.tensor(keys, dtype=torch.int64, device=device), torch.arange(logits.shape[1], device=device)
    )  # [R, V]
    # -log(-log1p(-u)) <= -log(u), and nearly equal where large enough to win. The slack is added to the noise, as it
    # would be lost in scores of a million.
    bounds = hashes.to(torch.float32).add_(0.5).mul_(2.0**-32).log_().neg_().add_(_BOUND_SLACK).add_(scores)
    return _survivors(bounds, scores, hashes, num_top)


def _survivors(bounds: Tensor, scores: Tensor, hashes: Tensor, num_top: int) -> list[list[tuple[float, int]]]:
    """Rank the tokens whose bound reaches the `num_top`-th exact value among the best bounds.

    A NaN bound leaves no token: `topk` ranks NaN first, so that the threshold is NaN.
    """
    noisy = hashes is not scores
    guess = bounds.topk(num_top, dim=1).indices  # [R, num_top]
    exact = scores.gather(1, guess)
    if noisy:
        exact = exact + gumbel_from_bits(hashes.gather(1, guess))
    threshold = exact.amin(dim=1, keepdim=True)
    row_ids, token_ids = ((bounds >= threshold) & (bounds > -math.inf)).nonzero(as_tuple=True)
    values = scores[row_ids, token_ids]
    if noisy:
        values = values + gumbel_from_bits(hashes[row_ids, token_ids])
    ranked: list[list[tuple[float, int]]] = [[] for _ in range(bounds.shape[0])]
    for r, token_id, value in zip(row_ids.tolist(), token_ids.tolist(), values.tolist(), strict=True):
        ranked[r].append((-value, token_id))
    return [[(-value, token_id) for value, token_id in sorted(best)[:num_top]] for best in ranked]


def shares(scores: Sequence[float]) -> list[float]:
    """Softmax of noisy scores, best first: estimated probability of each to be the target's token.

    Only order and rough size matter: the target learns how often each size is right.
    """
    weights = [math.exp(score - scores[0]) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
