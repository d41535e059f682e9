"""HTTP client to gateway: every route that takes a body, with one value wrong; a scripted target behind."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.json_values import spoilt_json
from tests.fuzz.judge import Complaints, require, within
from tests.fuzz.links.client import short_target
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, running
from tests.support.services.gateways import gateway

_MOST_S = 20.0
_PROMPT = [5, 6, 7]
_NUM_TOKENS = 4
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
_SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 1, "seed": 3, "stop": ["zzz"], "user": "u",
    "logit_bias": {"7": 1.5}, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "bad_words": ["x"], "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "priority": 1,
    "return_token_ids": True, "speculation": {"enabled": False, "max_draft_tokens": 2}, "cache_salt": "s",
    "stop_token_ids": [99], "min_tokens": 1, "truncate_prompt_tokens": 50, "skip_special_tokens": True,
    "allowed_token_ids": [5, 6, 7], "logits_processors": None, "request_id": "r",
}  # fmt: skip
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "scripted", "prompt": _PROMPT, "max_tokens": 3, "logprobs": 2, **_SAMPLING},
    "/v1/chat/completions": {
        "messages": _CHAT, "max_completion_tokens": 3, "tools": [_TOOL], "tool_choice": "none", "logprobs": True,
        "top_logprobs": 1, "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1},
        "documents": [{"t": "d"}],
        "reasoning_effort": "low", "parallel_tool_calls": True, "prediction": {"type": "content", "content": "a"},
        "metadata": {"a": "b"}, **_SAMPLING,
    },
    "/v1/messages": {
        "model": "scripted", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "temperature": 0.5, "top_k": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop_sequences": ["zz"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}, "stream": False,
        "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "system": "s"},
    "/v1/responses": {
        "model": "scripted", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "max_output_tokens": 16, "instructions": "i", "temperature": 0.5, "store": False, "stream": False,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "none",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": [], "truncation": "disabled",
    },
    "/v1/responses/input_tokens": {"model": "scripted", "input": "hi"},
    "/tokenize": {"prompt": "the quick", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [7, 8, 9]},
}  # fmt: skip
_NOT_SERVED = {501}
"""What is known and not there."""


class Callers:
    """Posts anything to a gateway, and judges its answers."""

    def __init__(self, client: httpx2.AsyncClient, target: ScriptedTarget) -> None:
        self._client = client
        self._expected = expected_ids(target, _NUM_TOKENS, _PROMPT)

    async def try_one(self, case: Case) -> None:
        """A body with something wrong: it is answered, or refused with a reason."""
        rng = case.rng
        route = rng.choice(list(ROUTES))
        body = copy.deepcopy(ROUTES[route])
        if rng.random() < 0.5:
            body = {name: value for name, value in body.items() if not name.startswith("stream")}
        case.what.append(route)
        data = case.sent(spoilt_json(rng, case, body))
        answer = await within(_MOST_S, self._client.post(route, content=data, headers=_headers(rng)), route)
        status = answer.status_code
        is_right = status < 500 or status in _NOT_SERVED
        require(is_right, f"{status}: {answer.text[:300]}")
        if status >= 400:
            told = json.loads(answer.content)["error"]
            require(bool(told["message"]) and bool(told["type"]), f"{status} without a reason: {told}")
        elif answer.headers["content-type"].startswith("text/event-stream"):
            for line in answer.text.splitlines():
                if line.startswith("data: {"):
                    json.loads(line[6:])
        else:
            json.loads(answer.content)

    async def check_routes(self) -> None:
        """With nothing wrong all bodies are answered. Raises Fault."""
        for route, body in ROUTES.items():
            answer = await within(_MOST_S, self._client.post(route, json=body), route)
            require(answer.status_code == 200, f"{route}: {answer.text[:300]}")

    async def check_good(self) -> None:
        """A good request is answered as ever. Raises Fault."""
        body = {"prompt": _PROMPT, "max_tokens": _NUM_TOKENS, "seed": 11, "ignore_eos": True, "return_token_ids": True}
        answer = await within(_MOST_S, self._client.post("/v1/completions", json=body), "a good request")
        require(answer.status_code == 200, f"a good request: {answer.text[:300]}")
        ids = answer.json()["choices"][0]["token_ids"]
        require(ids == self._expected, f"a good request got {ids}")


def _headers(rng: random.Random) -> dict[str, str]:
    kinds = ("application/json", "application/json; charset=utf-16", "text/plain", "", "multipart/form-data; boundary=")
    return {"content-type": kinds[0] if rng.random() < 0.9 else rng.choice(kinds)}


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A gateway and a coordinator in this process."""
    target = short_target()
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:
        callers = Callers(client, target)
        await callers.check_routes()

        async def run(case: Case) -> None:
            await callers.try_one(case)
            await callers.check_good()

        yield run


LINK = Link("client-gateway", opened)
