"""Families whose calls are no JSON: Qwen3-Coder's tags, whose values get their types from a schema, and harmony."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.chat.parsing import check_names, make_message_parser
from specdec.gateway.chat.tool_calls import make_tool_parser
from specdec.gateway.chat.tool_calls.parts.typed_text import as_json_of_type, types_of
from tests.support.chat.parsed import Message, cut, parse, told
from tests.support.for_each import for_each

PROPERTIES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "flag": {"type": "boolean"},
    "items": {"type": "array"}, "more": {"type": "object"}, "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "level": {"enum": [1, 2]}, "free": {},
}  # fmt: skip
SCHEMAS = {"f": {"type": "object", "properties": PROPERTIES}}
values = {
    "text": st.text(max_size=9) | st.sampled_from(["1", "null", "true", "<b>", "</param", "{", "a\nb", "\n"]),
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "flag": st.booleans(),
    "items": st.lists(st.integers() | st.text(max_size=3).filter(lambda text: "<" not in text), max_size=3),
    "more": st.dictionaries(st.sampled_from("ab"), st.none() | st.booleans(), max_size=2),
    "maybe": st.none() | st.integers(),
    "level": st.sampled_from([1, 2]),
    "free": st.text(max_size=5),
}
typed_arguments = st.fixed_dictionaries({}, optional=values)


def tagged(arguments: dict[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    inside = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def from_tags(text: str) -> Message:
    return parse(make_tool_parser("qwen3_coder", SCHEMAS), [text])


@given(calls=st.lists(typed_arguments, min_size=1, max_size=2), places=st.lists(st.integers(0, 300), max_size=20))
@settings(max_examples=200, deadline=None)
def test_values_are_of_the_types_of_the_schema_however_a_text_is_cut(
    calls: list[dict[str, Any]], places: list[int]
) -> None:
    text = "\n".join(map(tagged, calls))
    message = from_tags(text)
    assert message.decoded == [("f", arguments) for arguments in calls]
    assert message.content == ""
    for pieces in (cut(text, places), list(text)):
        assert told(parse(make_tool_parser("qwen3_coder", SCHEMAS), pieces)) == told(message)


@for_each(
    "text, types, expected",
    [
        ("5", {"integer"}, "5"),
        ("5.0", {"integer"}, "5.0"),
        ("5.5", {"integer"}, '"5.5"'),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, '"NaN"'),
        ("1" * 5000, {"integer"}, json.dumps("1" * 5000)),
        ("True", {"boolean"}, "true"),
        ("yes", {"boolean"}, '"yes"'),
        ("None", {"null", "integer"}, "null"),
        ("{'a': True}", {"object"}, '{"a": true}'),
        ("[1, (2,)]", {"array"}, "[1, [2]]"),
        ("[1e999]", {"array"}, "[1e999]"),
        ("{'a': 1e999}", {"object"}, "\"{'a': 1e999}\""),
        ("{'a': {1}}", {"object"}, "\"{'a': {1}}\""),
        ("[" * 3000, {"array"}, json.dumps("[" * 3000)),
        ("__import__('os')", {"object"}, "\"__import__('os')\""),
        ("plain", {"string", "null"}, '"plain"'),
        ("null", {"string", "null"}, "null"),
    ],
)
def test_a_value_that_is_not_of_its_type_is_told_as_a_text(text: str, types: set[str], expected: str) -> None:
    assert as_json_of_type(text, frozenset(types)) == expected


@pytest.mark.parametrize(
    "schema", [None, [], {"properties": []}, {"properties": {"a": 5}}, {"properties": {"a": {"type": {}}}}]
)
def test_a_schema_that_is_none_names_no_types(schema: Any) -> None:
    assert types_of(schema, "a") == frozenset()


def test_a_schema_that_holds_itself_is_read_so_far() -> None:
    option: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        option = {"anyOf": [option, {"type": "null"}]}
    assert types_of({"properties": {"a": option}}, "a") == {"null"}


def test_texts_stream_as_they_come_and_other_values_when_they_end() -> None:
    parser = make_tool_parser("qwen3_coder", SCHEMAS)
    message = Message()
    message.add(parser.push('Well.\n<tool_call>\n<function=f>\n<parameter=text>\na long "st'))
    assert message.calls == [("f", '{"text": "a long \\"st')]
    message.add(parser.push("ory\n</parameter>\n<parameter=count>\n1"))
    assert message.calls == [("f", '{"text": "a long \\"story", "count": ')]
    message.add(parser.push("2\n</parameter>\n</function>\n</tool_call>"))
    message.add(parser.finish())
    assert message.decoded == [("f", {"text": 'a long "story', "count": 12})]
    assert message.content == "Well."


def test_an_end_that_a_model_forgot_is_found() -> None:
    text = "<function=f>\n<parameter=text>a\n<parameter=count>1\n</function>\nDone."
    assert from_tags(text).decoded == [("f", {"text": "a", "count": 1})]
    assert from_tags(text).content == "\nDone."


HARMONY = (
    "<|channel|>analysis<|message|>Hm, {a}.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
)


def harmony(text: str, *, has_tools: bool = True) -> Message:
    return parse(make_message_parser("harmony", "harmony", has_tools=has_tools), [text])


def test_channels_are_told_apart() -> None:
    message = harmony(HARMONY)
    assert (message.reasoning, message.content, message.decoded) == ("Hm, {a}.", "I look it up.", [("f", {"a": 1})])
    text = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
    message = harmony(text + "<|start|>assistant<|channel|>final<|message|>Paris. <|return|>")
    assert (message.reasoning, message.content, message.calls) == ("A\nB", "Paris. ", [])


def test_a_recipient_may_come_before_the_channel() -> None:
    text = ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    assert harmony(text).decoded == [("get_weather", {"city": "Paris"})]
    assert harmony(" total: 5").content == " total: 5"


def test_what_is_for_another_tool_is_told_as_its_channel_is() -> None:
    message = harmony("<|channel|>analysis to=python code<|message|>1 + 1<|call|>")
    assert (message.reasoning, message.calls) == ("1 + 1", [])


def test_without_tools_a_call_is_content() -> None:
    message = harmony(HARMONY, has_tools=False)
    assert (message.reasoning, message.content, message.calls) == ("Hm, {a}.", 'I look it up.\n{"a": 1}', [])


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert harmony("<|channel|>commentary to=functions.f<|message|><|call|>").decoded == [("f", {})]


def test_an_answer_that_is_cut_off_keeps_what_looks_like_a_mark() -> None:
    assert harmony("<|channel|>final<|message|>a <").content == "a <"


@pytest.mark.parametrize("has_tools", [False, True])
@given(places=st.lists(st.integers(0, 300), max_size=20), length=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_channels_are_the_same_however_a_text_is_cut(has_tools: bool, places: list[int], length: int) -> None:
    text = HARMONY[:length]
    expected = told(harmony(text, has_tools=has_tools))
    for pieces in (cut(text, places), list(text)):
        parser = make_message_parser("harmony", "harmony", has_tools=has_tools)
        assert told(parse(parser, pieces)) == expected


@pytest.mark.parametrize(("reasoning", "tools"), [("none", "harmony"), ("qwen3", "harmony"), ("harmony", "hermes")])
def test_harmony_goes_with_itself_only(reasoning: str, tools: str) -> None:
    with pytest.raises(ValueError, match="harmony"):
        check_names(reasoning, tools)
