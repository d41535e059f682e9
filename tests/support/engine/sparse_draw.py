"""How a token is drawn from a sparse distribution, in plain Python."""

from bisect import bisect_right
from itertools import accumulate


def draw(ids: tuple[int, ...], probs: tuple[float, ...], u: float) -> int:
    """The id at the point `u` in (0, 1) of the cumulated probs, which need not sum to 1."""
    cumulated = list(accumulate(probs))
    # The product can round up to the total.
    return ids[min(bisect_right(cumulated, u * cumulated[-1]), len(ids) - 1)]
