"""Clamp integers to their fields' ranges: sums, measurements and peers' values.

Protobuf raises for a value outside its field's range, and a long-running clock or a lying peer must not make it raise.
"""

from __future__ import annotations

import math

UINT32_MAX = 2**32 - 1


def uint32(value: float) -> int:
    """The nearest value of a uint32 field; 0 for NaN."""
    if math.isnan(value):
        return 0
    return int(min(max(value, 0), UINT32_MAX))


def microseconds(seconds: float) -> int:
    """A time for a uint32 field of microseconds, at most 71 minutes."""
    return uint32(seconds * 1e6)
