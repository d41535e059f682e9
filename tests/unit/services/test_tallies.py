"""What is summed up and written once is what each update alone would have come to."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from specdec.telemetry import Tallies

BOUNDS = (0.5, 1.0, 2.0)
VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, math.inf])


def made() -> tuple[CollectorRegistry, Counter, Histogram]:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ["which"], registry=registry)
    return registry, counter, Histogram("h", "h", buckets=BOUNDS, registry=registry)


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.lists(st.tuples(VALUES, st.integers(0, 4)), max_size=8), max_size=4))
def test_a_page_is_the_same_as_with_each_update_alone(rounds: list[list[tuple[float, int]]]) -> None:
    (one, each_counter, each_histogram), (other, counter, histogram) = made(), made()
    tallies = Tallies()
    for updates in rounds:
        for value, times in updates:
            tallies.count(counter.labels("a"), times)
            tallies.observe(histogram, value, times)
            each_counter.labels("a").inc(times)
            for _ in range(times):
                each_histogram.observe(value)
        tallies.write()
        assert page(other) == page(one)


def test_nothing_is_on_the_page_before_it_is_written_nor_twice() -> None:
    registry, counter, histogram = made()
    tallies = Tallies()
    tallies.count(counter.labels("a"), 2)
    tallies.observe(histogram, 1.0, 3)
    assert 'c_total{which="a"} 0.0' in page(registry)
    for _ in range(2):
        tallies.write()
        assert {'c_total{which="a"} 2.0', "h_count 3.0"} <= set(page(registry))
