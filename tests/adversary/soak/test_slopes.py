"""What counts as growth."""

from __future__ import annotations

import random

import pytest

from tests.adversary.soak.slopes import MIB, growths, slope

TIMES = [10.0 * number for number in range(60)]


def test_the_slope_of_a_line_is_found_under_noise_and_peaks() -> None:
    rng = random.Random(0)
    values = [5.0 + 0.25 * at + rng.gauss(0, 3) + (500 if number % 17 == 0 else 0) for number, at in enumerate(TIMES)]
    assert slope(TIMES, values) == pytest.approx(0.25, rel=0.1)


def test_a_leak_is_found_and_a_warm_up_is_none() -> None:
    warm_up = [min(100, 10 + number * 6) * MIB for number in range(60)]
    leaking = [(100 + number * 0.5) * MIB for number in range(60)]
    samples = [{"a uss_bytes": w, "b uss_bytes": x} for w, x in zip(warm_up, leaking, strict=True)]
    found = {one.name: one for one in growths(TIMES, samples)}
    assert found["a uss_bytes"].is_flat
    assert not found["b uss_bytes"].is_flat
    assert found["b uss_bytes"].growth == pytest.approx(20 * MIB, rel=0.05)


def test_descriptors_that_grow_slowly_are_found_and_a_burst_is_none() -> None:
    samples = [{"a descriptors": 40 + number // 6, "b descriptors": 40 + 30 * (number == 50)} for number in range(60)]
    found = {one.name: one.is_flat for one in growths(TIMES, samples)}
    assert found == {"a descriptors": False, "b descriptors": True}


def test_what_shrinks_is_flat() -> None:
    [one] = growths(TIMES, [{"a threads": 100 - number} for number in range(60)])
    assert one.is_flat


def test_series_without_a_bound_or_with_too_few_points_are_left_out() -> None:
    samples = [{"a colour": 1.0} | ({"b threads": 1.0} if number > 55 else {}) for number in range(60)]
    assert growths(TIMES, samples) == []
