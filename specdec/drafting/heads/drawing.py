"""From a head's logits to tokens that the target may take, with a guess at how likely that is.

Coupled verification: the head draws with the target's noise, so that its first choice is the target's token wherever
their logits agree enough, and its runners-up are those that come next under the same noise. Rejection verification: the
likeliest tokens without noise; each counts as certain (a point mass), and must not depend on what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.wire.sampling_params import SamplingParams

Choices = list[tuple[int, float]]
"""Tokens, best first, each with an estimated probability that the target takes it after its parent."""


def choose(sampler: Sampler, logits: torch.Tensor, rows: Sequence[RowContext], num_choices: int) -> list[Choices]:
    """The best tokens of each row of logits [R, V]; none where none may be drawn. Raises NonFiniteLogits for NaN."""
    if not rows:
        return []
    drawn = sampler.candidates(logits, rows, max(2, num_choices))
    if not all(drawn) and bool(torch.isnan(logits).any()):  # of a row with NaN nothing is drawn
        raise NonFiniteLogits
    return [
        list(zip([each.token_id for each in best], shares([each.score for each in best]), strict=True))[:num_choices]
        for best in drawn
    ]


def warm_up(sampler: Sampler, num_logits: int, num_choices: int) -> None:
    """Choose once, with cuts and without, where a compiler makes what chooses so many: no draft waits for it then.

    `num_logits`: of a row.
    """
    if sampler.device.type == "cpu":
        return
    logits = torch.zeros(1, num_logits, device=sampler.device)
    for params in (SamplingParams(max_tokens=1, seed=0), SamplingParams(max_tokens=1, seed=0, top_p=0.5)):
        choose(sampler, logits, [RowContext(params, 1, 1)], num_choices)


def without_noise(row: RowContext) -> RowContext:
    """The same row, of which the likeliest token is taken."""
    return replace(row, params=replace(row.params, temperature=0.0))


def after(row: RowContext, path: tuple[int, ...]) -> RowContext:
    """The row that follows uncommitted tokens."""
    return replace(row, position=row.position + len(path), extra_tokens=path)


def shares(scores: Sequence[float]) -> list[float]:
    """Only their order and rough size matter: the target learns how often each size is right."""
    weights = [math.exp(score - scores[0]) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
