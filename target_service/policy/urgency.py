"""The worth of a token to a request with a wanted time per token, as in AdaServe (arXiv 2501.12162).

A request behind its wanted time has its draft tokens verified before others', and a request ahead of it after others'.
Requests without a wanted time stand between. The worth does not change that nodes are verified only while that pays.
"""

from __future__ import annotations

from specdec.target_service.policy.means import PRIOR_WEIGHT

_MOST = 16.0
"""Largest factor by which a token is worth more, or less, than one of a request without a wanted time."""


def urgency(wanted_s: float, elapsed_s: float, num_tokens: int) -> float:
    """Worth of the next token: 1 for a request on time or without a wanted time.

    Args:
        wanted_s: wanted mean seconds per token; 0: none.
        elapsed_s: seconds since the first token.
        num_tokens: tokens in that time, the first one excluded.
    """
    if wanted_s <= 0:
        return 1.0
    # At first a request counts as on time: a single slow token is no trend.
    pace_s = (elapsed_s + PRIOR_WEIGHT * wanted_s) / (num_tokens + PRIOR_WEIGHT)
    return min(_MOST, max(1 / _MOST, (pace_s / wanted_s) ** 2))
