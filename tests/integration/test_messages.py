"""Anthropic's own client, unchanged, against a gateway: the tokens of a chat, tools, thoughts, streams, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from specdec.v1 import common_pb2, coordinator_pb2
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.fake_coordinator import TARGET, FakeCoordinator, running_fake_coordinator
from tests.support.services.gateways import gateway
from tests.support.services.key_files import hash_key

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
KEY = "sk-" + "7" * 43
TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SAID = ["<think>Hm", "m.</think>Let me ", 'add.<tool_call>{"name": "add", "argu', 'ments": {"a": 1}}</tool_call>']


class Saying(FakeCoordinator):
    """A coordinator that says SAID."""

    def _answer(self, request: coordinator_pb2.GenerateRequest) -> Iterator[coordinator_pb2.GenerateResponse]:
        yield coordinator_pb2.GenerateResponse(
            started=coordinator_pb2.GenerateStarted(request_id="r", model=TARGET, num_prompt_tokens=5)
        )
        for text in SAID:
            yield coordinator_pb2.GenerateResponse(delta=coordinator_pb2.ChoiceDelta(text=text))
        ended = coordinator_pb2.ChoiceFinished(reason=common_pb2.FINISH_REASON_STOP)
        yield coordinator_pb2.GenerateResponse(choice_finished=ended)
        usage = coordinator_pb2.Usage(prompt_tokens=5, completion_tokens=7)
        yield coordinator_pb2.GenerateResponse(finished=coordinator_pb2.GenerateFinished(usage=usage))


def client_of(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def chatting() -> ScriptedTarget:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": TEMPLATE})
    return target


async def test_a_message_has_the_text_of_a_chat_whole_and_streamed() -> None:
    messages: Any = [{"role": "user", "content": "w5 w6"}]
    extra = {"seed": 11}
    async with running([chatting()]) as harness, gateway(harness.address) as one, client_of(one.url) as client:
        async with one.openai() as other:
            chat = await other.chat.completions.create(model="scripted", messages=messages, max_tokens=20, seed=11)
        asked: Any = {"model": "scripted", "max_tokens": 20, "messages": messages, "extra_body": extra}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            pieces = [piece async for piece in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="scripted", messages=messages)
    said = chat.choices[0].message.content
    assert [block.text for block in whole.content if block.type == "text"] == [said]
    assert "".join(pieces) == said
    assert [block.text for block in streamed.content if block.type == "text"] == [said]
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 20
    assert chat.usage is not None
    assert counted.input_tokens == chat.usage.prompt_tokens


async def test_anthropics_client_lists_models_and_learns_where_its_base_url_is_wrong() -> None:
    async with running([chatting()]) as harness, gateway(harness.address) as one:
        async with client_of(one.url) as client, one.openai() as other:
            [model] = [model async for model in client.models.list()]
            assert (model.id, model.display_name, model.type) == ("scripted", "scripted", "model")
            assert (await client.models.retrieve("scripted")).created_at.timestamp() == model.created_at.timestamp()
            [same] = [model async for model in other.models.list()]
            assert same.model_extra == {"root": "scripted", "parent": None, "max_model_len": 4096}
        async with client_of(f"{one.url}/v1") as client:
            with pytest.raises(anthropic.NotFoundError, match="Did you mean /v1/messages"):
                await client.messages.create(model="x", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        async with one.http() as http:
            wrong = [await http.post(path, json={}) for path in ("/chat/completions", "/nothing")]
            assert ["Did you mean" in answer.json()["error"]["message"] for answer in wrong] == [True, False]


async def test_tools_thoughts_and_results_go_round() -> None:
    servicer = Saying()
    with running_fake_coordinator(servicer=servicer) as (_, address):
        parsers = {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}
        async with gateway(address, **parsers) as one, client_of(one.url) as client:
            asked: Any = {"model": "big", "max_tokens": 50, "tools": [TOOL]}
            first = [{"role": "user", "content": "1?"}]
            async with client.messages.stream(**asked, messages=first) as stream:
                streamed = await stream.get_final_message()
            whole = await client.messages.create(**asked, messages=first)
            thought, text, call = streamed.content
            assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert thought.thinking == "Hmm."  # type: ignore[union-attr]
            assert text.text == "Let me add."  # type: ignore[union-attr]
            assert (call.name, call.input) == ("add", {"a": 1})  # type: ignore[union-attr]
            assert streamed.stop_reason == whole.stop_reason == "tool_use"
            assert [block.type for block in whole.content] == [block.type for block in streamed.content]
            result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}  # type: ignore[union-attr]
            turns: Any = [
                *first,
                {"role": "assistant", "content": streamed.content},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(**asked, messages=turns)
    roles = [message.role for message in servicer.requests[-1].messages.messages]
    assert roles == ["user", "assistant", "tool"]


async def test_errors_have_anthropics_form_and_classes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "k", "tenant": "ours", "sha256": hash_key(KEY)}]}))
    messages: Any = [{"role": "user", "content": "w5"}]
    async with running([chatting()], api_keys_file=keys) as harness, gateway(harness.address) as one:
        async with client_of(one.url) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="scripted", max_tokens=2, messages=messages)
        async with client_of(one.url, KEY) as client:
            assert (await client.messages.create(model="scripted", max_tokens=2, messages=messages)).content
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(model="other", max_tokens=2, messages=messages)
            with pytest.raises(anthropic.BadRequestError) as wrong:
                await client.messages.create(model="scripted", max_tokens=2, messages=messages, extra_body={"top_p": 7})
            with pytest.raises(anthropic.BadRequestError) as long:
                much: Any = [{"role": "user", "content": "w5 " * 5000}]
                await client.messages.create(model="scripted", max_tokens=2, messages=much)
            with pytest.raises(anthropic.BadRequestError) as streamed:
                async with client.messages.stream(
                    model="scripted", max_tokens=2, messages=messages, extra_body={"temperature": -1}
                ):
                    pass
    for caught, kind, words in (
        (missing, "not_found_error", "other"),
        (wrong, "invalid_request_error", "top_p"),
        (long, "invalid_request_error", "prompt is too long: "),
        (streamed, "invalid_request_error", "temperature"),
    ):
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        assert words in body["error"]["message"]
