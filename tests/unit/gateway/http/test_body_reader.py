"""Bodies are read in a thread that does not hold up an event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.tokens import TokenizeBody
from specdec.gateway.http.body import BodyLimits, BodyReader
from specdec.service.byte_budget import ByteBudget, Held


class Sent:
    """A request whose body has come."""

    def __init__(self, body: bytes) -> None:
        self.headers = {"content-type": "application/json"}
        self.scope = {"state": {"held": Held(ByteBudget(2**30, 2**30), "client")}}
        self.state = SimpleNamespace()
        self._body = body

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._body


def read(body: dict[str, Any], translate: Callable[[TokenizeBody], object]) -> object:
    async def run() -> object:
        reader = BodyReader(BodyLimits(2**20, 60), ignores_unknown=False)
        request: Any = Sent(orjson.dumps(body))
        try:
            return (await reader.read(request, TokenizeBody, translate))[1]
        finally:
            reader.close()

    return asyncio.run(run())


def test_no_collection_walks_what_the_thread_reads() -> None:
    large = {"prompt": "a" * 20_000}
    assert read(large, lambda _: gc.isenabled()) is False
    assert gc.isenabled()
    with pytest.raises(ApiError):
        read({**large, "unknown": 1}, lambda _: None)
    assert gc.isenabled()
