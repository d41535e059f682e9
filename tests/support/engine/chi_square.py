"""Goodness of fit at a stated false-alarm rate.

Seeds are fixed, so a test gives the same verdict on every run; the rate says how often a correct implementation
would fail for one choice of seeds.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

FALSE_ALARM_RATE = 1e-6
SMALLEST_EXPECTED_COUNT = 10.0


def p_value_of_fit(counts: ArrayLike, probs: ArrayLike) -> float:
    """P-value of counts under probs, with rare cells pooled; 0 if a cell of probability 0 has a count."""
    observed = np.asarray(counts, dtype=np.float64).ravel()
    expected = np.asarray(probs, dtype=np.float64).ravel()
    expected = expected / expected.sum() * observed.sum()
    if observed[expected == 0.0].any():
        return 0.0
    order = np.argsort(expected)
    pooled_observed, pooled_expected = [0.0], [0.0]
    for cell in order[expected[order] > 0.0]:
        if pooled_expected[-1] >= SMALLEST_EXPECTED_COUNT:
            pooled_observed.append(0.0)
            pooled_expected.append(0.0)
        pooled_observed[-1] += observed[cell]
        pooled_expected[-1] += expected[cell]
    if len(pooled_expected) == 1:
        return 1.0
    return float(stats.chisquare(pooled_observed, pooled_expected).pvalue)


def p_value_of_independence(first: ArrayLike, second: ArrayLike, num_values: int) -> float:
    """P-value of two equally long sequences of values below num_values being independent and uniform."""
    pairs = np.asarray(first, dtype=np.int64).ravel() * num_values + np.asarray(second, dtype=np.int64).ravel()
    cells = num_values * num_values
    return p_value_of_fit(np.bincount(pairs, minlength=cells), np.full(cells, 1.0 / cells))
