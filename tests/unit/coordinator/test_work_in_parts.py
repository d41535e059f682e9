"""Work that walks many tokens leaves turns of the event loop to others, and each part of it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from structlog.testing import capture_logs

from specdec.coordinator import tasks
from specdec.coordinator.tasks import in_parts

MOST = 100


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LONG_TOKENS", MOST)


async def turns_of(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes of the works that are done in each turn of the event loop."""
    turns: list[list[int]] = [[]]
    in_parts((size, partial(lambda size: turns[-1].append(size), size)) for size in sizes)
    while sum(map(len, turns)) < len(sizes):
        turns.append([])
        await asyncio.sleep(0)
    return turns


async def test_a_turn_walks_no_more_tokens_than_it_may_unless_one_work_has_more() -> None:
    assert await turns_of([40, 40, 20, 60, 50, 0, 300, 0, 90, 10]) == [[40, 40, 20], [60], [50, 0], [300], [0, 90, 10]]
    assert await turns_of([1] * MOST) == [[1] * MOST]
    assert await turns_of([]) == [[]]


async def test_a_fault_ends_neither_the_works_after_it_nor_goes_unsaid() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("of one work")

    with capture_logs() as logs:
        in_parts([(MOST, lambda: done.append("first")), (1, fail), (1, lambda: done.append("last"))])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert done == ["first", "last"]
    assert [line["event"] for line in logs] == ["work_failed"]
    with pytest.raises(ValueError, match="of one work"):  # as if it had been called
        in_parts([(1, fail)])


async def test_a_fault_of_the_first_turn_is_raised_and_the_works_after_it_are_done() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        in_parts([(1, fail), (1, partial(done.append, 1)), (1, partial(done.append, 2))])
    await asyncio.sleep(0)
    assert done == [1, 2]
