"""Nothing that a service keeps grows with the names that clients choose, beyond bounds that have tests of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from tests.support.kept import grown, sizes
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, request, running
from tests.support.services.gateways import GatewayAtHand, gateway

NUM_AT_ONCE = 6
NUM_ROUNDS = 2
LEAST_GROWN = NUM_AT_ONCE * NUM_ROUNDS // 2
BOUNDED = {
    "PrefixRouter._replicas_by_block": "65,536 blocks; tests/unit/coordinator/test_router.py",
    "FairQueue._tenants": "1,024 idle ones; tests/unit/coordinator/test_fair_queue.py",
    "TokenQuotas._buckets": "65,536; tests/unit/coordinator/test_quotas.py",
    "_State.requests": "1,024 that ended; tests/integration/test_store_requests.py",
    "_State.ended": "the same",
    "_State.live": "tenants of these, after a sweep",
    "_Request.token_ids": "of these",
    "_Request.origins": "of these",
    "_Known.texts": "524,288 tokens; tests/unit/gateway/test_vocabulary.py",
    "DetokenizerFactory._texts": "the vocabulary",
    "DetokenizerFactory._byte_level": "the vocabulary",
}


async def all_of(*calls: Any) -> None:
    await asyncio.gather(*calls, return_exceptions=True)


async def ask_coordinator(harness: Harness, name: str) -> None:
    """Every kind of call under names that nobody else uses, good ones and bad ones."""
    tenant = ((TENANT_KEY, f"tenant {name}"),)
    names = {"request_id": f"request {name}", "cache_salt": f"salt {name}"}
    good = request(range(5, 40), max_tokens=3, **names)
    constrained = request(max_tokens=2, constraint=pb.Constraint(regex=name))
    text = api.GenerateRequest(
        prompt=f"once {name}", sampling=api.SamplingParams(max_tokens=1, stop=[name], bad_words=[name])
    )
    chat = api.GenerateRequest(messages=api.ChatMessages(messages=[api.ChatMessage(role=name, content=name)]))
    infer = harness.channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=oip.ModelInferRequest.SerializeToString,
        response_deserializer=oip.ModelInferResponse.FromString,
    )
    stub = harness.stub
    for body in (
        good,
        constrained,
        text,
        chat,
        request(model=name),
        request(speculation=api.SpeculationParams(drafters=[name])),
    ):
        await all_of(_read(stub.Generate(body, metadata=tenant)))
    await all_of(
        stub.Abort(api.AbortRequest(request_id=name), metadata=tenant),
        stub.Tokenize(api.TokenizeRequest(text=name, model=name), metadata=tenant),
        stub.Tokenize(api.TokenizeRequest(text=f"once {name}"), metadata=tenant),
        stub.Detokenize(api.DetokenizeRequest(token_ids=[5], model=name), metadata=tenant),
        infer(oip.ModelInferRequest(model_name=name, id=name), metadata=tenant),
    )
    left = stub.Generate(request(max_tokens=1000, ignore_eos=True), metadata=tenant)
    await all_of(left.read())
    left.cancel()


async def _read(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def ask_gateway(one: GatewayAtHand, name: str) -> None:
    headers = {"authorization": f"Bearer {name}", "specdec-tenant": name, "x-request-id": name, f"x-{name}": name}
    chat = {"messages": [{"role": "user", "content": name}], "user": name, "max_tokens": 1, "logprobs": True}
    async with one.http() as client:
        for path, body in (
            ("/v1/completions", {"prompt": f"once {name}", "max_tokens": 2, "logprobs": 2, "cache_salt": name}),
            ("/v1/completions", {"prompt": name, "model": name, name: 1}),
            ("/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": {"name": name}}]}),
            ("/v1/chat/completions", {**chat, "response_format": {"type": name}}),
            ("/v1/responses", {"input": name, "previous_response_id": name}),
            ("/v1/messages", {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": name}]}),
            (f"/v1/{name}", {}),
            ("/tokenize", {"prompt": name}),
        ):
            await client.post(path, headers=headers, json=body)
        await client.get(f"/{name}?{name}={name}", headers=headers)
        await client.get(f"/v1/models/{name}", headers=headers)


async def in_rounds(ask: Callable[[str], Awaitable[None]], first: int) -> None:
    for number in range(first, first + NUM_ROUNDS):
        await asyncio.gather(*(ask(f"n{number}x{each}") for each in range(NUM_AT_ONCE)))


def told(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    return {where: by for where, by in grown(before, after, LEAST_GROWN).items() if where.rstrip("[]") not in BOUNDED}


async def test_names_of_clients_fill_nothing_that_a_coordinator_or_gateway_keeps() -> None:
    running_one = running([ScriptedTarget()], [ScriptedDraft()], quota_tokens_per_s=1e6)
    async with running_one as harness, gateway(harness.address) as one:

        def kept() -> Counter[str]:
            return sizes(harness.service, one)

        async def ask(name: str) -> None:
            await ask_coordinator(harness, name)
            await ask_gateway(one, name)

        await in_rounds(ask, 0)
        before = kept()
        await in_rounds(ask, 1000)
        for _ in range(200):  # what is cancelled takes a moment to end
            if not told(before, kept()):
                break
            await asyncio.sleep(0.1)
        assert not told(before, kept())
