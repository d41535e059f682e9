"""A gateway replaces connections, as when certificates are renewed, while it asks coordinators over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from specdec.client import Client
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import CUT_OFF, Unavailable

_MOST_S = 30.0


class SilentHealth(health_pb2_grpc.HealthServicer):
    """Answers no question."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        self.is_asked.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def _asked(question: str) -> AsyncIterator[tuple[Client, asyncio.Task[bool]]]:
    """A client, and its question while it waits for the answer."""
    health, server = SilentHealth(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    client = Client(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    try:
        await asyncio.wait_for(client._channel.channel_ready(), _MOST_S)
        asking = asyncio.create_task(getattr(client, question)(_MOST_S))
        await asyncio.wait_for(health.is_asked.wait(), _MOST_S)
        yield client, asking
    finally:
        await client.close()
        await server.stop(None)


@pytest.mark.parametrize("question", ["is_serving", "is_deaf"])
async def test_a_question_over_a_closed_connection_is_answered_with_no(question: str) -> None:
    async with _asked(question) as (client, asking):
        await client.close()
        assert await asking is False  # An exception would end the task that asks every coordinator, for good.


async def test_calls_over_a_connection_that_was_closed_before_fail_as_cut_off() -> None:
    client = Client("127.0.0.1:1")
    await client.close()
    assert not await client.is_serving()
    assert not await client.is_deaf(_MOST_S)
    for calling in (client.status(), client.complete(api.GenerateRequest(prompt="a"))):
        with pytest.raises(Unavailable) as caught:
            await calling
        assert caught.value.reason == CUT_OFF


@pytest.mark.parametrize("question", ["is_serving", "is_deaf"])
async def test_who_asks_can_be_cancelled(question: str) -> None:
    async with _asked(question) as (_, asking):
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
