"""Coordinators behind one name: a gateway finds those that come, and leaves running streams where they are."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from specdec.gateway.upstream.names import NameWatch
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, running
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
PROMPT = [5, 6, 7]


class Names:
    """What the machine is told that names stand for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] | None = []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **_options: Any) -> list[Any]:
        if self.addresses is None:
            raise socket.gaierror("the name server is away")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


async def test_a_name_that_stands_for_others_than_before_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names, told = Names(monkeypatch), []

    async def changed(address: str) -> None:
        told.append(address)

    watch = NameWatch(("dns:///coordinators:50051", "10.0.0.9:50051"), changed)
    steps: list[tuple[list[str] | None, int]] = [
        (["10.0.0.1"], 0),
        (["10.0.0.1", "10.0.0.2"], 1),
        (["10.0.0.2", "10.0.0.1"], 1),
        (None, 1),
        (["10.0.0.2", "10.0.0.1"], 1),
        (["10.0.0.3"], 2),
    ]
    for addresses, num_told in steps:
        names.addresses = addresses
        await watch.look("dns:///coordinators:50051")
        assert len(told) == num_told
    assert set(told) == {"dns:///coordinators:50051"}


async def test_without_names_nothing_is_watched() -> None:
    async def changed(address: str) -> None:
        raise AssertionError(address)

    await NameWatch(("10.0.0.9:50051",), changed).run()


async def test_streams_go_on_while_new_calls_go_over_a_new_connection() -> None:
    target = ScriptedTarget()
    target.limit = 20
    async with running([target]) as harness:
        name = f"dns:///localhost:{harness.address.rpartition(':')[2]}"
        async with gateway(name) as one, one.openai() as client:
            fields: dict[str, Any] = {"prompt": PROMPT, "model": "scripted", "max_tokens": 60, "seed": 11}
            stream = await client.completions.create(**fields, stream=True, extra_body={"return_token_ids": True})
            events = aiter(stream)
            ids = list((await anext(events)).choices[0].token_ids)
            await one._coordinators.look_again(one._connect, name)
            target.set_limit(None)
            other = await client.completions.create(**fields, extra_body={"return_token_ids": True})
            ids += [token async for event in events for c in event.choices for token in c.token_ids]
            failovers = one.parts.registry.get_sample_value("specdec_gateway_failovers_total")
    assert ids == expected_ids(target, 60) == other.choices[0].token_ids
    assert failovers == 0
