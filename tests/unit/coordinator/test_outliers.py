"""Replicas that fail are left alone for a while, and trusted again step by step."""

from __future__ import annotations

import pytest

from specdec.coordinator.replicas.outliers import EjectionSettings, OutlierDetector, Standing

SETTINGS = EjectionSettings(num_failures=3, first_s=10.0, most_s=35.0, num_successes=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def detector(clock: Clock) -> OutlierDetector:
    return OutlierDetector(SETTINGS, clock)


def eject(detector: OutlierDetector) -> None:
    while not detector.failed("a", num_others=1):
        pass


def test_an_unknown_replica_is_trusted(detector: OutlierDetector) -> None:
    assert detector.standing("a") is Standing.TRUSTED
    assert detector.remaining_s("a") == 0.0


def test_consecutive_failures_eject(detector: OutlierDetector) -> None:
    assert [detector.failed("a", num_others=1) for _ in range(3)] == [False, False, True]
    assert detector.standing("a") is Standing.EJECTED
    assert detector.standing("b") is Standing.TRUSTED


def test_a_success_in_between_starts_the_count_again(detector: OutlierDetector) -> None:
    for _ in range(5):
        assert not detector.failed("a", num_others=1)
        assert not detector.failed("a", num_others=1)
        detector.succeeded("a")
    assert detector.standing("a") is Standing.TRUSTED


def test_the_last_usable_replica_is_never_ejected(detector: OutlierDetector) -> None:
    assert not any(detector.failed("a", num_others=0) for _ in range(20))
    assert detector.standing("a") is Standing.TRUSTED


def test_after_the_ejection_comes_probation_and_after_successes_trust(detector: OutlierDetector, clock: Clock) -> None:
    eject(detector)
    clock.now_s += 9.9
    assert detector.standing("a") is Standing.EJECTED
    clock.now_s += 0.1
    assert detector.standing("a") is Standing.PROBATION
    assert not detector.succeeded("a")
    assert detector.succeeded("a")
    assert detector.standing("a") is Standing.TRUSTED


def test_one_failure_on_probation_ejects_again_for_longer_up_to_the_cap(
    detector: OutlierDetector, clock: Clock
) -> None:
    eject(detector)
    lengths_s = []
    for _ in range(4):
        lengths_s.append(detector.remaining_s("a"))
        clock.now_s += detector.remaining_s("a")
        assert detector.failed("a", num_others=1)
    assert lengths_s == [10.0, 20.0, 35.0, 35.0]


def test_successes_of_sessions_that_began_before_do_not_end_an_ejection(detector: OutlierDetector) -> None:
    eject(detector)
    assert not any(detector.succeeded("a") for _ in range(5))
    assert detector.standing("a") is Standing.EJECTED


def test_a_replica_that_goes_on_doing_well_is_ejected_for_the_shortest_time_again(
    detector: OutlierDetector, clock: Clock
) -> None:
    eject(detector)
    clock.now_s += 10.0
    for _ in range(4):
        detector.succeeded("a")
    eject(detector)
    assert detector.remaining_s("a") == 10.0


def test_a_replica_that_is_gone_for_good_is_forgotten(detector: OutlierDetector) -> None:
    eject(detector)
    detector.forget("a")
    assert detector.standing("a") is Standing.TRUSTED
