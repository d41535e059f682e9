"""Bytes of requests that are held, by tenant and in all."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import pytest

from specdec.coordinator.intake.callers import Callers
from specdec.coordinator.intake.reads.later_reads import LaterReads
from specdec.coordinator.intake.reads.pending_reads import PendingReads
from specdec.service.byte_budget import ByteBudget
from specdec.wire.errors import Overloaded


def test_requests_without_a_byte_end_in_any_order_beside_others() -> None:
    held = ByteBudget(total_bytes=100, client_bytes=100)
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(held.hold("tenant", 0))
    second.enter_context(held.hold("tenant", 0))
    first.close()
    second.close()
    third.enter_context(held.hold("tenant", 7))
    assert held.num_bytes == 7
    third.close()
    assert held.num_bytes == 0


def test_a_request_without_a_byte_is_taken_beside_one_that_has_grown_beyond_the_budget() -> None:
    held = ByteBudget(total_bytes=100, client_bytes=50)
    with held.hold("tenant") as grown:
        grown.grow(200)
        with held.hold("tenant"), held.hold("other") as other, pytest.raises(Overloaded):
            other.grow(1)
    assert held.num_bytes == 0


class Call:
    """The server's side of a call with one message."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def peer(self) -> str:
        return "ipv4:192.0.2.1:4711"

    async def read(self) -> bytes:
        return self._message


async def test_who_fills_all_room_can_still_be_aborted() -> None:
    held = ByteBudget(total_bytes=10_000, client_bytes=10_000)
    callers = Callers(cast("Any", None), 5.0, held, PendingReads(2**20, 2**16), LaterReads(8, bool))
    abort = b"x" * 40
    with held.hold("greedy", 10_000):
        for tenant in ("greedy", "other"):
            assert await callers.receive(cast("Any", Call(abort)), tenant) == abort
            with pytest.raises(Overloaded):
                await callers.receive(cast("Any", Call(b"x" * 5000)), tenant)
