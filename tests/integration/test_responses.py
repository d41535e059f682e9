"""OpenAI's own client, unchanged, on /v1/responses: the tokens of a chat, tools, thoughts, streams, parsed output."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.gateways import gateway
from tests.support.services.talking_coordinator import TalkingCoordinator, calls, last_results

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


class Weather(BaseModel):
    """What `parse` makes of an answer."""

    city: str
    degrees: int


def say(request: api.GenerateRequest) -> str:
    """Two calls for the first turn, and a text for the next; JSON if it must be."""
    if request.sampling.constraint.json_schema:
        return '{"city": "Rome", "degrees": 21}'
    if not last_results(request):
        return "<think>Both.</think>Let me look." + calls(("look", {"city": "Rome"}), ("look", {"city": "Oslo"}))
    return f"<think>Done.</think>It is {' and '.join(last_results(request))}."


def chatting() -> ScriptedTarget:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": TEMPLATE})
    return target


async def test_a_response_has_the_text_of_a_chat_whole_and_streamed() -> None:
    async with running([chatting()]) as harness, gateway(harness.address) as one, one.openai() as client:
        extra = {"seed": 11}
        asked: Any = {"model": "scripted", "input": "w5 w6", "max_output_tokens": 20, "instructions": "w7"}
        messages: Any = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w5 w6"}]
        chat = await client.chat.completions.create(model="scripted", messages=messages, max_tokens=20, seed=11)
        whole = await client.responses.create(**asked, extra_body=extra)
        counted = await client.responses.input_tokens.count(model="scripted", input="w5 w6", instructions="w7")
        assert whole.usage is not None and counted.input_tokens == whole.usage.input_tokens
        async with client.responses.stream(**asked, extra_body=extra) as stream:
            events = [event async for event in stream]
    said = chat.choices[0].message.content
    final: Any = events[-1]
    assert said == whole.output_text == final.response.output_text
    assert (whole.status, final.type) == ("incomplete", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    assert chat.usage is not None and whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 20)


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_thoughts_and_results_go_round_with_what_was_answered(streams: bool) -> None:
    servicer = TalkingCoordinator(say)
    with running_fake_coordinator(servicer=servicer) as (_, address):
        async with gateway(address, **PARSERS) as one, one.openai() as client:
            items: list[Any] = [{"role": "user", "content": "Weather?"}]
            asked: Any = {"model": "big", "tools": [LOOK], "include": ["reasoning.encrypted_content"], "store": True}
            for _ in range(2):
                if streams:
                    async with client.responses.stream(**asked, input=items) as stream:
                        answer: Any = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked, input=items)
                items += [item.model_dump(exclude={"parsed_arguments"}) for item in answer.output]
                made = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
                for call in made:
                    degrees = {"Rome": "21", "Oslo": "3"}[json.loads(call.arguments)["city"]]
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": degrees})
            assert answer.output_text == "It is 21 and 3."
            assert answer.usage.output_tokens_details.reasoning_tokens > 0
    first, second = servicer.requests
    assert [message.role for message in second.messages.messages] == ["user", "assistant", "tool", "tool"]
    said = json.loads(second.messages.messages[1].fields_json)
    assert (said["reasoning_content"], len(said["tool_calls"])) == ("Both.", 2)
    assert json.loads(first.messages.tools_json)[0]["function"]["name"] == "look"


async def test_output_is_parsed_by_the_clients_own_type() -> None:
    servicer = TalkingCoordinator(say)
    with running_fake_coordinator(servicer=servicer) as (_, address):
        async with gateway(address, **PARSERS) as one, one.openai() as client:
            answer = await client.responses.parse(model="big", input="Weather?", text_format=Weather)
    assert answer.output_parsed == Weather(city="Rome", degrees=21)
    assert json.loads(servicer.requests[0].sampling.constraint.json_schema)["required"] == ["city", "degrees"]


async def test_tools_of_other_servers_are_named_in_a_header_or_refused() -> None:
    tools: Any = [{"type": "web_search"}, LOOK]
    with running_fake_coordinator(servicer=TalkingCoordinator(say)) as (_, address):
        async with gateway(address, **PARSERS) as one, one.openai() as client:
            raw = await client.responses.with_raw_response.create(
                model="big", input="x", tools=tools, extra_body={"colour": 1}
            )
            assert raw.headers["specdec-ignored-fields"] == "colour, tools[0]"
            assert [tool.type for tool in raw.parse().tools] == ["function"]
        async with gateway(address, **PARSERS, unknown_fields="refuse") as one, one.openai() as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="big", input="x", tools=tools)
    assert refused.value.param == "tools[0].type"


async def test_a_stream_that_breaks_off_has_failed_with_what_was_said() -> None:
    servicer = TalkingCoordinator(say)
    servicer.breaks_after = 4
    with running_fake_coordinator(servicer=servicer) as (_, address):
        async with gateway(address, **PARSERS) as one, one.openai() as client:
            stream = await client.responses.create(model="big", input="x", stream=True)
            events: Any = [event async for event in stream]
            with pytest.raises(openai.APIStatusError):
                await client.responses.create(model="big", input="x")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", events[-2].code)
    assert [item.status for item in failed.output] == ["completed", "incomplete"][: len(failed.output)]


async def test_what_the_openapi_document_says_is_what_is_taken() -> None:
    with running_fake_coordinator() as (_, address):
        async with gateway(address) as one, one.http() as client:
            described = (await client.get("/openapi.json")).json()["components"]["schemas"]["ResponsesRequest"]
    assert {"tools", "tool_choice", "include", "parallel_tool_calls", "max_tool_calls"} <= described[
        "properties"
    ].keys()
    assert "previous_response_id" in described["properties"]
