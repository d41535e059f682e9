"""What a token is worth to a request that wants a certain time per token, as in AdaServe (arXiv 2501.12162).

One that is behind what it wants gets draft tokens verified before others, one that is ahead of it leaves them to
others; requests without a wish stand between. In sum as much is verified as pays.
"""

from __future__ import annotations

_LEAST, _MOST = 1 / 8, 16.0
_FIRST_TOKENS = 4
"""A request counts as on time for so many tokens at first: a single slow one is no trend."""


def urgency(wanted_s: float, elapsed_s: float, num_tokens: int) -> float:
    """Worth of the next token, 1 for a request that is on time or wants nothing.

    Args:
        wanted_s: mean time per token; 0: none is wanted.
        elapsed_s: since the first token.
        num_tokens: after the first one, in this time.
    """
    if wanted_s <= 0:
        return 1.0
    pace_s = (elapsed_s + _FIRST_TOKENS * wanted_s) / (num_tokens + _FIRST_TOKENS)
    return min(_MOST, max(_LEAST, (pace_s / wanted_s) ** 2))
