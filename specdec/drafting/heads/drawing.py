"""Chooses a head's tokens from its logits and estimates the probability that the target takes them.

Coupled verification: the head samples with the target's noise. Its first choice is the target's token if their logits
agree enough; its runners-up come next under the same noise. Rejection verification: the head takes the likeliest tokens
without noise, as each counts as certain (a point mass) and must not depend on the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.perturbed_top import shares
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.wire.sampling_params import SamplingParams

Choices = list[tuple[int, float]]
"""Tokens, best first, each with the estimated probability that the target takes it after its parent."""


def choose(sampler: Sampler, logits: torch.Tensor, rows: Sequence[RowContext], num_choices: int) -> list[Choices]:
    """The best tokens of each row of logits [R, V]; an empty list if no token is allowed. Raises NonFiniteLogits for
    NaN.
    """
    if not rows:
        return []
    drawn = sampler.candidates(logits, rows, max(2, num_choices))
    if not all(drawn) and bool(torch.isnan(logits).any()):  # a row with NaN has no candidates
        raise NonFiniteLogits
    return [
        list(zip([each.token_id for each in best], shares([each.score for each in best]), strict=True))[:num_choices]
        for best in drawn
    ]


def warm_up(sampler: Sampler, num_logits: int, num_choices: int) -> None:
    """Choose once with and without top-p on a GPU, so that no draft waits for the kernels' compilation.

    `num_logits`: size of a row of logits.
    """
    if sampler.device.type == "cpu":
        return
    logits = torch.zeros(1, num_logits, device=sampler.device)
    for params in (SamplingParams(max_tokens=1, seed=0), SamplingParams(max_tokens=1, seed=0, top_p=0.5)):
        choose(sampler, logits, [RowContext(params, 1, 1)], num_choices)


def without_noise(row: RowContext) -> RowContext:
    """The same row, without noise: its likeliest token is taken."""
    return row._replace(params=replace(row.params, temperature=0.0))


def after(row: RowContext, path: tuple[int, ...]) -> RowContext:
    """The row that follows uncommitted tokens."""
    return row._replace(position=row.position + len(path), extra_tokens=path)
