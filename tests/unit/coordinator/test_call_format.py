"""Conversations with calls of tools, rendered by templates that demand one form of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specdec.client import chat_messages
from specdec.coordinator.text import chat_template, json_values
from specdec.gateway.chat.messages import to_chat_messages
from tests.support.chat import call_templates as templates
from tests.support.chat.rendering import USER, refusal, render, render_there, tokenizer_with
from tests.support.for_each import for_each

COMPACT = '{"city":"Rome"}'
SPACED = '{"city": "Rome"}'
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "21"}


def called(content: Any = None, arguments: Any = SPACED, **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def answered(template: str, message: dict[str, Any]) -> str:
    """What a template makes of a call as a chat request tells it."""
    return render(template, to_chat_messages([USER, message, RESULT]))


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    "name",
    ["EMPTY_ONLY", "NULL_ONLY", "ABSENT_ONLY", "WRITES_NULL", "AS_JSON", "ANY", "TEXT_ARGUMENTS", "PRINTED_ARGUMENTS",
     "DUMPED_ARGUMENTS", "NULL_AND_TEXT_ARGUMENTS", "PARTS_AND_CALLS"],
)  # fmt: skip
def test_a_call_without_text_goes_back_to_whatever_form_a_template_demands(name: str, content: str | None) -> None:
    text = answered(getattr(templates, name), called(content))
    assert text == '[user]Hello.[assistant]<f {"city": "Rome"}>[tool]21'


@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("name", ["WALKED_ARGUMENTS", "WALKED_OR_TEXT_ARGUMENTS"])
def test_arguments_are_an_object_for_templates_that_walk_them(name: str, content: str | None) -> None:
    text = answered(getattr(templates, name), called(content))
    assert text == f"[user]Hello.[assistant]{content or ''}<f city=Rome>[tool]21"


@pytest.mark.parametrize("arguments", [COMPACT, SPACED, {"city": "Rome"}])
def test_arguments_stay_as_they_were_told_where_a_template_takes_both(arguments: Any) -> None:
    message = called(None, arguments)
    assert answered(templates.ANY, message) == render_there(templates.ANY, [USER, message, RESULT])


def test_arguments_that_are_objects_become_texts_for_templates_that_take_nothing_else() -> None:
    chat = chat_messages([USER, called(None, {"city": "Köln"}), RESULT])
    assert render(templates.TEXT_ARGUMENTS, chat) == '[user]Hello.[assistant]<f {"city": "Köln"}>[tool]21'


@pytest.mark.parametrize("arguments", [None, "", "{}"])
def test_no_arguments_are_an_empty_object_in_each_form(arguments: str | None) -> None:
    for template in (templates.TEXT_ARGUMENTS, templates.DUMPED_ARGUMENTS, templates.ANY):
        assert "<f {}>" in answered(template, called(None, arguments))
    assert "<f >" in answered(templates.WALKED_ARGUMENTS, called(None, arguments))


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_were(arguments: str) -> None:
    assert f"<f {arguments}>" in answered(templates.ANY, called(None, arguments))


@for_each(
    "arguments, shown",
    [
        ('{"city": "Ro', "city=Ro"),
        ('{"city": "Rome", "da', "city=Rome"),
        ('{"city": "Rome", "days": [1, {"a": "b', "city=Romedays=[1, {'a': 'b'}]"),
        ('{"city": "Rome", "is": tru', "city=Rome"),
        ('{"city": "a\nb\tc"}', "city=a\nb\tc"),
        ('{"city": "a\nb', "city=a\nb"),
        ('{"city": "Rome",\n "days": two}', "city=Rome"),
        ('{"city": "é", "days": 1e999, "to": 1', "city=édays=Noneto=1"),
        ('{"city": "\\ud83d"}', "city="),
        ('{"city": "\\ud83d\\ude00"}', "city=😀"),
        ("{'city': 1}", ""),
        ('{"a": ' + "[" * 100_000, ""),
        ('["Rome"]', ""),
        ("Rome", ""),
    ],
)
def test_arguments_that_were_cut_go_as_far_as_they_go_where_a_template_walks_them(arguments: str, shown: str) -> None:
    messages = [USER, called(None, arguments), RESULT, USER]
    text = render(templates.WALKED_ARGUMENTS, to_chat_messages(messages))
    assert text == f"[user]Hello.[assistant]<f {shown}>[tool]21[user]Hello."


@pytest.mark.parametrize("end", range(1, 40))
def test_a_call_cut_anywhere_leaves_a_conversation_that_every_template_renders(end: int) -> None:
    arguments = '{"city": "Rom\\u00e9", "n": [-1.5, {"b": null}]}'[:end]
    for template in (templates.WALKED_ARGUMENTS, templates.WALKED_OR_TEXT_ARGUMENTS, templates.DUMPED_ARGUMENTS):
        assert "[tool]21" in answered(template, called(None, arguments))


def test_arguments_that_are_no_object_are_shown_by_templates_that_dump_them() -> None:
    assert '<f "Rome">' in answered(templates.DUMPED_ARGUMENTS, called(None, "Rome"))
    assert '<f {"city": "Ro"}>' in answered(templates.DUMPED_ARGUMENTS, called(None, '{"city": "Ro'))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [(f'{{"a": {"[" * 64 + "]" * 64}}}', "deeper"), (f'{{"a": [{"0," * 100_000}0]}}', "more than")],
)
def test_arguments_count_among_the_values_of_a_conversation(arguments: str, fault: str) -> None:
    chat = to_chat_messages([USER, called(None, arguments), RESULT])
    error = refusal(templates.WALKED_ARGUMENTS, chat)
    assert error.field == "messages.messages[1].tool_calls[0].function.arguments"
    assert fault in error.description


def test_arguments_of_all_calls_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_MOST_VALUES", 50)
    arguments = json.dumps(dict.fromkeys("abcdefghijklmnopqrst", 1))
    assert render(templates.WALKED_ARGUMENTS, to_chat_messages([USER, called(None, arguments), RESULT]))
    chat = to_chat_messages([USER, called(None, arguments), RESULT, called(None, arguments), RESULT])
    assert refusal(templates.WALKED_ARGUMENTS, chat).field.startswith("messages.messages[3].tool_calls[0]")


def test_a_text_beside_a_call_is_kept_in_each_form() -> None:
    for template in (templates.EMPTY_ONLY, templates.ABSENT_ONLY, templates.WRITES_NULL, templates.ANY):
        assert "[assistant]Let me see.<f " in answered(template, called("Let me see."))


def test_a_result_has_the_name_of_what_was_called_where_a_template_shows_none_without() -> None:
    assert answered(templates.NAMED_RESULTS, called()) == "[user]Hello.[assistant]<f>[tool]f: 21"
    told = to_chat_messages([USER, called(), {**RESULT, "name": "g"}])
    assert render(templates.NAMED_RESULTS, told).endswith("[tool]g: 21")
    other = to_chat_messages([USER, called(), {**RESULT, "tool_call_id": "other"}])
    assert refusal(templates.NAMED_RESULTS, other).field == "messages"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_a_template_under_the_name_that_it_reads(name: str) -> None:
    chat = to_chat_messages([USER, {"role": "assistant", "content": "4", name: "2+2"}])
    assert render(templates.OTHER_REASONING, chat) == "[user]Hello.[assistant]{2+2}4"
    assert render(templates.ONE_THOUGHT, chat) == "[user]Hello.[assistant]2+24"


def test_reasoning_is_left_out_where_a_template_refuses_it_beside_what_else_a_message_has() -> None:
    message = called("Let me see.", reasoning_content="Rome?")
    assert answered(templates.ONE_THOUGHT, message) == "[user]Hello.[assistant]Let me see.[tool]21"
    assert answered(templates.ONE_THOUGHT, {**message, "content": None}) == "[user]Hello.[assistant]Rome?[tool]21"


def test_what_a_message_says_only_in_thoughts_goes_back_too() -> None:
    chat = to_chat_messages([USER, {"role": "assistant", "content": None, "reasoning_content": "Hm"}, USER])
    assert render(templates.OTHER_REASONING, chat) == "[user]Hello.[assistant]{Hm}[user]Hello."


def test_the_forms_of_a_template_are_looked_for_once_and_within_the_time_of_a_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = tokenizer_with(templates.EMPTY_ONLY).chat_template()
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    monkeypatch.setattr(chat_template.time, "monotonic", clock)
    assert compiled._default.calls.called()["tool_calls"]
    num_looks = now_s
    assert compiled._default.calls.called()["tool_calls"]
    assert now_s == num_looks
    assert compiled._default._probe_left_s <= 0
    assert time.monotonic is clock
