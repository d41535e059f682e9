"""Losses of the target and of the draft, from hidden states to nats, compiled as one kernel each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cotraining_loss(
    target_hidden: Tensor, target_head: Tensor, draft_hidden: Tensor, draft_head: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return target cross-entropy, KL(target || draft) and draft cross-entropy, in nats per token.

    Hidden states are (tokens, width), heads (vocabulary, width). The target gets no gradient from
    the draft's losses.
    """
    target_log = (target_hidden @ target_head.t()).float().log_softmax(-1)
    draft_log = (draft_hidden @ draft_head.t()).float().log_softmax(-1)
    index = labels[:, None]
    target_ce = -target_log.gather(1, index).mean()
    draft_ce = -draft_log.gather(1, index).mean()
    teacher = target_log.detach()
    divergence = (teacher.exp() * (teacher - draft_log)).sum(-1).mean()
    return target_ce, divergence, draft_ce


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


compiled_cotraining_loss = torch.compile(cotraining_loss, dynamic=False)
compiled_distillation_loss = torch.compile(distillation_loss, dynamic=False)
