"""Waiting for what other processes do, which nobody tells of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.1


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Return True as soon as a condition holds, False when it does not in time; it is asked at least once."""
    ends_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > ends_s:
            return False
        await asyncio.sleep(POLL_S)
    return True
