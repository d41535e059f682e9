"""Conversations rendered as transformers renders them, in a sandbox, and within bounds."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.client import chat_messages
from specdec.coordinator.text import chat_template
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import coordinator_pb2 as api
from tests.support.chat.rendering import USER, refusal, render, render_there, tokenizer_with
from tests.support.chat.templates import CHATML_TOOLS, DEEPSEEK_R1, FAMILIES, GEMMA, LLAMA3_TOOLS, PARTS, PARTS_ONLY
from tests.support.for_each import for_each
from tests.support.scripted.model import make_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds <things>.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}, "n": {"type": "integer"}}},
    },
}


texts = st.text(st.sampled_from("ab é🙂<|>\n \t{}'\"\\&"), max_size=12)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a1b2c3d4e", "short"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["look_up", "f"]),
                    "arguments": st.dictionaries(st.sampled_from(["what", "n"]), texts | st.integers() | st.none()),
                }
            ),
        }
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns as chats have them, with rounds of tools in them, and at times a role too many."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            made = draw(calls)
            messages.append({"role": "assistant", "content": draw(texts | st.none()), "tool_calls": made})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in made]
        answer = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            answer[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = draw(texts)
        messages.append(answer)
    if draw(st.booleans()) or not messages:
        messages.append({"role": "user", "content": draw(texts)})
    return messages


def rendered_there(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers gives, for an empty content where it gives nothing for null, and without the system's message
    where the template knows none; None: nothing at all.
    """
    for told in (messages, without_system(messages)) if template == GEMMA else (messages,):
        for nothing in (None, ""):
            given = [{**m, "content": nothing} if m["content"] is None else m for m in told]
            with contextlib.suppress(Exception):  # templates raise what they like
                return render_there(template, given, **options)
    return None


def without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the system says first, said by the user."""
    if messages[0]["role"] != "system":
        return messages
    first, *rest = messages
    is_alone = not rest or rest[0]["role"] != "user"
    said, after = ("", rest) if is_alone else (rest[0]["content"], rest[1:])
    return [{"role": "user", "content": "\n\n".join(filter(None, (first["content"], said)))}, *after]


@pytest.mark.parametrize("family", FAMILIES)
@given(
    messages=conversations(),
    tools=st.sampled_from([None, [TOOL]]),
    begin=st.booleans(),
    variables=st.sampled_from([{}, {"enable_thinking": False}, {"documents": [{"title": "t", "text": "é"}]}]),
)
@settings(max_examples=30, deadline=None)
def test_a_conversation_reads_as_transformers_renders_it(
    family: str, messages: list[dict[str, Any]], tools: Any, begin: bool, variables: dict[str, Any]
) -> None:
    template = FAMILIES[family]
    chat = chat_messages(messages, tools=tools, add_generation_prompt=begin, template_variables=variables)
    expected = rendered_there(template, messages, tools=tools, add_generation_prompt=begin, **variables)
    if expected is None:
        assert refusal(template, chat).field == "messages"
    elif expected:
        assert render(template, chat) == expected


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi"])
@given(before=conversations(), content=texts, variables=st.sampled_from([{}, {"enable_thinking": False}]))
@settings(max_examples=30, deadline=None)
def test_a_message_is_continued_as_transformers_continues_it(
    family: str, before: list[dict[str, Any]], content: str, variables: dict[str, Any]
) -> None:
    messages = [*before, {"role": "assistant", "content": content}]
    chat = chat_messages(messages, continue_final_message=True, template_variables=variables)
    expected = rendered_there(FAMILIES[family], messages, continue_final_message=True, **variables)
    if expected is None:
        refusal(FAMILIES[family], chat)
    elif expected:
        assert render(FAMILIES[family], chat) == expected


def test_the_last_message_is_continued_whatever_the_conversation_says() -> None:
    sly = "CONTINUE_FINAL_MESSAGE_TAG "
    messages = [{"role": "user", "content": sly}, {"role": "assistant", "content": f"def f({sly}"}]
    text = render(CHATML_TOOLS, chat_messages(messages, continue_final_message=True))
    assert text.endswith(f"<|im_start|>assistant\ndef f({sly}")


def test_a_content_that_the_template_changes_is_not_continued() -> None:
    cases = [
        (DEEPSEEK_R1, "<think>hm</think>Well"),
        ("{{ messages[-1].content | upper }}", "abc"),
        ("{{ messages[0].content }}", "abc"),
    ]
    for template, content in cases:
        chat = chat_messages([USER, {"role": "assistant", "content": content}], continue_final_message=True)
        assert refusal(template, chat).field == "messages.continue_final_message"
    nothing = chat_messages([USER, {"role": "assistant", "tool_calls": []}], continue_final_message=True)
    assert refusal(CHATML_TOOLS, nothing).field == "messages.continue_final_message"


def test_parts_are_continued_at_the_last_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    chat = chat_messages([USER, {"role": "assistant", "content": parts}], continue_final_message=True)
    assert render(PARTS, chat) == "[user]Hello.[end][assistant]ab "


def test_a_turn_begins_by_default_unless_the_last_message_goes_on() -> None:
    for begin, expected in ((None, True), (True, True), (False, False)):
        text = render(CHATML_TOOLS, chat_messages([USER], add_generation_prompt=begin))
        assert text.endswith("<|im_start|>assistant\n") is expected
    both = chat_messages([USER], add_generation_prompt=True, continue_final_message=True)
    assert refusal(CHATML_TOOLS, both).field == "messages.add_generation_prompt"


def test_parts_reach_a_template_that_takes_them_and_are_lines_of_text_for_one_that_does_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = chat_messages([{"role": "user", "content": parts}])
    assert render(PARTS, chat) == "[user]ab[end]"
    assert render(PARTS_ONLY, chat) == "user:ab;"
    assert "<start_of_turn>user\na\nb<end_of_turn>" in render(GEMMA, chat)
    assert "<|im_start|>user\na\nb<|im_end|>" in render(CHATML_TOOLS, chat)


def test_a_text_becomes_a_part_where_the_template_takes_nothing_else() -> None:
    assert (
        render(PARTS_ONLY, chat_messages([USER, {"role": "assistant", "content": "Hi"}])) == "user:Hello.;assistant:Hi;"
    )


def test_an_empty_text_becomes_a_part_where_the_template_refuses_it() -> None:
    refuses = """{% for m in messages %}{% if not m.content %}{{ raise_exception('nothing is said') }}{% endif %}
{{- m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}
{%- endif %};{% endfor %}"""
    said = [USER, {"role": "assistant", "content": ""}, USER]
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": ""}]}, USER]
    assert render(refuses, chat_messages(said)) == render_there(refuses, parts)
    assert render(refuses, chat_messages(said[::2])) == render_there(refuses, said[::2])


def test_what_a_template_takes_is_found_for_each_role() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert render(template, chat_messages(asked)) == "a\nb.a\nb."
    template = template.replace("m.content + '.'", "m.content + ''")
    assert render(template, chat_messages(asked)) == "a\nbab"


def test_a_part_without_text_is_refused_by_its_place_where_the_template_takes_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "url": "x"}]
    chat = chat_messages([USER, {"role": "user", "content": parts}])
    assert refusal(CHATML_TOOLS, chat).field == "messages.messages[1].content[1]"
    assert render(PARTS, chat).endswith("[user]a<image>[end]")


def test_the_template_for_tools_is_taken_when_there_are_tools() -> None:
    named = [
        {"name": "default", "template": "plain {{ tools is none }}"},
        {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
    ]
    assert render(named, chat_messages([USER])) == "plain True"
    assert render(named, chat_messages([USER], tools=[])) == "plain True"
    assert render(named, chat_messages([USER], tools=[TOOL])) == "with look_up"
    assert tokenizer_with(named[1:]).has_chat_template is False


def test_fields_take_the_place_of_what_stands_beside_them_but_the_role() -> None:
    message = api.ChatMessage(role="user", content="a", fields_json='{"content": "b", "name": "n"}')
    assert render("{{ messages[0] | tojson }}", api.ChatMessages(messages=[message])) == json.dumps(
        {"role": "user", "content": "b", "name": "n"}
    )
    message.fields_json = '{"role": "system"}'
    field = refusal("{{ messages }}", api.ChatMessages(messages=[message])).field
    assert field == "messages.messages[0].fields_json.role"
    message.role = ""
    assert refusal("{{ messages }}", api.ChatMessages(messages=[message])).field == "messages.messages[0].role"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": NaN}', "not a JSON number"),
        ('{"a": -Infinity}', "not a JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "deeper"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "deeper"),
        ('{"a": [' + "0," * 100_000 + "0]}", "more than 100000 values"),
    ],
    ids=lambda value: value[:12],
)
def test_json_that_is_bad_is_refused_by_its_field(text: str, fault: str) -> None:
    in_message = api.ChatMessages(messages=[api.ChatMessage(role="user", fields_json=text)])
    error = refusal(CHATML_TOOLS, in_message)
    assert error.field == "messages.messages[0].fields_json"
    assert fault in error.description
    in_variables = api.ChatMessages(messages=[api.ChatMessage(role="user")], template_variables_json=text)
    assert refusal(CHATML_TOOLS, in_variables).field == "messages.template_variables_json"


@pytest.mark.parametrize(("tools", "field"), [("{}", "tools_json"), ("[1]", "tools_json[0]"), ("[", "tools_json")])
def test_tools_are_a_list_of_objects(tools: str, field: str) -> None:
    chat = api.ChatMessages(messages=[api.ChatMessage(role="user")], tools_json=tools)
    assert refusal(CHATML_TOOLS, chat).field == f"messages.{field}"


def test_all_json_of_a_conversation_has_one_bound() -> None:
    many = json.dumps({"a": [0] * 60_000})
    messages = [api.ChatMessage(role="user", fields_json=many)] * 2
    assert refusal(CHATML_TOOLS, api.ChatMessages(messages=messages)).field == "messages.messages[1].fields_json"


@for_each("name", ["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token",
     "mask_token", "chat_template", "namespace", "self", "_x", "a b", ""])  # fmt: skip
def test_variables_shadow_nothing_of_the_template(name: str) -> None:
    chat = chat_messages([USER], template_variables={name: "x"})
    assert refusal(CHATML_TOOLS, chat).field == f"messages.template_variables_json.{name}"


def test_half_a_surrogate_pair_is_refused() -> None:
    message = api.ChatMessage(role="user", fields_json='{"content": "\\ud800"}')
    assert refusal(CHATML_TOOLS, api.ChatMessages(messages=[message])).field == "messages"


def test_rendering_stops_at_the_bound() -> None:
    pieces = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(chat_template.RenderedTooLong, match="limit of 1000 bytes"):
        render(pieces, chat_messages([USER]), 1000)
    assert render("{{ messages[0].content }}", chat_messages([{"role": "user", "content": "é" * 500}]), 1000)
    with pytest.raises(chat_template.RenderedTooLong):
        render("{{ messages[0].content }}", chat_messages([{"role": "user", "content": "é" * 501}]), 1000)


def test_a_template_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MOST_RENDER_S", 0.0)
    assert "takes longer than 0 s" in refusal("{{ messages[0].content }}", chat_messages([USER])).description


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('not so') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].role.upper() }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ range(10**9) }}",
        "{{ messages.nothing() }}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal_of_the_messages(template: str) -> None:
    error = refusal(template, chat_messages([USER]))
    assert error.field == "messages"
    assert "the chat template refused the conversation" in error.description


def test_chat_templates_render_with_the_usual_whitespace_rules_and_functions() -> None:
    template = (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}"
    )
    text = render(template, chat_messages([{"role": "skip", "content": "x"}, {"role": "user", "content": "é<&>"}]))
    assert text.split() == ["<s>", '{"role":', '"user",', '"content":', '"é<&>"}']


def test_a_chat_template_cannot_reach_out_of_its_sandbox() -> None:
    error = refusal("{{ messages.__class__.__mro__[1].__subclasses__() }}", chat_messages([USER]))
    assert "unsafe" in error.description


DOCUMENTS = (
    "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{% else %}none{% endif %}"
)


@pytest.mark.parametrize("documents", [None, [], [{"title": "a", "text": "é"}, {"title": "b", "text": "c"}]])
def test_documents_reach_the_template(documents: list[dict[str, str]] | None) -> None:
    found = render(DOCUMENTS, chat_messages([USER], documents=documents))
    assert found == render_there(DOCUMENTS, [USER], documents=documents)
    if documents is not None:
        assert found == render(DOCUMENTS, chat_messages([USER], template_variables={"documents": documents}))


def test_documents_are_told_in_one_way() -> None:
    chat = chat_messages([USER], documents=[], template_variables={"documents": []})
    assert refusal(DOCUMENTS, chat).field == "messages.template_variables_json.documents"


@pytest.mark.parametrize(("text", "at"), [("{}", ""), ('["a"]', "[0]"), ("[", ""), ("[[]]", "[0]")])
def test_documents_are_a_list_of_objects(text: str, at: str) -> None:
    chat = api.ChatMessages(messages=[api.ChatMessage(role="user")], documents_json=text)
    assert refusal(DOCUMENTS, chat).field == f"messages.documents_json{at}"


def test_the_tokenizer_tells_its_tokens_and_template() -> None:
    tokenizer = tokenizer_with(LLAMA3_TOOLS, pad_token={"content": "<pad>", "special": True}, mask_token="<mask>")
    info = tokenizer.describe()
    assert (info.bos_token, info.eos_token, info.pad_token) == ("<s>", "</s>", "<pad>")
    assert not info.HasField("unk_token")
    assert info.chat_template == LLAMA3_TOOLS
    assert info.vocab_size == make_tokenizer().get_vocab_size() + len({"<s>", "</s>", "<pad>", "<mask>"})
    assert not TextTokenizer(make_tokenizer().to_str(), {}).describe().HasField("chat_template")
