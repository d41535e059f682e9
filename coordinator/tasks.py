"""Background tasks are ended, and long work leaves turns of the event loop to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import structlog

_T = TypeVar("_T")
Work = tuple[int, Callable[[], None]]
"""Tokens that are walked, and what walks them."""
LONG_TOKENS = 32_768
"""Tokens that are walked in one turn of the event loop, at most; a walk in C takes a millisecond."""
_RETRY_S = 1.0
"""Seconds before a task is cancelled again, in case the first cancellation was lost."""
_log = structlog.get_logger(__name__)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and return when all have ended; what they raise is dropped.

    They are cancelled repeatedly: Python 3.11 may lose a cancellation in a call that times out at the same moment
    (asyncio.timeout, and so every operation of a store).
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_S)


async def in_turns(work: Generator[None, None, _T]) -> _T:
    """Run work to its result; other tasks run wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result
        await asyncio.sleep(0)


def in_parts(works: Iterable[Work]) -> None:
    """Do works in order, `LONG_TOKENS` now and as many in each later turn of the event loop, one work at least.

    A later one must see for itself whether it is still wanted. What one raises in the first turn is raised, later it is
    logged; the works after it are done all the same.
    """
    left = deque(works)
    try:
        _do_part(left)
    finally:
        if left:
            asyncio.get_running_loop().call_soon(_go_on, left)


def _do_part(left: deque[Work]) -> None:
    num_walked = 0
    while left and (not num_walked or num_walked + left[0][0] <= LONG_TOKENS):
        num_tokens, work = left.popleft()
        num_walked += num_tokens
        work()


def _go_on(left: deque[Work]) -> None:
    try:
        _do_part(left)
    except Exception as error:  # the other works must be done all the same
        _log.error("work_failed", exc_info=error)
    if left:
        asyncio.get_running_loop().call_soon(_go_on, left)


async def let_others_run(num_tokens: int) -> None:
    """Give other tasks a turn before the next walk over `num_tokens`, if they are many."""
    if num_tokens > LONG_TOKENS:
        await asyncio.sleep(0)


def pieces(items: Sequence[_T], size: int | None = None) -> Iterator[Sequence[_T]]:
    """A list in slices of at most `size` items, or `LONG_TOKENS`; one empty slice of an empty list."""
    size = LONG_TOKENS if size is None else size
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size]
