"""Conversations rendered by the templates of models that llama-cpp-python's source carries, as transformers does.

A template may take what clients send in another form only. Then the conversation is rendered in a form that says the
same (`CHANGES`), as transformers renders that form.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.gateway.chat.messages import to_chat_messages
from specdec.wire.errors import InvalidRequest
from tests.support.chat.conversations import CHANGES, CONVERSATIONS, NULL, TOOLS, Messages, forms
from tests.support.chat.rendering import SPECIAL
from tests.support.clients.page import ROOT
from tests.support.scripted.model import make_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SHOWN = ("Rome", "Oslo", "21 degrees", "3 degrees", "get_weather", "Fine.", "Zürich", "Be brief.", "Be kind.")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates by name."""
    folder = tmp_path_factory.mktemp("sources")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True, timeout=600)
    [archive] = folder.iterdir()
    with tarfile.open(archive) as opened:
        files = [file for file in opened if file.name.endswith(".jinja")]
        found = {Path(file.name).stem: opened.extractfile(file) for file in files}
        return {name: reader.read().decode() for name, reader in found.items() if reader is not None}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL)


def render_there(source: str, messages: Messages) -> str | None:
    with contextlib.suppress(Exception):  # templates raise what they like
        if any(message.get("content") is NULL for message in messages):
            nulls = [{**one, "content": None} if one.get("content") is NULL else one for one in messages]
            variables = {"documents": None, "add_generation_prompt": True, **SPECIAL}
            told: str = _compile_jinja_template(source).render(messages=nulls, tools=TOOLS, **variables)
            return told
        text: str = tokenizer().apply_chat_template(
            messages, tools=TOOLS, chat_template=source, add_generation_prompt=True, tokenize=False
        )
        return text
    return None


def render_here(template: ChatTemplate, messages: Messages) -> str | None:
    chat = to_chat_messages(messages, TOOLS)
    with contextlib.suppress(InvalidRequest):
        return template.render(read_conversation(chat, template.reserved_variables), 10**6)
    return None


def num_shown(text: str) -> int:
    """How many of the things that conversations are about a text has, beside the description of the tools."""
    return sum(map(text.count, SHOWN))


def compared(source: str, template: ChatTemplate, messages: Messages) -> tuple[str, ...] | str | None:
    """The changes with which transformers renders what is rendered here, or a fault; None if both refuse."""
    text = render_here(template, messages)
    there = [(changes, render_there(source, form)) for changes, form in forms(messages)]
    rendered = [(changes, told) for changes, told in there if told is not None]
    if text is None:
        return "refused" if rendered else None
    if all(text != told for _, told in rendered):
        return "not as transformers renders it in any form"
    if num_shown(text) < max(num_shown(told) for _, told in rendered):
        return "another form shows more"
    return next(changes for changes, told in rendered if told == text)


def test_public_templates_render_conversations_as_transformers_does_in_the_form_that_shows_most(
    sources: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    faults, found = [], collections.Counter[str]()
    for name, source in sorted(sources.items()):
        template = ChatTemplate({"default": source}, SPECIAL)
        for kind, messages in CONVERSATIONS.items():
            outcome = compared(source, template, messages)
            if isinstance(outcome, str):
                faults.append(f"{name}, {kind}: {outcome}")
            elif outcome is None:
                found["refused by both"] += 1
            else:
                found.update(outcome or ["as sent"])
    record_property("found", dict(found))
    assert not faults, "\n".join(faults)
    page = (ROOT / "docs" / "openai-clients.md").read_text()
    [figures] = re.findall(r"(?m)^\| (\d+) templates of (\S+) \| (\d+) conversations \| (\d+) of (\d+)", page)
    total = len(sources) * len(CONVERSATIONS)
    told = (len(sources), f"`{PACKAGE}=={VERSION}`", len(CONVERSATIONS), total - found["refused by both"], total)
    assert figures == tuple(map(str, told))
    documented = re.findall(r"(?m)^- \*\*(.+?)\*\*", page.partition("## Chat templates")[2])
    assert [name.lower() for name in documented] == list(CHANGES)
    assert found.keys() == {"as sent", "refused by both", *CHANGES}
