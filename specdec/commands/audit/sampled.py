"""Test of sampled output against the reference's distribution, by Pearson's chi-square.

The *first tokens* of a prompt's answers are counted against the reference's distribution. Each later token has its own
distribution, so it gets a *place* (Rosenblatt's transform): the reference's tokens divide [0, 1] into intervals, the
likeliest first, each as wide as its probability; the place is a random point of the sampled token's interval. If the
service samples from the reference's distribution, places are uniform and independent; if it prefers likely tokens, too
many lie near 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NUM_BINS = 20
"""Bins of the test of places."""
_LEAST_EXPECTED = 5.0
"""Expected count below which cells are merged."""
_SURELY_FINE = 0.01
"""p-value above which no test fails, so it may be approximate."""
_DRAWN_AT_ONCE, _MOST_DRAWN, _ENOUGH_LARGER = 50_000, 1_000_000, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One test."""

    what: str
    num_samples: int
    num_cells: int
    chi_square: float
    p_value: float
    """Probability that a correct service has at least this chi-square."""


def chi_square(what: str, counts: Sequence[float], probs: Sequence[float]) -> Fit | None:
    """Pearson's test of counts under probabilities that add up to 1; None if there are too few counts.

    Cells with an expected count below five are merged. Small p-values come from counts drawn at random, because the
    statistic's tail follows chi-square only roughly.
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
    """The distribution of each position, [N, V] float64. All end-of-sequence tokens count as `ends[0]`."""
    probs = torch.softmax(logits.to(torch.float64) / temperature, dim=1)
    if len(ends) > 1:
        probs[:, ends[0]] = probs[:, list(ends)].sum(dim=1)
        probs[:, list(ends[1:])] = 0.0
    return probs


def first_tokens(what: str, token_ids: Sequence[int], probs: torch.Tensor) -> Fit | None:
    """Test of first tokens against `probs` [V]."""
    counts = torch.bincount(torch.tensor(list(token_ids)), minlength=len(probs))
    return chi_square(what, counts.tolist(), probs.tolist())


def place(probs: torch.Tensor, token_id: int, rng: random.Random) -> float:
    """A random point, 0 to 1, of a token's interval under `probs` [V]."""
    own = float(probs[token_id])
    before = (probs > own) | ((probs == own) & (torch.arange(len(probs)) < token_id))
    return min(1.0, float(probs[before].sum()) + rng.random() * own)


def uniform(what: str, places: Sequence[float]) -> Fit | None:
    """Test of places for uniformity."""
    counts = [0] * NUM_BINS
    for one in places:
        counts[min(NUM_BINS - 1, int(one * NUM_BINS))] += 1
    return chi_square(what, counts, [1 / NUM_BINS] * NUM_BINS)
