"""Ending background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

_RETRY_S = 1.0
"""How much longer an end takes when a cancellation was lost; one that was not is heard within a turn."""


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and return when all have ended; what they raise is dropped.

    They are cancelled again and again: on Python 3.11 a cancellation may be lost in a call that times out at that very
    moment (asyncio.timeout, and so every operation of a store).
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_S)
