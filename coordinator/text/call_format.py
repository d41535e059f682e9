"""How a chat template takes tool calls, their results and the reasoning before them, found by rendering.

Models' templates disagree on the content of a message with calls (null, empty or absent), on its arguments (an object
or its JSON text) and on the names of reasoning. Each form is tried; the one that renders most is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

from specdec.coordinator.text.json_values import JsonValues

Message = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields in which callers send the model's reasoning; each template reads one of them, if any."""
_NAME, _KEY, _VALUE, _RESULT, _THOUGHT = "probe_call", "probe_key", "probe value", "probe result", "probe thought"
_ID = "call00000"
_USER = {"role": "user", "content": "Hello."}
_ANSWER = {"role": "assistant", "content": "Good day."}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "another",
            "description": "Another function.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}},
        },
    }
]
_REASONING_NAMES = (REASONING_FIELDS, ("reasoning_content", "reasoning"), ("reasoning_content",), ("thinking",), ())
"""Sets of fields for reasoning, best first."""


class TemplateProbe(Protocol):
    """Renders messages; None if the template refuses them."""

    def __call__(self, messages: list[Message], tools: list[Any] | None = None) -> str | None: ...


class CallContent(Enum):
    """The content of a message that has calls and no text; best first."""

    NULL = "null"
    EMPTY = "empty"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a call in a message."""

    content: CallContent = CallContent.EMPTY
    has_text_arguments: bool = False

    def content_of(self, message: Message, fit: Callable[[Message], Message]) -> Message:
        """The message with its content in this form; `fit` fits text content."""
        match self.content:
            case CallContent.NULL:
                return {**message, "content": None}
            case CallContent.EMPTY:
                return fit({**message, "content": ""})
            case _:
                return {name: value for name, value in message.items() if name != "content"}


_FORMS = tuple(CallForm(content, is_text) for content in CallContent for is_text in (False, True))


class CallFormats:
    """The forms of one template. Each is found when the first message needs it."""

    def __init__(self, probe: TemplateProbe, fit_content: Callable[[Message], Message]) -> None:
        """`fit_content` converts a message's content to the template's format."""
        self._probe = probe
        self._fit_content = fit_content
        self._reasoning: dict[tuple[bool, bool], tuple[str, ...]] = {}

    def fit(self, index: int, message: Message, values: JsonValues) -> Message:
        """A message with calls and reasoning in the template's form; `index` is its place, for errors.

        The caller's form is kept if the template renders it as well as any other.
        Raises:
            InvalidRequest: arguments have too many values, or are nested too deeply.
        """
        calls = message.get("tool_calls")
        if calls and isinstance(calls, list):
            message = self._with_calls(f"messages.messages[{index}].tool_calls", message, calls, values)
        given = {name: message[name] for name in REASONING_FIELDS if message.get(name) is not None}
        if not given:
            return message
        names = self._reasoning_names(bool(calls), bool(message.get("content")))
        other = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
        return {**other, **dict.fromkeys(names, next(iter(given.values()))), **_only(given, names)}

    def called(self) -> Message:
        """A message with a call, in the template's best form."""
        return self._call(self._forms[0])

    @cached_property
    def results_need_names(self) -> bool:
        """Whether a result is rendered only if it has the function's name."""
        result = self._fit_content(_result())
        without, named = (
            self._render([self.called(), {**result, **more}]) for more in ({}, {"name": _NAME})
        )  # fmt: skip
        return _RESULT in (named or "") and _RESULT not in (without or "")

    @cached_property
    def _forms(self) -> Sequence[CallForm]:
        """The forms that render most, best first."""
        result = self._fit_content({**_result(), "name": _NAME})
        ends: tuple[list[Message], ...] = ([], [result], [result, self._fit_content(_ANSWER), self._fit_content(_USER)])
        shown = {form: [self._render([self._call(form), *end]) for end in ends] for form in _FORMS}
        scores = {form: _score(shown[form], self._without_nulls(shown, form)) for form in _FORMS}
        best = max(scores.values())

        def fits(form: CallForm) -> bool:
            as_object = CallForm(form.content)
            # A text is as good as an object only if both render alike.
            is_other = form.has_text_arguments and scores[as_object] == best and shown[form] != shown[as_object]
            return scores[form] == best and not is_other

        return [form for form in _FORMS if fits(form)]

    @staticmethod
    def _without_nulls(shown: Mapping[CallForm, Sequence[str | None]], form: CallForm) -> list[int]:
        """Nulls rendered in each conversation without any null content."""
        plain = [
            shown[CallForm(content, form.has_text_arguments)] for content in (CallContent.EMPTY, CallContent.ABSENT)
        ]
        return [
            min((_num_nulls(text) for text in texts if text is not None), default=0)
            for texts in zip(*plain, strict=True)
        ]

    def _with_calls(self, field: str, message: Message, calls: list[Any], values: JsonValues) -> Message:
        has_text = any(isinstance(_arguments(call), str) for call in calls)
        content = message.get("content")
        given = CallContent.NULL if content is None else CallContent.EMPTY
        form = min(self._forms, key=lambda one: (one.content is not given, one.has_text_arguments is not has_text))
        as_text = form.has_text_arguments
        fitted = [self._fit_call(f"{field}[{i}]", call, as_text, values) for i, call in enumerate(calls)]
        message = {**message, "tool_calls": fitted}
        return message if content else form.content_of(message, self._fit_content)

    def _fit_call(self, field: str, call: Any, as_text: bool, values: JsonValues) -> Any:
        """A call with its arguments as a text or an object; unchanged if they are neither."""
        arguments = _arguments(call)
        if isinstance(arguments, dict) and as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not as_text:
            if not arguments.lstrip().startswith("{") and self._shows_any_text:
                return call
            arguments = values.read_object(f"{field}.function.arguments", arguments)
        else:
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}

    @cached_property
    def _shows_any_text(self) -> bool:
        """Whether arguments that are a text without an object in it are rendered."""
        return _VALUE in (self._render([self._call(self._forms[0], _VALUE)]) or "")

    def _reasoning_names(self, has_calls: bool, has_text: bool) -> tuple[str, ...]:
        kind = has_calls, has_text
        if (known := self._reasoning.get(kind)) is not None:
            return known
        message = self.called() if has_calls else {"role": "assistant", "content": ""}
        if has_text or not has_calls:
            message = self._fit_content({**message, "content": _ANSWER["content"] if has_text else ""})
        after = [self._fit_content({**_result(), "name": _NAME})] if has_calls else []

        def shown(names: tuple[str, ...]) -> tuple[bool, int]:
            text = self._render([{**message, **dict.fromkeys(names, _THOUGHT)}, *after])
            num = 0 if text is None else text.count(_THOUGHT)
            return text is not None, (num > 0) - (num > 1)

        self._reasoning[kind] = max(_REASONING_NAMES, key=lambda names: (*shown(names), -_REASONING_NAMES.index(names)))
        return self._reasoning[kind]

    def _call(self, form: CallForm, told: str | None = None) -> Message:
        """A message with a call; `told` replaces its arguments."""
        arguments: Any = {_KEY: _VALUE}
        arguments = told or (json.dumps(arguments) if form.has_text_arguments else arguments)
        call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
        return form.content_of({"role": "assistant", "tool_calls": [call]}, self._fit_content)

    def _render(self, after_user: list[Message]) -> str | None:
        messages = [self._fit_content(_USER), *after_user]
        text = self._probe(messages, _TOOLS)
        return self._probe(messages) if text is None else text


def with_names(messages: list[Message]) -> list[Message]:
    """Messages whose tool results have the called function's name, found by the call's id."""
    names: dict[Any, Any] = {}
    named = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
        told = message.get("tool_call_id")
        name = names.get(told) if isinstance(told, str) and message["role"] == "tool" else None
        named.append(message if name is None or "name" in message else {**message, "name": name})
    return named


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _ID, "content": _RESULT}


def _score(texts: Sequence[str | None], num_nulls: Sequence[int]) -> tuple[int, int, int, int]:
    """Score of conversations with a call: rendered at all, parts shown, no null, arguments as JSON."""
    whole = [(text, num) for text, num in zip(texts, num_nulls, strict=True) if text is not None]
    parts = sum(part in text for text, _ in whole for part in (_NAME, _VALUE, _RESULT))
    is_plain = sum(_num_nulls(text) <= num for text, num in whole)
    is_json = sum(f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text for text, _ in whole)
    return len(whole), parts, is_plain, is_json


def _num_nulls(text: str) -> int:
    return text.count("None") + text.count("null")


def _arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _only(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in names}
