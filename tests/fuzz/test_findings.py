"""What a fuzzed case may not do is found: raise, or cost much."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.fuzz.cases import Case, Link, Run, run_cases
from tests.fuzz.judge import Complaints


def burn() -> None:
    until_s = time.thread_time() + 0.2
    while time.thread_time() < until_s:
        pass


def hoard() -> None:
    del [b"x" * (1 << 20) for _ in range(64)][:]  # zeros would take no memory before they are read


def fail() -> None:
    raise ValueError("of no type")


@pytest.mark.parametrize(
    ("act", "found"),
    [(burn, "s of processors"), (hoard, "MiB"), (fail, "of no type"), (lambda: None, None)],
    ids=["burns", "hoards", "fails", "is right"],
)
async def test_a_case_that_fails_or_costs_much_is_a_finding(act: Callable[[], None], found: str | None) -> None:
    @asynccontextmanager
    async def opened(_: Complaints) -> AsyncIterator[Run]:
        async def run(_: Case) -> None:
            act()

        yield run

    told = await run_cases(Link("one", opened, most_cpu_s=0.1, most_bytes=32 << 20), seed=1, numbers=[7])
    assert len(told) == (found is not None)
    for line in told:
        assert found is not None and found in line and "--case 7" in line
