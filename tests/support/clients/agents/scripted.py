"""A coordinator without a model that says what the turn needs, in the form in which a model family calls.

It renders each conversation with a template of the family, as a real one does, and refuses what the template refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc
from grpc_status import rpc_status

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.v1 import common_pb2, coordinator_pb2
from specdec.wire.errors import InvalidRequest, to_status
from tests.support.clients.agents.turns import TURNS, WriteCall, asked_last
from tests.support.services.fake_coordinator import TARGET, FakeCoordinator

_DELTA_CHARS = 7
_LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WALK = "{% for k, v in f.arguments.items() %}EACH{% endfor %}"
_JSON = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a family call."""

    template: str
    write: WriteCall


def _tags(before: str, each: str, after: str) -> Family:
    """Calls in tags; NAME, KEY and VALUE stand for what they say."""
    start = before.replace("{", "{{ '{' }}").replace("NAME", "{{ f.name }}")
    walk = _WALK.replace("EACH", each.replace("KEY", "{{ k }}").replace("VALUE", "{{ v }}"))

    def write(arguments: Mapping[str, str]) -> str:
        told = "".join(each.replace("KEY", key).replace("VALUE", value) for key, value in arguments.items())
        return before.replace("NAME", "look") + told + after

    return Family(_LOOP.replace("CALL", start + walk + after), write)


def _json(before: str, after: str) -> Family:
    """Calls in JSON, whose strings have line breaks and backslashes as they are."""

    def write(arguments: Mapping[str, str]) -> str:
        told = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
        return f"{before.replace('NAME', 'look')}{{{told}}}{after}"

    return Family(_LOOP.replace("CALL", before.replace("NAME", "{{ f.name }}") + _JSON + after), write)


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


class Agent(FakeCoordinator):
    """Says what the turn needs, which it knows by the last message."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.prompts: list[str] = []
        """What was rendered for each request."""
        self._template = ChatTemplate({"default": family.template}, {})
        self._turns = dict(zip(asked_last(), TURNS, strict=True))
        self._write = family.write

    def Generate(
        self, request: coordinator_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.GenerateResponse]:
        """Say what the turn needs, or refuse what the template refuses."""
        try:
            conversation = read_conversation(request.messages, self._template.reserved_variables)
            self.prompts.append(self._template.render(conversation, 10**6))
        except InvalidRequest as error:
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        last = conversation.messages[-1]["content"]
        turn = self._turns[last if isinstance(last, str) else "".join(part["text"] for part in last)]
        started = coordinator_pb2.GenerateStarted(request_id="r", model=TARGET, is_constrained=True, is_thinking=False)
        yield coordinator_pb2.GenerateResponse(started=started)
        text = turn.cut(self._write)
        for at in range(0, len(text), _DELTA_CHARS):
            delta = coordinator_pb2.ChoiceDelta(text=text[at : at + _DELTA_CHARS])
            yield coordinator_pb2.GenerateResponse(delta=delta)
        reason = common_pb2.FINISH_REASON_LENGTH if turn.option == "cut" else common_pb2.FINISH_REASON_STOP
        yield coordinator_pb2.GenerateResponse(choice_finished=coordinator_pb2.ChoiceFinished(reason=reason))
        yield coordinator_pb2.GenerateResponse(finished=coordinator_pb2.GenerateFinished())

    def GetModelInfo(
        self, request: coordinator_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.GetModelInfoResponse:
        """The model, with its template."""
        return coordinator_pb2.GetModelInfoResponse(
            target=TARGET, tokenizer=coordinator_pb2.TokenizerInfo(chat_template=self._template.source)
        )
