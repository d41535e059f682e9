"""What a token is worth to a request that wants a certain time per token, as in AdaServe (arXiv 2501.12162).

One that is behind what it wants gets draft tokens verified before others, one that is ahead of it leaves them to
others; requests without a wish stand between. In sum as much is verified as pays.
"""

from __future__ import annotations

from specdec.target_service.policy.means import PRIOR_WEIGHT

_MOST = 16.0
"""Factor by which a token may be worth more, or less, than one of a request without a wish."""


def urgency(wanted_s: float, elapsed_s: float, num_tokens: int) -> float:
    """Worth of the next token, 1 for a request that is on time or wants nothing.

    Args:
        wanted_s: mean time per token; 0: none is wanted.
        elapsed_s: since the first token.
        num_tokens: after the first one, in this time.
    """
    if wanted_s <= 0:
        return 1.0
    # At first a request counts as on time: a single slow token is no trend.
    pace_s = (elapsed_s + PRIOR_WEIGHT * wanted_s) / (num_tokens + PRIOR_WEIGHT)
    return min(_MOST, max(1 / _MOST, (pace_s / wanted_s) ** 2))
