"""A prompt that is too long is refused in the words and with the code by which clients know to shorten it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import error_of, request, running
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
LONG = "the quick brown fox jumps over it " * 1000
"""More tokens than the context of 4096, in fewer bytes than any limit."""
VAST = "\n" * 3_000_000
"""More bytes than a context of 4096 tokens can hold."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


HTTP: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": LONG, "stream": True}, "prompt"),
    ("/v1/completions", {"prompt": VAST}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 5000}, "prompt"),
    ("/v1/completions", {"prompt": ["x", LONG]}, "prompt"),
    ("/v1/completions", {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
    ("/v1/chat/completions", {"messages": said(LONG)}, "messages"),
    ("/v1/chat/completions", {"messages": said(LONG), "stream": True}, "messages"),
    ("/v1/chat/completions", {"messages": said(VAST)}, "messages"),
    ("/v1/chat/completions", {"messages": said("x") * 5000}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": said(VAST), "stream": True}, "input"),
]
GRPC: list[tuple[dict[str, Any], str]] = [
    ({"prompt": LONG}, "prompt"),
    ({"prompt": VAST}, "prompt"),
    ({"prompt_token_ids": api.TokenIds(token_ids=[5] * 4096)}, "prompt_token_ids"),
    ({"prompt": LONG, "truncate_prompt_tokens": 4096}, "prompt"),
    ({"messages": api.ChatMessages(messages=[api.ChatMessage(role="user", content=LONG)])}, "messages"),
    ({"messages": api.ChatMessages(messages=[api.ChatMessage(role="user", content=VAST)])}, "messages"),
    ({"messages": api.ChatMessages(messages=[api.ChatMessage(role="user")] * 5000)}, "messages.messages"),
]


async def test_each_way_to_send_a_prompt_that_is_too_long_is_refused_alike() -> None:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": TEMPLATE})
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:
        for path, body, param in HTTP:
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param), body
            assert re.search(r"maximum context length is 4096 tokens", error["message"]), error
        for fields, field in GRPC:
            refused = await error_of(harness.stub.Generate(request(**fields)))
            assert isinstance(refused, InvalidRequest)
            assert (refused.reason, refused.field) == (CONTEXT_LENGTH_EXCEEDED, field)
            assert "maximum context length is 4096 tokens" in refused.message


async def test_output_that_does_not_fit_behind_the_prompt_is_refused_alike_where_it_is_not_cut() -> None:
    async with (
        running([ScriptedTarget()], excess_max_tokens="refuse") as harness,
        gateway(harness.address) as one,
        one.http() as client,
    ):
        answer = await client.post("/v1/completions", json={"prompt": [5] * 96, "max_tokens": 4001})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
        assert "maximum context length is 4096 tokens" in error["message"]
        long = await client.post("/v1/completions", json={"prompt": "x", "stop": ["x" * 100_000]})
        assert long.json()["error"]["code"] == "invalid_value"
