"""Coordinators behind one name: a gateway finds those that come, and leaves running streams where they are."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.gateway.upstream import coordinators
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.services.black_hole import black_hole
from tests.support.services.coordinator_harness import expected_ids, running
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.faults import eventually
from tests.support.services.gateways import GatewayAtHand, gateway

pytestmark = pytest.mark.timeout(120)
PROMPT = [5, 6, 7]


class Names:
    """What the machine is told that names stand for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] | None = []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **_options: Any) -> list[Any]:
        if host != "coordinators":
            address = (host, port)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]
        if self.addresses is None:
            raise socket.gaierror("the name server is away")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in self.addresses]


NAME = "dns:///coordinators:50051"


def known(one: GatewayAtHand) -> list[str]:
    return sorted(member.client.address for member in one._coordinators._members())


async def knows(one: GatewayAtHand, *addresses: str) -> None:
    async def does() -> bool:
        return known(one) == sorted(addresses)

    await eventually(does, f"the gateway knows {addresses}")


def all_are_connected(one: GatewayAtHand) -> bool:
    return all(member.client.is_connected for member in one._coordinators._members())


def socket_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def test_all_addresses_of_a_name_are_known_one_by_one_and_looked_up_again_when_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinators, "_LOOK_UP_S", 3600.0)
    monkeypatch.setattr("specdec.wire.discovery._LEAST_S", 0.05)
    names, targets = Names(monkeypatch), [ScriptedTarget() for _ in range(2)]
    async with running(targets[:1]) as first, running(targets[1:], owner_id="coordinator-2") as second:
        names.addresses = [socket_address(first.address), ("127.0.0.1", 1)]
        async with gateway(NAME) as one:
            await knows(one, first.address, "127.0.0.1:1")
            names.addresses = [socket_address(first.address), socket_address(second.address)]
            body = {"max_tokens": 6, "seed": 11, "ignore_eos": True, "return_token_ids": True}
            for number in range(20):  # some prefer the coordinator that is not there
                prompt = [5, 6, number]
                answer = await completion(one, {**body, "prompt": prompt})
                assert answer == expected_ids(targets[0], 6, prompt, seed=11)
            await knows(one, first.address, second.address)
            names.addresses = None
            one._coordinators._wanted.set()
            assert await completion(one, {**body, "prompt": PROMPT}) == expected_ids(targets[0], 6, seed=11)
            assert len(known(one)) == 2, "a broken name server removes nobody"


async def test_a_gateway_listens_once_it_has_reached_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names, targets = Names(monkeypatch), [ScriptedTarget() for _ in range(2)]
    async with running(targets[:1]) as first, running(targets[1:], owner_id="coordinator-2") as second:
        names.addresses = [socket_address(first.address), socket_address(second.address)]
        async with gateway(NAME) as one:
            assert known(one) == sorted([first.address, second.address])
            assert all_are_connected(one)
        names.addresses = None
        async with gateway(NAME) as one, one.http() as client:
            assert (await client.get("/version")).status_code == 200


async def test_streams_go_on_at_a_coordinator_that_its_name_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.wire.discovery._LEAST_S", 0.01)
    names, targets = Names(monkeypatch), [ScriptedTarget() for _ in range(2)]
    targets[0].limit = 20
    async with running(targets[:1]) as first, running(targets[1:], owner_id="coordinator-2") as second:
        names.addresses = [socket_address(first.address)]
        async with gateway(NAME) as one, one.openai() as client:
            await knows(one, first.address)
            fields: dict[str, Any] = {"prompt": PROMPT, "model": "scripted", "max_tokens": 60, "seed": 11}
            stream = await client.completions.create(**fields, stream=True, extra_body={"return_token_ids": True})
            events = aiter(stream)
            ids = list((await anext(events)).choices[0].token_ids)
            names.addresses = [socket_address(second.address)]
            one._coordinators._wanted.set()
            await knows(one, second.address)
            other = await client.completions.create(**fields, extra_body={"return_token_ids": True})
            targets[0].set_limit(None)
            ids += [token async for event in events for c in event.choices for token in c.token_ids]
            failovers = one.parts.registry.get_sample_value("specdec_gateway_failovers_total")
    assert ids == expected_ids(targets[0], 60) == other.choices[0].token_ids
    assert failovers == 0
    assert len(targets[0].opened) == len(targets[1].opened) == 1


async def test_all_turns_of_a_chat_go_to_one_coordinator_and_other_chats_to_both() -> None:
    targets = [ScriptedTarget() for _ in range(2)]
    for target in targets:
        target.tokenizer_config = json.dumps({"chat_template": "{{ messages[-1].content }}"})
    async with (
        running(targets[:1]) as first,
        running(targets[1:], owner_id="coordinator-2") as second,
        gateway(first.address, second.address) as one,
        one.http() as client,
    ):
        assert all_are_connected(one)
        served = set()
        for number in range(20):  # all at one of two: once in half a million runs
            messages = [{"role": "system", "content": "one for all"}]
            before = [len(target.opened) for target in targets]
            for turn in range(2):
                messages.append({"role": "user", "content": f"{number} {turn}"})
                answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            opened = [len(target.opened) - former for target, former in zip(targets, before, strict=True)]
            assert sorted(opened) == [0, 2]
            served.add(opened.index(2))
        assert served == {0, 1}


@pytest.mark.parametrize(("names_of_certificate", "is_served"), [(["coordinators"], True), (["localhost"], False)])
async def test_the_certificate_of_each_address_must_have_the_configured_name(
    names_of_certificate: list[str], is_served: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority("ours")
    shown = authority.issue("coordinator", dns_names=names_of_certificate)
    volume = SecretVolume(tmp_path / "secret", shown, authority.certificate)
    names, credentials = Names(monkeypatch), grpc.ssl_server_credentials([(shown.key, shown.chain)])
    with running_fake_coordinator(credentials) as (fake, address):
        names.addresses = [socket_address(address)]
        async with gateway(NAME, coordinator_tls_dir=volume.folder) as one, one.http() as client:
            await knows(one, address)
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.status_code == (200 if is_served else 503)
    assert bool(fake.requests) is is_served


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
        assert all_are_connected(one)
        body = {"max_tokens": 60, "seed": 11, "ignore_eos": True, "return_token_ids": True}
        prompts = [[5, 6, number] for number in range(12)]  # others, so that each coordinator gets some
        answers = [asyncio.create_task(completion(one, {**body, "prompt": prompt})) for prompt in prompts]
        for target in targets:
            await target.until(lambda target=target: bool(target.sessions))  # type: ignore[misc]
        one_way.swallow_one_way(drip_s=0.2)
        for target in targets:
            target.set_limit(None)
        async with asyncio.timeout(60):
            for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
                assert answer == expected_ids(targets[1], 60, prompt)


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
                    one._coordinators.renew()
        failovers = one.parts.registry.get_sample_value("specdec_gateway_failovers_total")
    assert ids == expected_ids(target, 60)
    assert failovers == 0


async def completion(one: GatewayAtHand, body: dict[str, Any]) -> list[int]:
    async with one.http() as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])
