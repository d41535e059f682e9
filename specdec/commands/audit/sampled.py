"""Sampled output held against the reference's distribution, by Pearson's chi-square.

Two kinds of tests. The *first tokens* of a prompt's answers are counted against the reference's distribution there. Of
all further tokens, each with a distribution of its own, a *place* is taken: the reference's tokens lie on [0, 1] side
by side, the likeliest first, each as wide as it is likely, and the place is a point at random on the stretch of the
token that was sampled (Rosenblatt's transform). Of a service that samples from the reference's distribution given the
tokens before, places are uniform and independent; a service that prefers likely tokens has too many on the left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NUM_BINS = 20
"""Of places."""
_LEAST_EXPECTED = 5.0
"""Rarer cells are put together."""
_SURELY_FINE = 0.01
"""A p-value above it decides nothing, so that it may be approximate."""
_DRAWN_AT_ONCE, _MOST_DRAWN, _ENOUGH_LARGER = 50_000, 1_000_000, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One test."""

    what: str
    num_samples: int
    num_cells: int
    chi_square: float
    p_value: float
    """How often a service that samples rightly looks at least as wrong."""


def chi_square(what: str, counts: Sequence[float], probs: Sequence[float]) -> Fit | None:
    """Pearson's test of counts under probabilities that add up to 1; None where there are too few for any.

    Cells that are expected fewer than five times are one. Far out the statistic is distributed as chi-square only
    roughly, so small p-values are those of counts drawn at random.
    """
    total = sum(counts)
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for count, prob in zip(counts, probs, strict=True):
        if total * prob >= _LEAST_EXPECTED:
            cells.append((count, total * prob))
        else:
            rare = [rare[0] + count, rare[1] + total * prob]
    if cells and rare[1] < _LEAST_EXPECTED:
        least = min(range(len(cells)), key=lambda index: cells[index][1])
        cells[least] = cells[least][0] + rare[0], cells[least][1] + rare[1]
    else:
        cells.append((rare[0], rare[1]))
    if len(cells) < 2:
        return None
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return Fit(
        what=what,
        num_samples=int(total),
        num_cells=len(cells),
        chi_square=statistic,
        p_value=_p_value(statistic, [expected for _, expected in cells]),
    )


def _p_value(statistic: float, expected: Sequence[float]) -> float:
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    approximate = float(torch.special.gammaincc(half[0], half[1]))
    if approximate > _SURELY_FINE:
        return approximate
    rng, mean = np.random.default_rng(1), np.array(expected)
    num_drawn = num_larger = 0
    while num_drawn < _MOST_DRAWN and num_larger < _ENOUGH_LARGER:
        drawn = rng.multinomial(round(mean.sum()), mean / mean.sum(), size=_DRAWN_AT_ONCE)
        num_larger += int((((drawn - mean) ** 2 / mean).sum(axis=1) >= statistic).sum())
        num_drawn += _DRAWN_AT_ONCE
    return num_larger / num_drawn if num_larger else min(approximate, 1 / num_drawn)


def distribution(logits: torch.Tensor, temperature: float, ends: Sequence[int]) -> torch.Tensor:
    """What tokens are sampled from, [N, V] float64. Tokens that end a sequence are one: `ends[0]`."""
    probs = torch.softmax(logits.to(torch.float64) / temperature, dim=1)
    if len(ends) > 1:
        probs[:, ends[0]] = probs[:, list(ends)].sum(dim=1)
        probs[:, list(ends[1:])] = 0.0
    return probs


def first_tokens(what: str, token_ids: Sequence[int], probs: torch.Tensor) -> Fit | None:
    """The test of first tokens; `probs` [V]."""
    counts = torch.bincount(torch.tensor(list(token_ids)), minlength=len(probs))
    return chi_square(what, counts.tolist(), probs.tolist())


def place(probs: torch.Tensor, token_id: int, rng: random.Random) -> float:
    """Where a token lies among those of `probs` [V]; 0 to 1."""
    own = float(probs[token_id])
    before = (probs > own) | ((probs == own) & (torch.arange(len(probs)) < token_id))
    return min(1.0, float(probs[before].sum()) + rng.random() * own)


def uniform(what: str, places: Sequence[float]) -> Fit | None:
    """The test of places."""
    counts = [0] * NUM_BINS
    for one in places:
        counts[min(NUM_BINS - 1, int(one * NUM_BINS))] += 1
    return chi_square(what, counts, [1 / NUM_BINS] * NUM_BINS)
