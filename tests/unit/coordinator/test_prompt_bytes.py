"""Bytes of requests that are held, by tenant and in all."""

from __future__ import annotations

from contextlib import ExitStack

from specdec.service.byte_budget import ByteBudget


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
