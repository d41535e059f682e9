"""What a client is told that asks for the impossible."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import (
    InvalidRequest,
    ModelNotFound,
)
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    expected_ids,
    request,
    running,
)


async def test_conversations_without_a_chat_template_are_refused_clearly() -> None:
    async with running([ScriptedTarget()]) as harness:
        messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content="hi")])
        error = await error_of(harness.stub.Generate(request(messages=messages)))
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest(with_tokenizer=True))
    assert not info.has_chat_template
    assert not info.tokenizer.HasField("chat_template")
    assert isinstance(error, InvalidRequest)
    assert error.field == "messages"
    assert "chat template" in error.description


BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_token_ids", {"prompt_token_ids": api.TokenIds()}),
    ("prompt", {"prompt": ""}),
    ("prompt_token_ids", {"prompt_token_ids": api.TokenIds(token_ids=[5] * 4096)}),
    ("prompt_token_ids.token_ids[1]", {"prompt_token_ids": api.TokenIds(token_ids=[5, 99999])}),
    ("sampling.temperature", {"temperature": -0.1}),
    ("sampling.temperature", {"temperature": math.nan}),
    ("sampling.temperature", {"temperature": math.inf}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.top_p", {"top_p": 1.5}),
    ("sampling.top_p", {"top_p": math.nan}),
    ("sampling.min_p", {"min_p": -0.1}),
    ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
    ("sampling.presence_penalty", {"presence_penalty": 2.5}),
    ("sampling.frequency_penalty", {"frequency_penalty": -2.5}),
    ("sampling.logit_bias[99999]", {"logit_bias": {99999: 1.0}}),
    ("sampling.logit_bias[5]", {"logit_bias": {5: 101.0}}),
    ("sampling.logit_bias[5]", {"logit_bias": {5: math.nan}}),
    ("sampling.max_tokens", {"max_tokens": 0}),
    ("sampling.min_tokens", {"min_tokens": 21}),
    ("sampling.n", {"n": 0}),
    ("sampling.n", {"n": 17}),
    ("sampling.stop", {"stop": ["x"] * 10_000}),
    ("sampling.stop[1]", {"stop": ["x", ""]}),
    ("sampling.stop[0]", {"stop": ["x" * 257]}),
    ("sampling.stop_token_ids[0]", {"stop_token_ids": [99999]}),
    ("sampling.logprobs", {"logprobs": 21}),
    ("sampling.prompt_logprobs", {"prompt_logprobs": 21}),
    ("sampling.truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    (
        "speculation.verify_mode",
        {"speculation": api.SpeculationParams(verify_mode=pb.VerifyMode.ValueType(9))},
    ),
    ("request_id", {"request_id": "x" * 300}),
    ("request_id", {"request_id": "a\nb"}),
    ("resume.resume_token", {"request_id": "a", "resume": api.Resume(resume_token=b"forged")}),
]


async def test_every_bad_request_is_refused_with_the_field_at_fault() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        for field, fields in BAD_REQUESTS:
            error = await error_of(harness.stub.Generate(request(**fields)))
            assert isinstance(error, InvalidRequest), (fields, error)
            assert error.field == field, (fields, error)
        error = await error_of(harness.stub.Generate(api.GenerateRequest()))
        assert isinstance(error, InvalidRequest)
        assert error.field == "input"
        assert isinstance(await error_of(harness.stub.Generate(request(model="another"))), ModelNotFound)
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)
    assert len(target.opened) == 1


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_message_that_does_not_parse_is_an_invalid_argument(method: str) -> None:
    bad_utf8 = b"\x1a\x02\xff\xfe" if method == "Generate" else b"\x12\x02\xff\xfe"  # field 3 / 2, two bytes
    async with running([ScriptedTarget()]) as harness:
        make = harness.channel.unary_stream if method == "Generate" else harness.channel.unary_unary
        call = make(f"/specdec.v1.CoordinatorService/{method}")(bad_utf8)
        error = await error_of(call)
    assert isinstance(error, InvalidRequest)
    assert error.reason == "MALFORMED_MESSAGE"
