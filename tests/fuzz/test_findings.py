"""What a fuzzed case may not do is found: raise, or cost much."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fuzz.cases import Case, Link, Run, run_cases
from tests.fuzz.judge import Complaints


def burn() -> None:
    sum(range(30_000_000))  # one call


def hoard() -> None:
    len(b"x" * (64 << 20))  # zeros would take no memory before they are read, and smaller parts what was freed before


def toil() -> None:
    for _ in range(3000):
        len(())


def spread() -> None:
    list(range(100_000))  # one call, and an object for each number


def fail() -> None:
    raise ValueError("of no type")


@pytest.mark.parametrize(
    ("act", "bound", "num_bytes", "found"),
    [
        (burn, {"most_cpu_s": 0.1}, 0, "s of processors"),
        (hoard, {"most_bytes": 32 << 20}, 0, "MiB"),
        (toil, {"most_calls": 2000}, 0, "calls"),
        (spread, {"most_allocated": 1 << 20}, 0, "allocated"),
        (spread, {"most_allocated": 1 << 20}, 2 << 20, None),
        (fail, {}, 0, "of no type"),
        (lambda: None, {}, 0, None),
    ],
    ids=["burns", "hoards", "toils", "allocates", "allocates for what came", "fails", "is right"],
)
async def test_a_case_that_fails_or_costs_much_is_a_finding(
    act: Callable[[], None], bound: dict[str, Any], num_bytes: int, found: str | None
) -> None:
    @asynccontextmanager
    async def opened(_: Complaints) -> AsyncIterator[Run]:
        async def run(case: Case) -> None:
            case.num_bytes = num_bytes
            act()

        yield run

    link = Link("one", opened, **bound)  # one bound: hoarding takes 0.1 s of a slow processor, too
    number = 10 if act is spread else 8
    told = await run_cases(link, seed=1, numbers=[number])
    assert len(told) == (found is not None)
    for line in told:
        assert found is not None and found in line and f"--case {number}" in line
