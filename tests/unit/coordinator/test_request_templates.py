"""Chat templates that a request brings: where they are taken, and in what bounds."""

from __future__ import annotations

import pytest

from specdec.client import chat_messages
from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.request_templates import MOST_TEMPLATE_BYTES, check_request_template
from specdec.wire.errors import InvalidRequest
from tests.support.chat.rendering import USER, refusal, render_there, tokenizer_with
from tests.support.chat.templates import CHATML_TOOLS, PARTS_ONLY

OWN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [CHATML_TOOLS, PARTS_ONLY, None])
def test_a_template_of_a_request_takes_the_place_of_the_models(template: str | None) -> None:
    chat = chat_messages([USER], chat_template=OWN)
    tokenizer = tokenizer_with(template)
    compiled = tokenizer.chat_template(chat.chat_template)
    text = compiled.render(read_conversation(chat, compiled.reserved_variables), 1000)
    assert text == "<s>[user]Hello." == render_there(OWN, [USER])
    assert tokenizer.chat_template(chat.chat_template) is compiled
    assert tokenizer.has_chat_template is (template is not None)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ messages | no_such_filter }}",
        "{{ " + "(" * 30_000,
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% for a in messages %}" * 40 + "{% endfor %}" * 40,
        "{% include 'x' %}{% endif %}",
    ],
)
def test_what_is_no_template_is_refused_by_its_field(source: str) -> None:
    error = refusal(CHATML_TOOLS, chat_messages([USER], chat_template=source))
    assert error.field == "messages.chat_template"
    assert 0 < len(error.description) < 400


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}", "{{ messages.append(1) }}"],
)
def test_a_template_of_a_request_is_in_the_same_sandbox(source: str) -> None:
    assert refusal(CHATML_TOOLS, chat_messages([USER], chat_template=source)).field == "messages"


def test_templates_of_requests_that_were_used_least_lately_are_forgotten() -> None:
    tokenizer = tokenizer_with(CHATML_TOOLS)
    first, second = tokenizer.chat_template("first"), tokenizer.chat_template("second")
    for index in range(14):
        tokenizer.chat_template(f"{index}")
    assert tokenizer.chat_template("first") is first
    tokenizer.chat_template("one more")
    assert tokenizer.chat_template("first") is first
    assert tokenizer.chat_template("second") is not second


def test_a_template_of_a_request_must_be_trusted_and_is_no_larger_than_its_limit() -> None:
    check_request_template("x" * MOST_TEMPLATE_BYTES, True)
    for source, is_trusted, message in (("x", False, "trust_request_chat_template"), ("é" * 40_000, True, "limit of")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            check_request_template(source, is_trusted)
        assert caught.value.field == "messages.chat_template"
