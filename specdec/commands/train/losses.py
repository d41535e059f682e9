"""Losses of a draft against its target, and its acceptance, row by row.

With p of the target and q of the draft, both after temperature:

    ratio test    sum_i min(p_i, q_i)
    coupled       sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

The second is the probability that both draw the same token with the same noise (Daliri, Musco, Suresh,
arXiv:2408.07978). Sorted by falling p / q, its inner sum is (p of all up to i) / p_i + (q of all after i) / q_i, so a
sort and two running sums replace all pairs.

A draft may know fewer tokens than the target. Then p has the columns of those tokens, unscaled; the rest of the
probability lies on tokens that the draft never proposes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

LossName = Literal["kl", "tv", "lk", "lk_alpha", "coupled"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
_TINY = 1e-30
_LK_DECAY = 3.0
"""Rate at which KL's weight in `lk` falls as the overlap grows."""
_LEAST_SURE = 1e-6


def coupled_acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Probability [R] that target [R, D] and draft [R, D] draw the same token with the same noise.

    It is continuous in both, and differentiable except where two ratios are equal. It sorts each row.
    """
    order = (target_probs.clamp_min(_TINY).log() - draft_probs.clamp_min(_TINY).log()).argsort(-1, descending=True)
    p, q = target_probs.gather(-1, order), draft_probs.gather(-1, order)
    unknown = (1 - target_probs.sum(-1, keepdim=True)).clamp_min(0)
    before = p.cumsum(-1) + unknown
    after = (q.sum(-1, keepdim=True) - q.cumsum(-1)).clamp_min(0)
    return (p * q / (before * q + after * p).clamp_min(_TINY)).sum(-1)


def coupled_given(target_probs: torch.Tensor, draft_probs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Probability [R] that the draft draws the target's token, given that this is the one of `columns` [R]."""
    index = columns[:, None]
    p, q = target_probs.gather(-1, index), draft_probs.gather(-1, index)
    unknown = (1 - target_probs.sum(-1)).clamp_min(0)
    # q_y / (p_y q_y sum_j max(p_j / p_y, q_j / q_y)) / p_y, with all divisions drawn together.
    total = torch.maximum(target_probs * q, draft_probs * p).sum(-1) + unknown * q[:, 0]
    return (q[:, 0] / total.clamp_min(_TINY)).clamp_max(1)


def ratio_acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Probability [R] that the ratio test accepts what the draft [R, D] draws for the target [R, D]."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def ratio_given(target_probs: torch.Tensor, draft_probs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Probability [R] that the token comes from the draft, given that the ratio test ends with the one of `columns`."""
    index = columns[:, None]
    p, q = target_probs.gather(-1, index)[:, 0], draft_probs.gather(-1, index)[:, 0]
    return (q / p.clamp_min(_TINY)).clamp_max(1)


def loss_of(name: LossName, target_probs: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Loss [R], in nats but for `tv`, of draft logits [R, D] against the target's probabilities [R, D].

    kl: KL(target || draft), over the tokens that the draft knows. tv: total variation, one minus the ratio test's
    acceptance. lk_alpha: minus the log of that. lk: KL and total variation, the former weighing less as the overlap
    grows (arXiv:2602.23881). coupled: minus the log of the coupled acceptance.
    """
    log_q = draft_logits.float().log_softmax(-1)
    if name == "kl":
        return _divergence(target_probs, log_q)
    q = log_q.exp()
    if name == "coupled":
        return -coupled_acceptance(target_probs, q).clamp_min(_TINY).log()
    overlap = ratio_acceptance(target_probs, q)
    if name == "tv":
        return 1 - overlap
    if name == "lk_alpha":
        return -overlap.clamp_min(_TINY).log()
    share = torch.exp(-_LK_DECAY * overlap.detach())
    return share * _divergence(target_probs, log_q) + (1 - share) * (1 - overlap)


def confidence_loss(confidence: torch.Tensor, target_probs: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [R], in nats, of a head's confidence [R] against the coupled acceptance of its tokens.

    The acceptance comes from draft logits [R, D] and the target's probabilities [R, D], without gradients.
    """
    with torch.no_grad():
        share = coupled_acceptance(target_probs, draft_logits.float().softmax(-1))
    sure = confidence.float().clamp(_LEAST_SURE, 1 - _LEAST_SURE)
    return -(share * sure.log() + (1 - share) * (-sure).log1p())


def _divergence(target_probs: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (target_probs * (target_probs.clamp_min(_TINY).log() - log_q)).sum(-1)
