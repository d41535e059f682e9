"""Think sections told apart from the answer, and both kinds of parsers as one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.chat.parsing import begin, make_message_parser
from specdec.gateway.chat.reasoning import REASONING_PARSERS, make_reasoning_parser
from specdec.gateway.chat.tool_calls import TOOL_PARSERS
from specdec.gateway.chat.tool_choice import ToolChoice
from tests.support.chat.parsed import Message, cut, parse, told
from tests.support.cost import lines_run
from tests.support.for_each import for_each

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def reasoned(name: str, text: str, thinking: bool | None = None) -> tuple[str, str]:
    message = parse(make_reasoning_parser(name, thinking=thinking), [text])
    return message.reasoning, message.content


@for_each(
    "name, text, expected",
    [
        ("deepseek_r1", "Hm, well.\n</think>\n\nParis.", ("Hm, well.", "Paris.")),
        ("deepseek_r1", "<think>\nHm.\n</think>\n\nParis.", ("Hm.", "Paris.")),
        ("deepseek_r1", "I never end", ("I never end", "")),
        ("deepseek_r1", "</think>Paris.", ("", "Paris.")),
        ("deepseek_r1", "a </think> b </think> c", ("a", "b </think> c")),
        ("deepseek_r1", "a </thin", ("a </thin", "")),
        ("qwen3", "<think>\nHm.\n</think>\n\nParis.", ("Hm.", "Paris.")),
        ("qwen3", "<think>\n\n</think>\n\nParis.", ("", "Paris.")),
        ("qwen3", "Paris.", ("", "Paris.")),
        ("qwen3", " <thin", ("", " <thin")),
        ("qwen3", "I write <think>a</think>", ("", "I write <think>a</think>")),
        ("qwen3_thinking", "Hm.\n</think>\n\nParis.", ("Hm.", "Paris.")),
        ("mistral", "[THINK]Hm.[/THINK]Paris.", ("Hm.", "Paris.")),
        ("none", "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_the_think_section_is_told_apart(name: str, text: str, expected: tuple[str, str]) -> None:
    assert reasoned(name, text) == expected


def test_what_the_request_told_the_template_says_whether_a_section_is_open() -> None:
    assert reasoned("deepseek_r1", "Paris.", thinking=False) == ("", "Paris.")
    assert reasoned("qwen3_thinking", "Paris.", thinking=False) == ("", "Paris.")
    assert reasoned("qwen3", "Paris.", thinking=True) == ("", "Paris.")
    assert reasoned("deepseek_v3", "Paris.") == ("", "Paris.")
    assert reasoned("deepseek_v3", "Hm.</think>Paris.", thinking=True) == ("Hm.", "Paris.")


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<th", "ink>", " ", "\n", "a", "é"])),
    places=st.lists(st.integers(0, 60), max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_however_a_text_is_cut_it_is_told_the_same(name: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    expected = reasoned(name, text)
    for pieces in (cut(text, places), list(text)):
        message = parse(make_reasoning_parser(name), pieces)
        assert (message.reasoning, message.content) == expected


def test_reasoning_and_content_stream_at_once() -> None:
    parser = make_reasoning_parser("deepseek_r1")
    assert [delta.reasoning for delta in parser.push("Well, <")] == ["Well,"]
    assert [delta.reasoning for delta in parser.push("b>")] == [" <b>"]
    assert [(d.reasoning, d.content) for d in parser.push("!</think> So")] == [("!", ""), ("", "So")]


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(ValueError, match="'nosuch' is none of none, think"):
        make_reasoning_parser("nosuch")


def parsed(text: str, tool_choice: ToolChoice = None, has_tools: bool = True, parallel: bool = True) -> Message:
    parser = make_message_parser(
        "qwen3", "hermes", has_tools=has_tools, tool_choice=tool_choice, parallel_tool_calls=parallel
    )
    return parse(parser, [text])


def test_calls_are_found_after_the_reasoning_and_not_within() -> None:
    text = f"<think>\nPerhaps {CALL}?\n</think>\n\nSo.\n{CALL}"
    assert told(parsed(text)) == ("So.", f"Perhaps {CALL}?", [("f", '{"a": 1}')])


@for_each(
    "text, expected",
    [
        (f"<think>\nHm.\n{CALL}", ("", "Hm.\n", [("f", '{"a": 1}')])),
        (f"<think>\nHm.\n{CALL}\n{CALL}\n", ("", "Hm.\n", [("f", '{"a": 1}')] * 2)),
        (f"<think>{CALL} or {CALL}", ("", f"{CALL} or ", [("f", '{"a": 1}')])),
        (f"<think>{CALL} or not", ("", f"{CALL} or not", [])),
        (f"<think>{CALL[:-20]}", ("", CALL[:-20], [])),
        ("<think>I write <tool_call> and stop", ("", "I write <tool_call> and stop", [])),
        ("<think>I write <tool_", ("", "I write <tool_", [])),
        (f"<think>{CALL}</think>", ("", CALL, [])),
        (f"<think>{CALL}</think>So.", ("So.", CALL, [])),
    ],
)
def test_calls_at_the_end_of_thoughts_that_never_end_are_calls(text: str, expected: Any) -> None:
    for pieces in ([text], list(text)):
        assert told(parse(make_message_parser("qwen3", "hermes", has_tools=True), pieces)) == expected


OF_THOUGHTS = [CALL, CALL[:20], "<tool_call>", "</think>", "{", '"', "f", " ", "\n", "Hm"]


@pytest.mark.parametrize("family", [name for name in TOOL_PARSERS if name != "harmony"])
@given(
    pieces=st.lists(st.sampled_from(OF_THOUGHTS), max_size=8),
    places=st.lists(st.integers(0, 200), max_size=12),
)
@settings(max_examples=30, deadline=None)
def test_thoughts_with_calls_are_told_the_same_however_they_are_cut(
    family: str, pieces: list[str], places: list[int]
) -> None:
    text = "<think>" + "".join(pieces)

    def message(parts: list[str]) -> Any:
        return told(parse(make_message_parser("qwen3", family, has_tools=True), parts))

    assert message(cut(text, places)) == message([text]) == message(list(text))


def test_what_a_call_in_thoughts_costs_grows_no_faster_than_the_text() -> None:
    def cost(num: int) -> int:
        text = "<think>" + ("<tool_call>" + CALL[:40]) * num
        return lines_run(lambda: parse(make_message_parser("qwen3", "hermes", has_tools=True), [text]))

    assert cost(400) < 5 * cost(100)


@for_each(
    "name, is_thinking, text, expected",
    [
        ("qwen3", True, "Hm.</think>Paris.", ("Hm.", "Paris.")),
        ("qwen3", True, "<think>Hm.</think>Paris.", ("Hm.", "Paris.")),
        ("qwen3", False, "Paris.", ("", "Paris.")),
        ("deepseek_r1", False, "Paris.", ("", "Paris.")),
        ("deepseek_r1", False, "<think>Hm.</think>Paris.", ("Hm.", "Paris.")),
        ("deepseek_r1", None, "Hm.</think>Paris.", ("Hm.", "Paris.")),
        ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Paris.", ("Hm.", "Paris.")),
        ("seed_oss", True, "Hm.</seed:think>Paris.", ("Hm.", "Paris.")),
    ],
)
def test_the_prompt_s_end_decides_where_the_output_begins(
    name: str, is_thinking: bool | None, text: str, expected: tuple[str, str]
) -> None:
    parser = make_message_parser(name, "hermes", has_tools=True, thinking=True if name == "qwen3" else None)
    begin(parser, is_thinking)
    message = parse(parser, [text])
    assert (message.reasoning, message.content) == expected


@given(places=st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_message_is_the_same_however_it_is_cut(places: list[int]) -> None:
    text = f"<think>\nHm.\n</think>\n\nSo.\n{CALL}\n{CALL}"
    parser = make_message_parser("qwen3", "hermes", has_tools=True)
    assert told(parse(parser, cut(text, places))) == ("So.", "Hm.", [("f", '{"a": 1}')] * 2)


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_calls_are_found_with_every_choice_but_none(tool_choice: ToolChoice) -> None:
    assert parsed(CALL, tool_choice).calls == [("f", '{"a": 1}')]


def test_without_tools_what_looks_like_a_call_is_content() -> None:
    assert told(parsed(CALL, has_tools=False)) == (CALL, "", [])
    assert told(parsed(CALL, tool_choice="none")) == (CALL, "", [])


def test_without_parallel_calls_the_first_alone_is_told() -> None:
    text = f'{CALL}<tool_call>{{"name": "g"}}</tool_call> Done.'
    assert told(parsed(text, parallel=False)) == (" Done.", "", [("f", '{"a": 1}')])


def test_names_of_parsers_are_checked_whether_or_not_there_are_tools() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        make_message_parser("none", "nosuch", has_tools=False)
