"""How much a client gets that asks for no number of tokens, or for more than there are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    expected_ids,
    read_tokens,
    request,
    resumed,
    running,
)
from tests.support.services.gateways import gateway

CHAT = {"messages": [{"role": "user", "content": "go"}]}
ROUTES = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/chat/completions", CHAT, "max_completion_tokens"),
    ("/v1/completions", {"prompt": [5, 6, 7]}, "max_tokens"),
    ("/v1/responses", {"input": "go"}, "max_output_tokens"),
]
LONG = 131_072
NUM_PROMPT = 3


def a_target(max_model_len: int) -> ScriptedTarget:
    target = ScriptedTarget(identity(max_model_len=max_model_len))
    target.tokens_per_verdict = 64
    return target


def asked(num_tokens: int | None, **fields: Any) -> api.GenerateRequest:
    body = request(**fields)
    body.sampling.ClearField("max_tokens")
    if num_tokens is not None:
        body.sampling.max_tokens = num_tokens
    return body


@pytest.mark.parametrize("num_tokens", [None, 8192, 2**32 - 1])
async def test_an_answer_goes_on_to_the_end_of_the_context(num_tokens: int | None) -> None:
    target = a_target(6000)
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(asked(num_tokens)))
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert result.ids() == expected_ids(target, 6000 - NUM_PROMPT)
    assert result.ended[0].reason == pb.FINISH_REASON_LENGTH
    assert info.max_tokens_limit == 6000


@pytest.mark.parametrize("num_tokens", [None, 40, 5000])
async def test_an_operator_may_cap_it(num_tokens: int | None) -> None:
    target = a_target(6000)
    async with running([target], max_tokens_limit=40) as harness:
        assert len((await collect(harness.stub.Generate(asked(num_tokens)))).ids()) == 40
        assert (await harness.stub.GetModelInfo(api.GetModelInfoRequest())).max_tokens_limit == 40


async def test_an_operator_may_refuse_what_cannot_be_had() -> None:
    target = a_target(100)
    async with running([target], excess_max_tokens="refuse") as harness:
        error = await error_of(harness.stub.Generate(asked(98)))
        assert isinstance(error, InvalidRequest)
        assert error.field == "sampling.max_tokens"
        assert "maximum context length is 100 tokens, and the prompt has 3" in error.description
        for num_tokens in (97, None):
            assert len((await collect(harness.stub.Generate(asked(num_tokens)))).ids()) == 97


async def test_who_asks_for_no_number_reserves_nothing() -> None:
    """The whole of a long context may be used, and neither quota nor the queue holds any of it before it is."""
    target = a_target(LONG)
    target.limit = 64
    async with running([target], quota_tokens_per_s=1, quota_burst_tokens=100, max_running=1) as harness:
        call = harness.stub.Generate(asked(None))
        await read_tokens(call, 64)
        [session] = target.sessions.values()
        assert session.body.sampling.max_tokens == LONG - NUM_PROMPT
        waiting = harness.stub.Generate(asked(None, prompt="other"))
        call.cancel()
        target.set_limit(None)
        await read_tokens(waiting, 16)
        waiting.cancel()


async def test_who_asks_for_no_number_gets_what_messages_carry_and_can_take_it_up_again() -> None:
    target = a_target(LONG)
    small = {"max_message_bytes": MIN_MESSAGE_BYTES}
    async with running([target], **small, credit_window_tokens=LONG) as harness:
        body = asked(None, n=16, request_id="mine")
        body.sampling.ClearField("seed")
        whole = await collect(harness.stub.Generate(body))
        [num_tokens] = {len(whole.ids(choice)) for choice in range(16)}
        assert 1000 < num_tokens < LONG // 16
        again = resumed(whole, body)
        assert again.ByteSize() <= MIN_MESSAGE_BYTES
        rest = await collect(harness.stub.Generate(again))
        assert not any(rest.ids(choice) for choice in range(16))
        assert {ended.reason for ended in rest.ended.values()} == {pb.FINISH_REASON_LENGTH}


def chatting(max_model_len: int) -> ScriptedTarget:
    """A target whose model has a chat template."""
    target = a_target(max_model_len)
    target.tokenizer_config = json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    return target


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
async def test_a_gateway_gives_what_there_is_to_who_asks_for_more(path: str, body: dict[str, Any], field: str) -> None:
    async with running([chatting(200)]) as harness, gateway(harness.address) as one, one.http() as client:
        answer = (await client.post(path, json={**body, field: 64_000})).json()
    usage = answer["usage"]
    assert usage["total_tokens"] == 200
    assert usage.get("completion_tokens", usage.get("output_tokens")) > 100
    if path == "/v1/responses":
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    else:
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
async def test_a_gateway_names_the_field_that_asks_for_too_much(path: str, body: dict[str, Any], field: str) -> None:
    async with (
        running([chatting(200)], excess_max_tokens="refuse") as harness,
        gateway(harness.address) as one,
        one.http() as client,
    ):
        answer = await client.post(path, json={**body, field: 64_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "maximum context length is 200 tokens" in answer.json()["error"]["message"]


async def test_a_chat_that_names_no_number_goes_on_as_the_description_says() -> None:
    async with running([chatting(6000)]) as harness, gateway(harness.address) as one, one.http() as client:
        answer = (await client.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True})).json()
        described = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert answer["usage"]["total_tokens"] == 6000
    told = described["ChatRequest"]["properties"]["max_completion_tokens"]["description"]
    assert told == described["ResponsesRequest"]["properties"]["max_output_tokens"]["description"]
    assert "Default: as many as fit the context" in told
