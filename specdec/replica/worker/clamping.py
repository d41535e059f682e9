"""Integers on their way into messages: what is summed, measured or told by others is cut to what its field can hold.

Protobuf raises for a value outside its field's range; a message is no place to find out that a clock ran for long or
that a peer lied.
"""

from __future__ import annotations

import math

UINT32_MAX = 2**32 - 1


def uint32(value: float) -> int:
    """The nearest number that a uint32 field holds; 0 for what is no number."""
    if math.isnan(value):
        return 0
    return int(min(max(value, 0), UINT32_MAX))


def microseconds(seconds: float) -> int:
    """A time for a uint32 field of microseconds: 71 minutes are the most it can say."""
    return uint32(seconds * 1e6)
