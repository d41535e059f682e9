"""Conversations with tools, rendered by the templates of models that llama-cpp-python's source carries.

What transformers makes of a message in any of its forms is held against what is rendered here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.chat_template import ChatTemplate
from specdec.gateway.chat.messages import to_chat_messages
from specdec.wire.errors import InvalidRequest
from tests.support.chat.rendering import SPECIAL

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
ARGUMENTS = '{"city":"Rome","days":3}'
USER = {"role": "user", "content": "Weather?"}
PROPERTIES = {"city": {"type": "string", "description": "A city."}, "days": {"type": "integer", "description": "Days."}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]


def called(content: str | None, arguments: str = ARGUMENTS, call_id: str = "call00001", **more: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def result(content: str = "21 degrees", call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SECOND = [called(None, '{"city":"Oslo"}', "call00002"), result("3 degrees", "call00002")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "null": [USER, called(None), result()],
    "empty": [USER, called(""), result()],
    "text": [USER, called("Let me see."), result()],
    "no arguments": [USER, called(None, "{}"), result()],
    "a result of JSON": [USER, called(None), result('{"t": 21}')],
    "one after the other": [USER, called(None), result(), *SECOND],
    "answered": [USER, called(None), result(), {"role": "assistant", "content": "It is 21."}, USER],
    "a system": [{"role": "system", "content": "Be brief."}, USER, called(None), result()],
    "nothing yet": [USER, called(None)],
    "no tools": [USER, {"role": "assistant", "content": "Fine."}, USER],
    "thoughts": [USER, called(None, reasoning_content="Rome, then."), result()],
    "thoughts and text": [USER, called("Let me see.", reasoning_content="Rome, then."), result()],
}


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


def forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """A conversation in all forms that say the same: contents of calls, arguments, names of reasoning."""
    contents = ({"content": None}, {"content": ""}, {})
    names = (("reasoning_content",), ("reasoning_content", "reasoning", "thinking"), ("reasoning_content", "reasoning"))
    for content, is_text, told in itertools.product(contents, (True, False), names):
        yield [_in_form(message, content, is_text, told) for message in messages]


def _in_form(message: dict[str, Any], content: Any, is_text: bool, names: tuple[str, ...]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    [call] = message["tool_calls"]
    arguments = call["function"]["arguments"]
    function = {**call["function"], "arguments": arguments if is_text else json.loads(arguments)}
    thought = message.get("reasoning_content")
    fields = {"role": "assistant", "tool_calls": [{**call, "function": function}]}
    fields |= {} if thought is None else dict.fromkeys(names, thought)
    return fields | ({"content": message["content"]} if message["content"] else content)


def render_there(source: str, messages: list[dict[str, Any]]) -> str | None:
    variables = {"tools": TOOLS, "documents": None, "add_generation_prompt": True, **SPECIAL}
    with contextlib.suppress(Exception):  # templates raise what they like
        text: str = _compile_jinja_template(source).render(messages=messages, **variables)
        return text
    return None


def render_here(template: ChatTemplate, messages: list[dict[str, Any]]) -> str | None:
    chat = to_chat_messages(messages, TOOLS)
    with contextlib.suppress(InvalidRequest):
        return template.render(read_conversation(chat, template.reserved_variables), 10**6)
    return None


def num_shown(text: str) -> int:
    """How many of the things that conversations are about a text has beside the description of the tools."""
    return sum(text.count(part) for part in ("Rome", "Oslo", "21 degrees", "3 degrees")) + text.count("get_weather")


def test_public_templates_show_calls_and_results_as_transformers_does_in_the_form_that_shows_most(
    sources: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    faults, as_given, num_rendered = [], 0, 0
    for name, source in sorted(sources.items()):
        template = ChatTemplate({"default": source}, SPECIAL)
        for kind, messages in CONVERSATIONS.items():
            there = [text for text in (render_there(source, form) for form in forms(messages)) if text is not None]
            text = render_here(template, messages)
            num_rendered += text is not None
            as_given += text is not None and text == render_there(source, messages)
            if text is None and there:
                faults.append(f"{name}, {kind}: refused")
            elif text is not None and text not in there:
                faults.append(f"{name}, {kind}: not as transformers renders it in any form")
            elif text is not None and num_shown(text) < max(map(num_shown, there)):
                faults.append(f"{name}, {kind}: another form shows more")
    record_property("rendered", f"{num_rendered} of {len(sources) * len(CONVERSATIONS)}, {as_given} as given")
    assert len(sources) >= 70
    assert not faults, "\n".join(faults)
