"""Thoughts told apart over HTTP by the end of the rendered prompt, with the parsers that the chat template names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
TEMPLATE = "{% set end = '</think>' %}{{ messages[0].content }}<think>{% if think is defined %}{{ end }}{% endif %}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "seed": 1}
CLOSED = {"chat_template_kwargs": {"think": False}}


async def test_a_template_that_opens_the_section_makes_an_output_without_an_end_thoughts() -> None:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": TEMPLATE})
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:
        for more, field, other in ((CLOSED, "content", "reasoning_content"), ({}, "reasoning_content", "content")):
            answer = await client.post("/v1/chat/completions", json={**CHAT, **more})
            [choice] = answer.json()["choices"]
            told = choice["message"][field]
            assert told
            assert not choice["message"].get(other)
            streamed = ""
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, **more, "stream": True}) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        delta = json.loads(line[6:])["choices"][0]["delta"]
                        assert not delta.get(other)
                        streamed += delta.get(field, "")
            assert streamed == told
        asked = {"model": "scripted", "messages": CHAT["messages"], "max_tokens": 8}
        message = (await client.post("/v1/messages", json=asked)).json()
        assert [block["type"] for block in message["content"]] == ["thinking"]
