"""A gateway of this version before coordinators of the last release, and of both."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from specdec.client import Client
from specdec.gateway.upstream.beginning import key_of
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.rendezvous import score, word
from tests.support.releases import Build
from tests.support.services.faults import make_request
from tests.support.services.gateways import gateway
from tests.support.services.mixed_fleet import MixedFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAMES = ("coordinator-gateway-last", "coordinator-gateway-this")
NUM_TOKENS = 600
"""Tokens of a stream whose coordinator is killed: far more than are under way when its reader asks for that."""
NUM_ALIKE = 150
"""Tokens of an answer that is compared."""
PROMPT = "Once upon a time"


@pytest.fixture
def fleet(mixed_fleet: MixedFleet, builds: Mapping[str, Build]) -> Iterator[MixedFleet]:
    """`mixed_fleet` with a coordinator of each version, which share all replicas."""
    for name in NAMES:
        mixed_fleet.add(name, builds[name.rpartition("-")[2]])
    asyncio.run(mixed_fleet.start(*NAMES))
    yield mixed_fleet
    for name in NAMES:
        mixed_fleet.kill(name)


def body(**fields: Any) -> dict[str, Any]:
    same = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return {**same, "return_token_ids": True, **fields}


async def over_grpc(address: str, num_tokens: int, prompt: str = PROMPT) -> tuple[list[int], str]:
    asked = make_request(prompt=prompt, max_tokens=num_tokens, temperature=1.0, seed=5)
    async with Client(address) as client:
        choice = (await client.complete(asked)).choices[0]
    return choice.token_ids, choice.text


async def test_the_last_releases_coordinator_serves_over_http_what_it_serves_over_grpc(fleet: MixedFleet) -> None:
    last = fleet.address(NAMES[0])
    expected = await over_grpc(last, NUM_ALIKE)
    async with gateway(last) as one, one.http() as client:
        (choice,) = (await client.post("/v1/completions", json=body(max_tokens=NUM_ALIKE))).json()["choices"]
        scored = (await client.post("/v1/completions", json=body(max_tokens=4, logprobs=2, echo=True))).json()
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"]
        tokens = (await client.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    assert (choice["token_ids"], choice["text"]) == expected
    told = scored["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == len(told["tokens"]) == len(tokens) + 4
    assert all(value <= 0 for value in told["token_logprobs"][1:])


def prompt_that_prefers(first: str, other: str) -> str:
    """A prompt for which a gateway asks the first of two coordinators first."""

    def is_preferred(prompt: str) -> bool:
        key = key_of(api.GenerateRequest(prompt=prompt), ())
        return score(word(first.encode()), key) > score(word(other.encode()), key)

    return next(filter(is_preferred, (f"{PROMPT} {number}" for number in itertools.count())))


@pytest.mark.parametrize("first", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
async def test_a_stream_goes_on_at_a_coordinator_of_the_other_version(fleet: MixedFleet, first: str) -> None:
    (other,) = set(NAMES) - {first}
    addresses = fleet.address(first), fleet.address(other)
    prompt = prompt_that_prefers(*addresses)
    expected = await over_grpc(addresses[1], NUM_TOKENS, prompt)
    ids: list[int] = []
    text = ""
    asked = body(stream=True, prompt=prompt)
    async with gateway(*addresses) as one, one.http() as client:
        assert (await client.get("/health")).status_code == 200  # which connects both
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    text += choice["text"]
                if len(ids) >= 20 and fleet.is_running(first):
                    fleet.kill(first)
        assert one.parts.registry.get_sample_value("specdec_gateway_failovers_total") >= 1
    assert (ids, text) == expected
