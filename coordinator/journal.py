"""What was streamed of each request, kept so that another stream can take it up.

Writing happens on the hot path, so `begin`, `append` and `end` never wait: an implementation that leaves the
process buffers and sends in the background. Only `load` may wait.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

RequestKey = tuple[str, str]
"""Tenant and request id."""


@dataclass(slots=True)
class JournalRecord:
    """Output tokens of every choice, each with its origin."""

    token_ids: list[list[int]]
    origins: list[list[int]]
    ended_at_s: float | None = field(default=None)


class Journal(Protocol):
    """Where requests are journalled."""

    def begin(self, key: RequestKey, record: JournalRecord) -> None:
        """A request starts, with the tokens it already has; replaces what was there."""

    def append(self, key: RequestKey, choice: int, token_ids: Sequence[int], origins: Sequence[int]) -> None:
        """Tokens are about to be streamed."""

    def end(self, key: RequestKey) -> None:
        """Nothing more comes; the record is kept for a while, as the client may have missed the end."""

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """What is known of a request."""


class MemoryJournal:
    """A journal that lives and dies with the process.

    Records of ended requests are kept for `ttl_s` and at most `max_ended` of them.
    """

    def __init__(self, ttl_s: float = 300.0, max_ended: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._max_ended = max_ended
        self._live: dict[RequestKey, JournalRecord] = {}
        self._ended: OrderedDict[RequestKey, JournalRecord] = OrderedDict()

    def begin(self, key: RequestKey, record: JournalRecord) -> None:
        """See `Journal.begin`."""
        self._ended.pop(key, None)
        self._live[key] = record

    def append(self, key: RequestKey, choice: int, token_ids: Sequence[int], origins: Sequence[int]) -> None:
        """See `Journal.append`."""
        record = self._live.get(key)
        if record is not None:
            record.token_ids[choice].extend(token_ids)
            record.origins[choice].extend(origins)

    def end(self, key: RequestKey) -> None:
        """See `Journal.end`."""
        record = self._live.pop(key, None)
        if record is None:
            return
        now_s = record.ended_at_s = time.monotonic()
        self._ended[key] = record
        while self._ended:
            oldest = next(iter(self._ended.values())).ended_at_s or 0.0
            if len(self._ended) <= self._max_ended and now_s - oldest <= self._ttl_s:
                break
            self._ended.popitem(last=False)

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """See `Journal.load`."""
        return self._live.get(key) or self._ended.get(key)
