"""Extreme values of the wire's number formats, for each field of the sampling parameters."""

from __future__ import annotations

import math

from specdec.wire.sampling_limits import LOGIT_BIAS, RANGES, Range

EXTREMES = (
    0.0,
    -0.0,
    5e-324,
    -5e-324,
    1e-300,
    1e-45,
    1e-40,
    1e-30,
    1.0,
    -1.0,
    3.5e38,
    -3.5e38,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
)
BIASES = (0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan)
NUMBERS = sorted(RANGES)


def values_of(allowed: Range) -> list[float]:
    """The extremes, both ends of a range, and the next numbers outside it."""
    outside = (math.nextafter(allowed.low, -math.inf), math.nextafter(allowed.high, math.inf))
    return [*EXTREMES, allowed.low, allowed.high, *outside]


def cases() -> list[tuple[str, float, bool]]:
    """Every numeric parameter with every value, and whether that is legal."""
    return [
        (name, value, RANGES[name].fault_of(value) is None) for name in NUMBERS for value in values_of(RANGES[name])
    ]


def bias_cases() -> list[tuple[float, bool]]:
    """Values of a bias, which is a float32, and whether they are legal."""
    return [(value, LOGIT_BIAS.fault_of(value) is None) for value in (*BIASES, LOGIT_BIAS.low, LOGIT_BIAS.high)]
