"""Losses of the target and of the draft, from hidden states to nats, compiled as one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in nats per token; ``hidden`` is (tokens, width), ``head`` (vocabulary, width)."""
    return functional.cross_entropy((hidden @ head.t()).float(), labels)


def distillation_loss(
    target_hidden: Tensor, target_head: Tensor, draft_hidden: Tensor, draft_head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(target || draft), total variation, and cross-entropy on the target's greedy token.

    One minus the total variation is the acceptance of rejection sampling at temperature 1; the
    last term is what greedy agreement asks for.
    """
    teacher = (target_hidden @ target_head.t()).float().log_softmax(-1)
    draft_log = (draft_hidden @ draft_head.t()).float().log_softmax(-1)
    probabilities = teacher.exp()
    divergence = (probabilities * (teacher - draft_log)).sum(-1).mean()
    variation = 0.5 * (probabilities - draft_log.exp()).abs().sum(-1).mean()
    greedy = functional.nll_loss(draft_log, teacher.argmax(-1))
    return divergence, variation, greedy


compiled_next_token_loss = torch.compile(next_token_loss, dynamic=False)
compiled_distillation_loss = torch.compile(distillation_loss, dynamic=False)
