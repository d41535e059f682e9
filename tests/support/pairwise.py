"""Pairwise selection: few cases in which every two values of different parameters occur together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def all_cases(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The full product of the values."""
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]


def pairwise_cases(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A deterministic greedy cover of all pairs. Its time grows with the product of the sizes times the cases."""
    choices = itertools.product(*(range(len(values)) for values in parameters.values()))
    candidates = [tuple(enumerate(choice)) for choice in choices]
    pairs_of = {candidate: frozenset(itertools.combinations(candidate, 2)) for candidate in candidates}
    missing = set().union(*pairs_of.values())
    names, values = list(parameters), list(parameters.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda candidate: len(pairs_of[candidate] & missing))
        missing -= pairs_of[best]
        chosen.append({names[index]: values[index][choice] for index, choice in best})
    return chosen
