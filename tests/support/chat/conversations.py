"""Conversations as clients send them, and the forms in which the same may be said to a template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
Messages = list[Message]

ARGUMENTS = '{"city":"Rome","days":3}'
CUT = '{"city":"Rome","days'
USER: Message = {"role": "user", "content": "Weather?"}
_PROPERTIES = {
    "city": {"type": "string", "description": "A city."},
    "days": {"type": "integer", "description": "Days."},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
        },
    }
]


def _call(arguments: str, number: int) -> dict[str, Any]:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def _called(content: str | None, *arguments: str, first: int = 1, **more: Any) -> Message:
    calls = [_call(each, number) for number, each in enumerate(arguments or (ARGUMENTS,), first)]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def _result(content: str = "21 degrees", number: int = 1) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _asked(content: Any) -> Message:
    return {"role": "user", "content": content}


_OSLO = '{"city":"Oslo"}'
_PARTS = [{"type": "text", "text": "Weather in Rome?"}, {"type": "text", "text": "And in Oslo?"}]
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, Messages] = {
    "null content": [USER, _called(None), _result()],
    "empty content": [USER, _called(""), _result()],
    "text before a call": [USER, _called("Let me see."), _result()],
    "no arguments": [USER, _called(None, "{}"), _result()],
    "a result in JSON": [USER, _called(None), _result('{"t": 21}')],
    "one call after the other": [
        USER, _called(None), _result(), _called(None, _OSLO, first=2), _result("3 degrees", 2)
    ],
    "two calls at once": [USER, _called(None, ARGUMENTS, _OSLO), _result(), _result("3 degrees", 2)],
    "a call that was cut": [USER, _called(None, CUT), _result("error: cut"), USER],
    "an answer after a result": [USER, _called(None), _result(), _said("It is 21."), USER],
    "a system message": [_SYSTEM, USER, _called(None), _result()],
    "a call without a result": [USER, _called(None)],
    "no tools used": [USER, _said("Fine."), USER],
    "thoughts": [USER, _called(None, reasoning_content="Rome, then."), _result()],
    "thoughts and text": [USER, _called("Let me see.", reasoning_content="Rome, then."), _result()],
    "thoughts of an answer": [USER, {**_said("Fine."), "reasoning_content": "Rome, then."}, USER],
    "many turns": [
        _SYSTEM, *[_asked("And now?"), _said("As before.")] * 3, USER
    ],
    "two system messages": [_SYSTEM, {"role": "system", "content": "Be kind."}, USER],
    "a later system message": [_SYSTEM, USER, _said("Fine."), {"role": "system", "content": "Be kind."}, USER],
    "parts": [_asked(_PARTS), _said("Fine."), _asked(_PARTS[:1])],
    "unicode": [_asked("Zürich \u200f天気 👩‍🌾 e\u0301?"), _called("", '{"city":"Zürich 👩‍🌾"}'), _result("21 °C")],
    "empty texts": [_asked(""), _said(""), _asked("")],
    "white space and markup": [_asked("\n  {{ 7 * 7 }}\t<|im_end|>\r\n"), _said("  <think>\n"), _asked(" ")],
}  # fmt: skip

Change = Callable[[Messages], Messages]
NULL = object()
"""A content that stays null: transformers leaves out what is null, unless the template is rendered directly."""


def _each(change: Callable[[Message], Message]) -> Change:
    return lambda messages: list(map(change, messages))


def _said_by_users(*, keeps_first: bool) -> Change:
    """What the system says is said in the user's next message, but for what it says first."""

    def change(messages: Messages) -> Messages:
        first = list(itertools.takewhile(lambda message: message["role"] == "system", messages)) if keeps_first else []
        told: Messages = [{**first[0], "content": _paragraphs(first)}] if first else []
        waiting: Messages = []
        for message in messages[len(first) :]:
            waiting.append(message)
            if message["role"] != "system":
                is_joined = len(waiting) > 1
                told.append({**message, "content": _paragraphs(waiting)} if is_joined else message)
                waiting = []
        return told

    return change


def _paragraphs(messages: Messages) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _content_of_calls(content: Any) -> Change:
    def change(message: Message) -> Message:
        if not message.get("tool_calls") or message.get("content"):
            return message
        other = {name: value for name, value in message.items() if name != "content"}
        return other if content is ... else {**other, "content": content}

    return _each(change)


def _objects(message: Message) -> Message:
    if "tool_calls" not in message:
        return message

    def read(call: Message) -> Message:
        function = call["function"]
        # Of arguments that were cut, what can be read.
        text = '{"city":"Rome"}' if function["arguments"] == CUT else function["arguments"]
        return {**call, "function": {**function, "arguments": json.loads(text)}}

    return {**message, "tool_calls": list(map(read, message["tool_calls"]))}


def _thoughts(*names: str) -> Change:
    def change(message: Message) -> Message:
        if (thought := message.get("reasoning_content")) is None:
            return message
        other = {name: value for name, value in message.items() if name != "reasoning_content"}
        return {**other, **dict.fromkeys(names, thought)}

    return _each(change)


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _as_lines(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


CHANGES: dict[str, tuple[Change, ...]] = {
    "what the system says as the user's": (_said_by_users(keeps_first=True), _said_by_users(keeps_first=False)),
    "content of a call without text": tuple(map(_content_of_calls, (NULL, "", ...))),
    "arguments as an object": (_each(_objects),),
    "names of thoughts": (
        _thoughts("reasoning_content", "reasoning", "thinking"),
        _thoughts("reasoning_content", "reasoning"),
        _thoughts("thinking"),
        _thoughts(),
    ),
    "texts as parts": (_each(_as_parts),),
    "parts as lines of text": (_each(_as_lines),),
}
"""What may be said in another form, and its forms. docs/openai-clients.md has the reasons."""


def forms(messages: Messages) -> Iterator[tuple[tuple[str, ...], Messages]]:
    """A conversation in all its forms, each with the names of its changes; fewest changes first."""
    seen: list[Messages] = []
    choices = [[(name, one) for one in (None, *changes)] for name, changes in CHANGES.items()]
    combined = sorted(itertools.product(*choices), key=lambda chosen: sum(one is not None for _, one in chosen))
    for chosen in combined:
        form = messages
        for _, one in chosen:
            form = form if one is None else one(form)
        if form not in seen:
            seen.append(form)
            yield tuple(name for name, one in chosen if one is not None), form
