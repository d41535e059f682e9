"""Coordinators behind one name: a gateway finds those that come, and leaves running streams where they are."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from specdec.gateway.upstream import coordinators
from specdec.gateway.upstream.names import NameWatch
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.black_hole import black_hole
from tests.support.services.coordinator_harness import expected_ids, running
from tests.support.services.faults import eventually
from tests.support.services.gateways import GatewayAtHand, gateway

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
            await one._coordinators.renew(one._connect, name)
            target.set_limit(None)
            other = await client.completions.create(**fields, extra_body={"return_token_ids": True})
            ids += [token async for event in events for c in event.choices for token in c.token_ids]
            failovers = one.parts.registry.get_sample_value("specdec_gateway_failovers_total")
    assert ids == expected_ids(target, 60) == other.choices[0].token_ids
    assert failovers == 0


async def test_a_coordinator_that_hears_nothing_is_left_although_something_still_arrives_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that loses one direction is not silent: retransmissions bring something now and then."""
    monkeypatch.setattr(coordinators, "_LOOK_S", 0.1)
    monkeypatch.setattr(coordinators, "_HEARS_S", 0.5)
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 20
    async with (
        running(targets[:1]) as first,
        running(targets[1:], owner_id="coordinator-2") as second,
        black_hole(first.address) as one_way,
        gateway(one_way.address, second.address) as one,
    ):

        async def are_connected() -> bool:
            connected = [member.client.is_connected for member in one._coordinators._members()]
            return all(connected)

        await eventually(are_connected, "both coordinators are connected")
        body = {"prompt": PROMPT, "max_tokens": 60, "seed": 11, "ignore_eos": True, "return_token_ids": True}
        answers = [asyncio.create_task(completion(one, body)) for _ in targets]  # one at each coordinator
        for target in targets:
            await target.until(lambda target=target: bool(target.sessions))  # type: ignore[misc]
        one_way.swallow_one_way(drip_s=0.2)
        for target in targets:
            target.set_limit(None)
        async with asyncio.timeout(60):
            for answer in await asyncio.gather(*answers):
                assert answer == expected_ids(targets[1], 60)


async def test_streams_go_on_when_connections_are_replaced_as_for_renewed_certificates() -> None:
    target = ScriptedTarget()
    target.limit = 20
    body = {
        "prompt": PROMPT,
        "max_tokens": 60,
        "seed": 11,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    ids: list[int] = []
    async with (
        running([target]) as harness,
        gateway(harness.address) as one,
        one.http() as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
                if target.limit is not None:
                    target.set_limit(None)
                    await one._coordinators.renew(one._connect)
        failovers = one.parts.registry.get_sample_value("specdec_gateway_failovers_total")
    assert ids == expected_ids(target, 60)
    assert failovers == 0


async def completion(one: GatewayAtHand, body: dict[str, Any]) -> list[int]:
    async with one.http() as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])
