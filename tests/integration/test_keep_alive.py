"""Proxies cut what is silent: a stream has its headers at once, and comments while no output comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "include_reasoning": False}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 20}),
    ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 20}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 20}),
]


async def test_each_stream_is_kept_alive_before_its_first_token_and_in_hidden_thoughts() -> None:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": "{{ messages[0].content }}<think>"})
    async with (
        running([target]) as harness,
        gateway(harness.address, keep_alive_s=0.02, reasoning_parser="deepseek_r1") as one,
        one.http() as client,
    ):
        for path, body in STREAMS:
            target.set_limit(0)
            async with client.stream("POST", path, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200  # told while the target gives no token
                lines = answer.aiter_lines()
                for limit in (10, None):
                    while await anext(lines) != ": keep-alive":
                        pass
                    target.set_limit(limit)
                events = [line async for line in lines if line.startswith("data: ")]
            assert "response.incomplete" in events[-1] or events[-1] == "data: [DONE]", path
