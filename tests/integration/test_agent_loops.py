"""An agent's loop of ten turns with OpenAI's own client, over the forms in which model families call.

A coordinator without a model renders each conversation with a template of the family, as a real one does, and says
what the turn needs: thoughts, calls, a call that is cut, strings with raw line breaks, calls in thoughts that never
end. What the gateway answered is sent back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.v1 import common_pb2, coordinator_pb2
from specdec.wire.errors import InvalidRequest, to_status
from tests.support.services.fake_coordinator import TARGET, FakeCoordinator, running_fake_coordinator
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(120)
LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WALK = "{% for k, v in f.arguments.items() %}EACH{% endfor %}"
JSON = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"


def _tags(before: str, each: str, after: str) -> tuple[str, Callable[[dict[str, str]], str]]:
    """A template of calls in tags, and what a model writes: NAME, KEY and VALUE stand for what they say."""
    named = (before.replace("{", "{{ '{' }}").replace("NAME", "{{ f.name }}"), after)
    template = named[0] + WALK.replace("EACH", each.replace("KEY", "{{ k }}").replace("VALUE", "{{ v }}")) + named[1]

    def write(arguments: dict[str, str]) -> str:
        told = "".join(each.replace("KEY", key).replace("VALUE", value) for key, value in arguments.items())
        return before.replace("NAME", "look") + told + after

    return template, write


def _json(before: str, after: str) -> tuple[str, Callable[[dict[str, str]], str]]:
    """The same for calls in JSON, whose strings have line breaks and backslashes as they are."""

    def write(arguments: dict[str, str]) -> str:
        told = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
        return f"{before.replace('NAME', 'look')}{{{told}}}{after}"

    return before.replace("NAME", "{{ f.name }}") + JSON + after, write


FAMILIES = {
    "hermes": _json('<tool_call>{"name": "NAME", "arguments": ', "}</tool_call>"),
    "mistral": _json("[TOOL_CALLS]NAME[ARGS]", ""),
    "kimi_k2": _json(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "qwen3_coder": _tags(
        "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "glm45": _tags("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
    "minimax_m2": _tags(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "gemma4": _tags("<|tool_call>call:NAME{", 'KEY:<|"|>VALUE<|"|>,', "}<tool_call|>"),
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "how": {"type": "string"}}},
    },
}
LINES = "a\nb\\d"
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


class Agent(FakeCoordinator):
    """Renders each conversation, and says what the turn needs, by the number of the assistant's messages."""

    def __init__(self, template: str, write: Callable[[dict[str, str]], str]) -> None:
        super().__init__()
        self.template = ChatTemplate({"default": template}, {})
        call = write({"city": "Rome"})
        self.turns = [
            "Good day.",
            f"<think>Rome, then.</think>Let me see.{call}",
            call + write({"city": "Oslo", "how": "now"}),
            call[: call.index("Rome") + 2],
            write({"city": LINES}),
            f"<think>I must look.{call}",
            "<think>Hm.</think>It is 21 degrees.",
            '{"n": 1}',
            '[{"name":"look","parameters":{"city":"Rome"}}]',
            "Good bye.",
        ]

    def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.GenerateResponse]:
        """Say what the turn needs, or refuse what the template refuses."""
        try:
            conversation = read_conversation(request.messages, self.template.reserved_variables)
            self.prompt = self.template.render(conversation, 10**6)
        except InvalidRequest as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        turn = sum(message.role == "assistant" for message in request.messages.messages)
        started = coordinator_pb2.GenerateStarted(request_id="r", model=TARGET, is_constrained=True, is_thinking=False)
        yield coordinator_pb2.GenerateResponse(started=started)
        text = self.turns[turn]
        for at in range(0, len(text), 7):
            yield coordinator_pb2.GenerateResponse(delta=coordinator_pb2.ChoiceDelta(text=text[at : at + 7]))
        reason = common_pb2.FINISH_REASON_LENGTH if turn == 3 else common_pb2.FINISH_REASON_STOP
        yield coordinator_pb2.GenerateResponse(choice_finished=coordinator_pb2.ChoiceFinished(reason=reason))
        yield coordinator_pb2.GenerateResponse(finished=coordinator_pb2.GenerateFinished())

    def GetModelInfo(
        self, request: coordinator_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.GetModelInfoResponse:
        """The model, with its template."""
        return coordinator_pb2.GetModelInfoResponse(
            target=TARGET, tokenizer=coordinator_pb2.TokenizerInfo(chat_template=self.template.source)
        )


@pytest.mark.parametrize("family", FAMILIES)
async def test_ten_turns_with_whatever_happens_on_the_way(family: str) -> None:
    call, write = FAMILIES[family]
    agent = Agent(LOOP.replace("CALL", call), write)
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    seen: list[tuple[str | None, list[str]]] = []
    with running_fake_coordinator(servicer=agent) as (_, address):
        async with gateway(address) as one, one.openai() as client:
            for turn in range(10):
                extra: Any = {7: {"response_format": SCHEMA}, 8: {"tool_choice": "required"}}.get(turn, {})
                asked: Any = {"model": "big", "messages": messages, "tools": [TOOL], **extra}
                broken = await client.chat.completions.create(**asked, stream=True)
                await anext(aiter(broken))
                await broken.close()
                content, arguments = await _streamed(await client.chat.completions.create(**asked, stream=True))
                choice = (await client.chat.completions.create(**asked)).choices[0]
                assert (choice.message.content or "") == content
                calls = choice.message.tool_calls or []
                told = [one_call.function.arguments for one_call in calls]  # type: ignore[union-attr]
                assert told == arguments
                assert choice.finish_reason == ("length" if turn == 3 else "tool_calls" if calls else "stop")
                seen.append((choice.message.content, told))
                messages.append(choice.message.model_dump())
                messages += [{"role": "tool", "tool_call_id": each.id, "content": f"result {turn}"} for each in calls]
                messages.append({"role": "user", "content": "Go on."})
                if turn:
                    assert f"result {turn - 1}" in agent.prompt or not seen[turn - 1][1]
    assert [content for content, _ in seen if content] == [
        "Good day.", "Let me see.", "It is 21 degrees.", '{"n": 1}', "Good bye."
    ]  # fmt: skip
    whole = [[json.loads(text) for text in told] for turn, (_, told) in enumerate(seen) if turn != 3]
    rome = {"city": "Rome"}
    assert whole == [[], [rome], [rome, {"city": "Oslo", "how": "now"}], [{"city": LINES}], [rome], [], [], [rome], []]
    assert "Rome" in agent.prompt


async def _streamed(chunks: Any) -> tuple[str, list[str]]:
    """Content and arguments of a stream."""
    content, arguments = "", {}
    async for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    return content, list(arguments.values())
