"""What a fuzzed case may not do is found: raise, or cost much."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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


def fail() -> None:
    raise ValueError("of no type")


@pytest.mark.parametrize(
    ("act", "found"),
    [(burn, "s of processors"), (hoard, "MiB"), (toil, "calls"), (fail, "of no type"), (lambda: None, None)],
    ids=["burns", "hoards", "toils", "fails", "is right"],
)
async def test_a_case_that_fails_or_costs_much_is_a_finding(act: Callable[[], None], found: str | None) -> None:
    @asynccontextmanager
    async def opened(_: Complaints) -> AsyncIterator[Run]:
        async def run(_: Case) -> None:
            act()

        yield run

    link = Link("one", opened, most_cpu_s=0.1, most_bytes=32 << 20, most_calls=2000)
    told = await run_cases(link, seed=1, numbers=[8])
    assert len(told) == (found is not None)
    for line in told:
        assert found is not None and found in line and "--case 8" in line
