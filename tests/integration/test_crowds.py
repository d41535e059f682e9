"""Crowds of clients that read nothing or leave: whoever reads goes on, and nothing of the others is left."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, expected_ids, running
from tests.support.services.faults import eventually
from tests.support.services.gateways import GatewayAtHand, gateway, post

pytestmark = [pytest.mark.long, pytest.mark.integration]
NUM_SLOW, NUM_CANCELLED, AT_ONCE = 1000, 10_000, 100
STALL_S, WITHIN_S = 5.0, 10.0
VICTIM_TOKENS = 400
LOGPROBS = 20
"""Events are large, so that few of them fill what the kernel and the gateway hold for a reader."""
STEP_S = 0.02
SILENCE_S = 30.0
"""One process plays target, coordinator, gateway and the crowd: each of them answers pings late."""


def asked(max_tokens: int, seed: int) -> bytes:
    fields = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "seed": seed, "stream": True, "logprobs": LOGPROBS}
    return post("/v1/completions", json.dumps({**fields, "ignore_eos": True, "return_token_ids": True}).encode())


@asynccontextmanager
async def served(**settings: float) -> AsyncIterator[tuple[ScriptedTarget, Harness, GatewayAtHand]]:
    """A gateway before a coordinator with room for the crowd."""
    target = ScriptedTarget()
    target.step_s = STEP_S
    async with (
        running(
            [target], max_running=2000, max_waiting=2000, credit_window_tokens=32, client_keepalive_timeout_s=SILENCE_S
        ) as harness,
        gateway(harness.address, keepalive_timeout_s=SILENCE_S, **settings) as one,
    ):
        yield target, harness, one


def _read(port: int, seed: int) -> tuple[list[int], float]:
    ids: list[int] = []
    longest_s, last_s = 0.0, time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
        connection.sendall(asked(VICTIM_TOKENS, seed))
        for line in lines:
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                event = json.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
            elif line.startswith(b"data: [DONE]"):
                break
    return ids, longest_s


async def victim(one: GatewayAtHand, seed: int) -> tuple[list[int], float]:
    """Token ids of a stream that is read, and its longest pause in seconds. It reads while the services are busy."""
    return await asyncio.to_thread(_read, one.port, seed)


async def all_gone(target: ScriptedTarget, harness: Harness, one: GatewayAtHand) -> None:
    """Wait until neither gateway, coordinator nor target has anything left of the crowd."""

    async def is_gone() -> bool:
        status = harness.service._admission  # the service, not its RPC, which a full process answers late
        return not (one.edge.num_running or status.num_running or status.num_waiting or target.sessions)

    await eventually(is_gone, "the crowd is gone", 6 * STALL_S)


async def test_a_thousand_readers_that_read_nothing_are_ended_and_one_that_reads_goes_on() -> None:
    async with served(reader_stall_s=STALL_S) as (target, harness, one):
        crowd: list[socket.socket] = []
        for seed in range(NUM_SLOW):
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.setblocking(False)
            crowd.append(slow)
            await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", one.port))
            await asyncio.get_running_loop().sock_sendall(slow, asked(4000, seed))
        ids, longest_s = await victim(one, seed=7)
        assert ids == expected_ids(target, VICTIM_TOKENS, seed=7)
        assert longest_s < WITHIN_S
        await all_gone(target, harness, one)
        for slow in crowd:
            slow.close()


async def test_ten_thousand_clients_that_leave_leave_nothing_and_one_that_stays_goes_on() -> None:
    async with served() as (target, harness, one):

        async def leave(seed: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(asked(4000, seed))
            for _ in range(seed % 12):  # some leave before the headers, some in mid-stream
                await reader.readline()
            writer.transport.abort()

        async def crowd() -> None:
            for begin in range(0, NUM_CANCELLED, AT_ONCE):
                await asyncio.gather(*(leave(seed) for seed in range(begin, begin + AT_ONCE)))

        leaving = asyncio.create_task(crowd())
        while not leaving.done():
            ids, longest_s = await victim(one, seed=7)
            assert ids == expected_ids(target, VICTIM_TOKENS, seed=7)
            assert longest_s < WITHIN_S
        await leaving
        await all_gone(target, harness, one)
