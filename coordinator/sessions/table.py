"""Tables of open requests and sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from specdec.coordinator.sessions.session import Request, Session
from specdec.store.interface import RequestKey


class SessionTable:
    """All open sessions, and all open requests by tenant and id."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        self._sessions: dict[str, Session] = {}
        self._ended = asyncio.Event()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def requests(self) -> list[Request]:
        """All open requests, including waiting ones."""
        return list(self._requests.values())

    def find_request(self, key: RequestKey) -> Request | None:
        """The open request with this key, or None."""
        return self._requests.get(key)

    def add_request(self, request: Request) -> None:
        """Register a request; it replaces the request that it takes over."""
        self._requests[request.key] = request

    def remove_request(self, request: Request) -> None:
        """Forget a request, unless it was taken over."""
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
            self._ended.set()

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until any request ends, at most `timeout_s`."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    def add(self, session: Session) -> None:
        """Register a session that is about to be opened."""
        self._sessions[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget a session."""
        self._sessions.pop(session.session_id, None)
