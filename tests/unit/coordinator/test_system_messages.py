"""System messages where a template refuses or leaves them out: their text goes to a neighbour, and nothing is lost."""

from __future__ import annotations

from typing import Any

from specdec.client import chat_messages
from tests.support.chat.rendering import refusal, render, render_there
from tests.support.chat.templates import CHATML_TOOLS, DEEPSEEK_R1, GEMMA, MISTRAL_TOOLS, PARTS_ONLY
from tests.support.for_each import for_each

EACH = "[{{ m.role }}]{{ m.content }}"
REFUSE = "{% if CASE %}{{ raise_exception('not here') }}{% endif %}"
ANYWHERE = "{% for m in messages %}" + EACH + "{% endfor %}"
FIRST_ONLY = ANYWHERE.replace("[", REFUSE.replace("CASE", "m.role == 'system' and not loop.first") + "[")
"""As Qwen3.5's."""
SILENT = ANYWHERE.replace(EACH, "{% if m.role != 'system' or loop.first %}" + EACH + "{% endif %}")
"""Leaves out what others refuse."""
NEVER = ANYWHERE.replace("[", REFUSE.replace("CASE", "m.role == 'system'") + "[")
LAST_OF_SEVERAL = DEEPSEEK_R1
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


def said(*told: str) -> list[dict[str, Any]]:
    """Messages of single letters: s, u, a, c (an assistant's call) and t, each with a number."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    messages: list[dict[str, Any]] = [{"role": roles[each[0]], "content": each} for each in told]
    for message in messages:
        if message["content"][0] == "c":
            message["tool_calls"] = [CALL]
        if message["role"] == "tool":
            message["tool_call_id"] = CALL["id"]
    return messages


@for_each(
    "told, expected",
    [
        (["s1", "u1", "a1", "s2", "u2"], "[system]s1[user]u1[assistant]a1[user]s2\n\nu2"),
        (["s1", "s2", "u1"], "[system]s1\n\ns2[user]u1"),
        (["u1", "s1"], "[user]u1\n\ns1"),
        (["u1", "s1", "a1", "u2"], "[user]u1\n\ns1[assistant]a1[user]u2"),
        (["u1", "a1", "s1", "s2", "u2"], "[user]u1[assistant]a1[user]s1\n\ns2\n\nu2"),
        (["u1", "c1", "t1", "s1"], "[user]u1[assistant]c1[tool]t1\n\ns1"),
        (["u1", "c1", "t1", "s1", "a1", "u2"], "[user]u1[assistant]c1[tool]t1\n\ns1[assistant]a1[user]u2"),
        (["u1", "c1", "s1", "t1", "t2"], "[user]u1[assistant]c1[tool]t1\n\ns1[tool]t2"),
        (["u1", "a1", "s1"], "[user]u1[assistant]a1[user]s1"),
        (["u1", "a1", "s1", "a2", "u2"], "[user]u1[assistant]a1[user]s1[assistant]a2[user]u2"),
    ],
)
def test_a_later_system_message_is_text_of_its_neighbour(told: list[str], expected: str) -> None:
    for template in (FIRST_ONLY, SILENT):
        assert render(template, chat_messages(said(*told))) == expected


@for_each(
    "told, expected",
    [
        (["s1", "u1"], "[user]s1\n\nu1"),
        (["s1", "s2", "u1", "a1", "s3", "u2"], "[user]s1\n\ns2\n\nu1[assistant]a1[user]s3\n\nu2"),
        (["s1", "a1", "u1"], "[user]s1[assistant]a1[user]u1"),
        (["s1"], "[user]s1"),
    ],
)
def test_a_template_without_system_messages_gets_all_of_them_as_the_users_text(told: list[str], expected: str) -> None:
    assert render(NEVER, chat_messages(said(*told))) == expected


def test_what_a_template_takes_stays_as_it_was_sent() -> None:
    several = said("s1", "s2", "u1", "a1", "s3", "u2")
    assert render(ANYWHERE, chat_messages(several)) == "[system]s1[system]s2[user]u1[assistant]a1[system]s3[user]u2"
    assert render(CHATML_TOOLS, chat_messages(several)) == render_there(
        CHATML_TOOLS, several, add_generation_prompt=True
    )
    # It is refused with and without them: nothing is known, so nothing is moved.
    assert refusal("{{ raise_exception('no') }}", chat_messages(several)).field == "messages"


def test_templates_that_keep_the_last_of_several_and_those_in_which_roles_take_turns() -> None:
    told = said("s1", "u1", "a1", "s2", "u2")
    moved = said("s1", "u1", "a1", "u2")
    moved[-1]["content"] = "s2\n\nu2"
    for template in (LAST_OF_SEVERAL, MISTRAL_TOOLS):
        expected = render_there(template, moved, add_generation_prompt=True)
        assert render(template, chat_messages(told)) == expected and "s1" in expected and "s2" in expected
    moved[0:2] = [{"role": "user", "content": "s1\n\nu1"}]
    assert render(GEMMA, chat_messages(told)) == render_there(GEMMA, moved, add_generation_prompt=True)


def test_a_template_that_shows_it_only_before_the_users_last_message_loses_none_before_a_result() -> None:
    nemo = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% endif %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if s and loop.last and m.role == 'user' %}[system]{{ s }}{% endif %}"
        "[{{ m.role }}]{{ m.content or '' }}{{ m.tool_calls or '' }}{% endfor %}"
    )
    assert render(nemo, chat_messages(said("s1", "u1"))) == "[system]s1[user]u1"
    assert render(nemo, chat_messages(said("s1", "u1", "c1", "t1"))).startswith("[user]s1\n\nu1[assistant]c1")


def test_texts_and_parts_join_and_a_fault_names_the_message_that_was_sent() -> None:
    parts = [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}]
    told = [*said("u1", "a1", "s1"), {"role": "system", "content": parts}, *said("u2")]
    assert render(FIRST_ONLY, chat_messages(told)) == "[user]u1[assistant]a1[user]s1\np1\np2\nu2"
    assert render(PARTS_ONLY, chat_messages(told)) == "user:u1;assistant:a1;system:s1;system:p1p2;user:u2;"
    image = {"role": "user", "content": [{"type": "image", "url": "x"}]}
    field = refusal(FIRST_ONLY, chat_messages([*said("u1", "s1", "s2"), image, *said("a1")])).field
    assert field.startswith("messages.messages[3].content")


def test_a_message_of_the_assistant_is_continued_behind_a_moved_one() -> None:
    chat = chat_messages(said("s1", "u1", "s2", "a1"), continue_final_message=True)
    assert render(FIRST_ONLY, chat) == "[system]s1[user]u1\n\ns2[assistant]a1"
