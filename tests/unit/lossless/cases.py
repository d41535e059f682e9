"""Sampling parameters for the tests of losslessness: a table in which every pair of values occurs together."""

from __future__ import annotations

import itertools
import random
from typing import Any

FACTORS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7, 1.0),
    "top_p": (1.0, 0.9),
    "top_k": (0, 40),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.2),
    "presence_penalty": (0.0, 0.5),
    "frequency_penalty": (0.0, 0.3),
    "logit_bias": ({}, {100: 3.0, 13: -2.0}),
    "allowed_token_ids": ((), tuple(range(2, 600))),
    "bad_words": ((), ({"token_ids": (13,)}, {"token_ids": (200, 221)}, {"token_ids": (199, 220, 220)})),
    "min_tokens": (0, 12),
    "ignore_eos": (False, True),
    "stop_token_ids": ((), (13, 199, 220)),
    "num_logprobs": (None, 0, 3),
    "max_draft_tokens": (None, 0, 1, 8),
    "prompt": (0, 1, 2, 3),
}


def pairwise_table(factors: dict[str, tuple[Any, ...]], seed: int = 1) -> list[dict[str, Any]]:
    """Rows that together hold every pair of values of every two factors, found greedily."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        candidates = []
        for _ in range(60):
            row = {name: rng.randrange(len(values)) for name, values in factors.items()}
            for name, index in rng.choice(sorted(missing)):
                row[name] = index
            candidates.append(row)
        best = max(candidates, key=lambda row: len(missing & _pairs(row, names)))
        missing -= _pairs(best, names)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _pairs(row: dict[str, int], names: list[str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}


CASES = pairwise_table(FACTORS)
