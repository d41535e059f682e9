"""A gateway behind nginx with default settings: HTTP/1.0, buffers, time-outs; only `proxy_pass` is set."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from specdec.client import Client, Completion, generate_resuming
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.nginx_server import nginx
from tests.support.services.black_hole import black_hole
from tests.support.services.coordinator_harness import Harness, collect, request, running
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.faults import eventually
from tests.support.services.gateways import GatewayAtHand, gateway

pytestmark = pytest.mark.timeout(120)
WORDS = [{"role": "user", "content": "x"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": WORDS, "max_tokens": 20},
    "/v1/completions": {"prompt": "x", "max_tokens": 20},
    "/v1/responses": {"input": "x", "max_output_tokens": 20},
    "/v1/messages": {"model": "scripted", "messages": WORDS, "max_tokens": 20},
}
ENDS = ("data: [DONE]", "response.incomplete", "message_stop")


@dataclass(frozen=True)
class Stack:
    """A target, its coordinator, a gateway, and nginx before it."""

    target: ScriptedTarget
    harness: Harness
    gateway: GatewayAtHand
    url: str
    client: httpx2.AsyncClient
    """Of nginx."""


@asynccontextmanager
async def behind_nginx(folder: Path, more: str = "", **settings: Any) -> AsyncIterator[Stack]:
    """All of them; `more` are directives of nginx."""
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    async with running([target]) as harness, gateway(harness.address, **settings) as one:
        with nginx(one.port, folder, more) as url:
            async with httpx2.AsyncClient(base_url=url, timeout=90) as client:
                yield Stack(target, harness, one, url, client)


async def test_streams_arrive_event_by_event_with_headers_and_comments_at_once(tmp_path: Path) -> None:
    settings = "proxy_read_timeout 10s;"
    async with behind_nginx(tmp_path, settings, keep_alive_s=0.2) as stack, stack.gateway.http() as direct:
        for path, body in STREAMS.items():
            asked = {**body, "seed": 5, "stream": True}
            stack.target.set_limit(None)
            expected = await direct.post(path, json=asked)
            stack.target.set_limit(0)
            async with stack.client.stream("POST", path, json=asked) as answer:
                assert answer.status_code == 200  # no token has come yet
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines, got = answer.aiter_lines(), [""]
                for limit in (3, 6, None):
                    while not got[-1].startswith(": keep-alive"):  # what was said before has come
                        got.append(await anext(lines))
                    stack.target.set_limit(limit)
                    got.append("")
                got += [line async for line in lines]
            assert any(end in "".join(got[-3:]) for end in ENDS), path
            assert _text(got) == _text(expected.text.splitlines()) != "", path


def _text(lines: list[str]) -> str:
    """The text of all events."""
    text = ""
    for line in lines:
        if line == "data: [DONE]" or not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", []):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = event.get("delta")
        if isinstance(delta, str) and event["type"].endswith("text.delta"):
            text += delta
        elif isinstance(delta, dict):
            text += delta.get("text") or ""
    return text


async def test_clients_get_through_nginx_what_they_get_without_it(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as stack:
        told: list[Any] = []
        for base in (stack.gateway.url, stack.url):
            async with (
                openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as chats,
                anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as messages,
            ):
                asked: Any = {"model": "scripted", "messages": WORDS, "max_tokens": 20}
                chat = await chats.chat.completions.create(**asked, seed=3)
                message = await messages.messages.create(**asked, extra_body={"seed": 3})
                response = await chats.responses.create(
                    model="scripted", input="x", max_output_tokens=20, extra_body={"seed": 3}
                )
                with pytest.raises(openai.BadRequestError) as refused:
                    await chats.chat.completions.create(**asked, temperature=-1)
                models = await chats.models.list()
            block: Any = message.content[0]
            told.append(
                [chat.choices[0].message.content, block.text, response.output_text, refused.value.body, models.data]
            )
        assert told[0] == told[1]


async def test_headers_of_answers_fit_into_nginx_buffer_of_headers(tmp_path: Path) -> None:
    unknown = {f"field_{number}_{'x' * 200}": 1 for number in range(50)}
    schemas = {f"p{number}_{'y' * 200}": {"format": f"unknown_{number}"} for number in range(50)}
    body = {
        **STREAMS["/v1/chat/completions"],
        **unknown,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": schemas}}},
    }
    headers = {"x-request-id": "i" * 128, "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    with running_fake_coordinator() as (_, address):
        async with gateway(address) as one:
            with nginx(one.port, tmp_path) as url:
                async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
                    whole, streamed = [
                        await client.post("/v1/chat/completions", json={**body, "stream": stream}, headers=headers)
                        for stream in (False, True)
                    ]
    for answer in (whole, streamed):
        assert answer.status_code == 200, answer.text
        assert answer.headers["specdec-ignored-fields"].startswith("field_0_")
        assert answer.headers["specdec-not-enforced"]


async def test_a_client_that_leaves_nginx_leaves_the_coordinator(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as stack:

        async def is_idle() -> bool:
            return stack.harness.metric("requests_running") == 0

        stack.target.set_limit(2)
        for path, body in STREAMS.items():
            async with stack.client.stream("POST", path, json={**body, "stream": True}) as answer:
                await anext(answer.aiter_lines())
                assert stack.harness.metric("requests_running") == 1
            await eventually(is_idle, path)


@pytest.mark.long
async def test_a_minute_of_silence_does_not_end_a_stream(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as stack:
        stack.target.set_limit(0)
        asked = {**STREAMS["/v1/chat/completions"], "stream": True}
        async with stack.client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines, num_silences = answer.aiter_lines(), 0
            while num_silences < 7:
                num_silences += await anext(lines) == ": keep-alive"
            stack.target.set_limit(None)
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_stream_through_a_proxy_goes_on_when_its_upstream_dies(tmp_path: Path) -> None:
    target, body = ScriptedTarget(), request(max_tokens=20)
    target.limit = 5
    async with running([target]) as harness, black_hole(harness.address) as hole:
        with nginx(int(hole.address.rpartition(":")[2]), tmp_path, speaks_grpc=True) as url:
            async with Client(url.removeprefix("http://")) as client:
                seen = Completion()
                async for chunk in generate_resuming(client, body):
                    seen.add(chunk)
                    if seen.choices and len(seen.choices[0].token_ids) == 5 and target.limit == 5:
                        hole.close()
                        target.set_limit(None)
        whole = await collect(harness.stub.Generate(body))
    assert seen.choices[0].text == whole.texts[0]
