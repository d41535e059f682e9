"""End background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

_RETRY_S = 1.0
"""Seconds before a task is cancelled again, in case the first cancellation was lost."""


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
